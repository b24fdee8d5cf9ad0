//! Memory of the host behind the guest's: a backing for each node and slice, and whether the host has all of it.

use std::path::Path;

use egm_address::{ByteSize, CpuSet, align_up};

use crate::config::{Device, DeviceKind, EgmForm, EgmSlice, Node, PageSize, Spec};
use crate::facts::{Facts, HostMemory, HostNode};
use crate::plan::demand::regions::Source;
use crate::plan::{AssignedRule, BackingPlan, PlanError};

/// The backings of nodes with memory of their own, then those of the slices; `sources` has one for each slice.
pub(super) fn of(spec: &Spec, sources: &[Source]) -> Vec<BackingPlan> {
    let nodes = spec.memory.nodes.iter().filter(|node| node.size.get() > 0);
    let slices = spec.egm.iter().zip(sources).enumerate();
    let slices = slices.map(|(index, (slice, source))| slice_backing(spec, index, slice, source));
    nodes.map(|node| node_backing(spec, node)).chain(slices).collect()
}

fn node_backing(spec: &Spec, node: &Node) -> BackingPlan {
    let page_size = spec.memory.page_size;
    BackingPlan {
        id: format!("node{}", node.id),
        region: None,
        guest_memfd: false,
        device: false,
        offset: 0,
        hpa: None,
        size: align_up(node.size.get(), page_size.bytes()).unwrap_or(u64::MAX),
        page_size,
        pages: None,
        host_nodes: node.host_nodes.clone(),
        prefault: spec.memory.prefault,
    }
}

fn slice_backing(spec: &Spec, index: usize, slice: &EgmSlice, source: &Source) -> BackingPlan {
    BackingPlan {
        id: format!("egm{index}"),
        region: source.region.clone(),
        guest_memfd: source.guest_memfd,
        device: slice.form == EgmForm::Device,
        offset: source.offset,
        hpa: source.hpa,
        size: align_up(slice.size.get(), source.page_size.bytes()).unwrap_or(u64::MAX),
        page_size: source.page_size,
        pages: None,
        host_nodes: slice.host_nodes.clone(),
        prefault: spec.memory.prefault,
    }
}

/// Checks that the host has the memory and the huge pages, and that servers may have what is shared with them.
///
/// # Errors
/// [`PlanError`].
pub(super) fn check(spec: &Spec, facts: &Facts, backings: &[BackingPlan]) -> Result<(), PlanError> {
    check_nodes(backings, facts)?;
    let local: Vec<&BackingPlan> = backings.iter().filter(|backing| backing.region.is_none()).collect();
    check_pools(&local, facts)?;
    check_memory(&local, facts)?;
    check_shareable(spec, facts, backings)
}

/// Whether the host has the nodes that backings name.
fn check_nodes(backings: &[BackingPlan], facts: &Facts) -> Result<(), PlanError> {
    let known: CpuSet = facts.nodes.iter().map(|node| node.id).collect();
    for backing in backings {
        let missing = backing.host_nodes.iter().flat_map(CpuSet::iter).find(|node| !known.contains(*node));
        if let Some(node) = missing {
            return Err(PlanError::HostNode { what: backing.id.clone(), node, nodes: known });
        }
    }
    Ok(())
}

/// A hugetlb pool as backings take pages from it.
struct PoolLeft {
    node: u32,
    page_size: PageSize,
    total: u64,
    free: u64,
}

/// Backings that name their nodes take first, from the lowest node on: the others can go anywhere.
fn check_pools(backings: &[&BackingPlan], facts: &Facts) -> Result<(), PlanError> {
    let mut pools: Vec<PoolLeft> = facts
        .nodes
        .iter()
        .flat_map(|node| node.pools.iter().map(|p| (node.id, p)))
        .map(|(node, p)| PoolLeft { node, page_size: p.page_size, total: p.total, free: p.free })
        .collect();
    let mut huge: Vec<_> = backings.iter().filter(|b| b.page_size.is_hugetlb()).collect();
    huge.sort_by_key(|backing| backing.host_nodes.as_ref().map_or(usize::MAX, CpuSet::len));
    for backing in huge {
        take_pages(backing, &mut pools)?;
    }
    Ok(())
}

fn take_pages(backing: &BackingPlan, pools: &mut [PoolLeft]) -> Result<(), PlanError> {
    let allowed = |pool: &PoolLeft| {
        let node = backing.host_nodes.as_ref().is_none_or(|nodes| nodes.contains(pool.node));
        node && pool.page_size == backing.page_size
    };
    let needed = backing.size / backing.page_size.bytes();
    let mut missing = needed;
    for pool in pools.iter_mut().filter(|pool| allowed(pool)) {
        let pages = missing.min(pool.free);
        missing -= pages;
        pool.free -= pages;
    }
    if missing == 0 {
        return Ok(());
    }
    // The first node of a set is the one to fill; without a set the kernel spreads pages itself.
    let node = backing.host_nodes.as_ref().and_then(|nodes| nodes.iter().next());
    let folder =
        node.map_or_else(|| "kernel/mm".to_owned(), |node| format!("devices/system/node/node{node}"));
    let kib = backing.page_size.bytes() >> 10;
    let counted =
        pools.iter().filter(|p| p.page_size == backing.page_size && node.is_none_or(|n| n == p.node));
    let total = counted.fold(0, |sum: u64, pool| sum.saturating_add(pool.total));
    Err(PlanError::HugePages {
        backing: backing.id.clone(),
        page_size: backing.page_size,
        needed,
        free: needed - missing,
        scope: scope(backing.host_nodes.as_ref()),
        file: format!("/sys/{folder}/hugepages/hugepages-{kib}kB/nr_hugepages"),
        write: total.saturating_add(missing),
    })
}

/// Whether ordinary pages are enough: never more than there are, and not more than are available when all of them are
/// touched at start.
fn check_memory(backings: &[&BackingPlan], facts: &Facts) -> Result<(), PlanError> {
    let small: Vec<&BackingPlan> =
        backings.iter().copied().filter(|backing| !backing.page_size.is_hugetlb()).collect();
    let prefault = small.iter().any(|backing| backing.prefault);
    for Need { nodes, bytes: needed } in needs(&small) {
        let Stock { total, available } = Stock::of(facts, nodes);
        let (has, state) = if prefault && available < total {
            (available, "available")
        } else {
            (total, "in all outside hugetlb pools")
        };
        if needed > has {
            let slices = small.iter().any(|backing| backing.id.starts_with("egm"));
            let keys = if slices { "\"memory.size\" or a slice's \"size\"" } else { "\"memory.size\"" };
            let elsewhere = nodes.is_some() && facts.nodes.len() > 1;
            return Err(PlanError::HostMemory { keys, elsewhere, scope: scope(nodes), needed, has, state });
        }
    }
    Ok(())
}

/// Memory that the machine needs from some nodes of the host, or from any.
struct Need<'a> {
    nodes: Option<&'a CpuSet>,
    bytes: u64,
}

/// A need for each set of nodes that backings name, then one for all backings together.
fn needs<'a>(backings: &[&'a BackingPlan]) -> Vec<Need<'a>> {
    let mut needs: Vec<Need<'a>> = Vec::new();
    let mut all = Need { nodes: None, bytes: 0 };
    for backing in backings {
        all.bytes = all.bytes.saturating_add(backing.size);
        let Some(nodes) = backing.host_nodes.as_ref() else { continue };
        match needs.iter_mut().find(|need| need.nodes == Some(nodes)) {
            Some(need) => need.bytes = need.bytes.saturating_add(backing.size),
            None => needs.push(Need { nodes: Some(nodes), bytes: backing.size }),
        }
    }
    needs.push(all);
    needs
}

/// Memory of the host, or of some of its nodes, in bytes.
struct Stock {
    /// All outside hugetlb pools.
    total: u64,
    available: u64,
}

impl Stock {
    fn of(facts: &Facts, nodes: Option<&CpuSet>) -> Self {
        let is_in = |node: &&HostNode| nodes.is_none_or(|nodes| nodes.contains(node.id));
        let memory: Vec<HostMemory> = match nodes {
            None => vec![facts.memory],
            Some(_) => facts.nodes.iter().filter(is_in).map(|node| node.memory).collect(),
        };
        let sum = |all: u64, bytes: ByteSize| all.saturating_add(bytes.get());
        let total = memory.iter().map(|memory| memory.total).fold(0, sum);
        let available = memory.iter().map(|memory| memory.available).fold(0, sum);
        let pools = facts.nodes.iter().filter(is_in).flat_map(|node| &node.pools);
        let pools = pools.map(|pool| pool.total.saturating_mul(pool.page_size.bytes()));
        Self { total: total.saturating_sub(pools.fold(0, u64::saturating_add)), available }
    }
}

fn scope(nodes: Option<&CpuSet>) -> String {
    nodes.map_or_else(|| "the host".to_owned(), |nodes| format!("host node {nodes}"))
}

/// Checks that all memory of the machine can be shared with its servers. A device file would share the whole region,
/// other machines' slices included.
///
/// # Errors
/// [`AssignedRule::ServerMemory`].
fn check_shareable(spec: &Spec, facts: &Facts, backings: &[BackingPlan]) -> Result<(), PlanError> {
    let Some(Served { device, .. }) = served(spec).next() else { return Ok(()) };
    // A device's memory is a BAR: servers do not get it, and a note reports that.
    for backing in backings.iter().filter(|backing| !backing.device) {
        let Some(host) = backing.region.as_ref().and_then(|name| facts.region(name)) else { continue };
        if host.region.kind.shares_file() && !egm_address::fault!("region-file-for-a-server") {
            let (device, backing, region) = (device.id.clone(), backing.id.clone(), host.region.name.clone());
            return Err(AssignedRule::ServerMemory { device, backing, region }.into());
        }
    }
    Ok(())
}

/// A vfio-user device of the machine, and its server's socket.
pub(in crate::plan) struct Served<'a> {
    pub(in crate::plan) device: &'a Device,
    pub(in crate::plan) socket: &'a Path,
}

/// The machine's vfio-user devices, in the order of the configuration.
pub(in crate::plan) fn served(spec: &Spec) -> impl Iterator<Item = Served<'_>> {
    spec.devices.iter().filter_map(|device| match &device.kind {
        DeviceKind::VfioUser { socket } => Some(Served { device, socket }),
        _ => None,
    })
}
