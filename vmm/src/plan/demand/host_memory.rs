//! Whether the host has the memory of the plan, in hugetlb pools and outside them, and whether it is free now.

use egm_address::CpuSet;
use egm_report::show::{first_of, size};

use crate::config::PageSize;
use crate::facts::{Facts, HostMemory, HostNode};
use crate::plan::{BackingPlan, PlanError};

/// Checks that the host has the memory and the huge pages. Returns notes on memory that it has, but not free.
pub(super) fn check(backings: &[BackingPlan], facts: &Facts) -> Result<Vec<String>, PlanError> {
    let local: Vec<&BackingPlan> = backings.iter().filter(|backing| backing.region.is_none()).collect();
    check_pools(&local, facts)?;
    check_ordinary(&local, facts)
}

/// A hugetlb pool as backings take pages from it.
struct PoolLeft {
    node: u32,
    page_size: u64,
    total: u64,
    free: u64,
}

/// Backings that name their nodes take first, from the lowest node on: the others can go anywhere.
fn check_pools(backings: &[&BackingPlan], facts: &Facts) -> Result<(), PlanError> {
    let mut pools: Vec<PoolLeft> = facts
        .nodes
        .iter()
        .flat_map(|node| node.pools.iter().map(|p| (node.id, p)))
        .map(|(node, p)| PoolLeft { node, page_size: p.page_size.get(), total: p.total, free: p.free })
        .collect();
    let mut huge: Vec<_> = backings.iter().filter(|b| b.page_size.is_hugetlb()).collect();
    huge.sort_by_key(|backing| backing.host_nodes.as_ref().map_or(usize::MAX, CpuSet::len));
    for backing in huge {
        take_pages(backing, &mut pools, facts)?;
    }
    Ok(())
}

fn take_pages(backing: &BackingPlan, pools: &mut [PoolLeft], facts: &Facts) -> Result<(), PlanError> {
    let allowed = |pool: &PoolLeft| {
        let node = backing.host_nodes.as_ref().is_none_or(|nodes| nodes.contains(pool.node));
        node && pool.page_size == backing.page_size.bytes()
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
    let page = backing.page_size.bytes();
    let counted = pools.iter().filter(|p| p.page_size == page && node.is_none_or(|n| n == p.node));
    let total = counted.fold(0, |sum: u64, pool| sum.saturating_add(pool.total));
    Err(PlanError::HugePages {
        backing: backing.id.clone(),
        page_size: backing.page_size,
        needed,
        free: needed - missing,
        scope: scope(backing.host_nodes.as_ref()),
        file: format!("/sys/{folder}/hugepages/hugepages-{}kB/nr_hugepages", page >> 10),
        write: total.saturating_add(missing),
        ordinary_fits: backing.size <= Supply::of(backing.host_nodes.as_ref(), facts).available,
    })
}

/// Checks that ordinary pages are enough: never more than there are, and not more than are available when all of them are
/// touched at start.
fn check_ordinary(local: &[&BackingPlan], facts: &Facts) -> Result<Vec<String>, PlanError> {
    let ordinary: Vec<&BackingPlan> =
        local.iter().copied().filter(|backing| !backing.page_size.is_hugetlb()).collect();
    let prefault = ordinary.iter().any(|backing| backing.prefault);
    let mut notes = Vec::new();
    for need in needs(&ordinary) {
        let Supply { total, available } = Supply::of(need.nodes, facts);
        let (has, state) = if prefault && available < total {
            (available, "available")
        } else {
            (total, "in all outside hugetlb pools")
        };
        let needed = need.bytes;
        if needed > has {
            let (scope, remedy) = (scope(need.nodes), need.remedy(local, facts));
            return Err(PlanError::HostMemory { remedy, scope, needed, has, state });
        }
        // A note on one node makes the same note on the whole host needless.
        if needed > available && (need.nodes.is_some() || notes.is_empty()) {
            notes.push(format!(
                "{} for {} is more than the {} that {} has available now: free memory there, or {}",
                size(needed),
                first_of(need.ids.iter().map(|id| (*id).to_owned())),
                size(available),
                scope(need.nodes),
                need.remedy(local, facts)
            ));
        }
    }
    Ok(notes)
}

/// Ordinary memory that comes from the same host nodes.
struct Need<'a> {
    /// The nodes; `None` stands for all ordinary memory of the machine, bound or not.
    nodes: Option<&'a CpuSet>,
    /// Ids of the backings.
    ids: Vec<&'a str>,
    bytes: u64,
}

impl<'a> Need<'a> {
    fn add(&mut self, backing: &'a BackingPlan) {
        self.ids.push(&backing.id);
        self.bytes = self.bytes.saturating_add(backing.size);
    }

    /// Changes of the configuration after which the memory fits.
    fn remedy(&self, local: &[&BackingPlan], facts: &Facts) -> String {
        let slices = self.ids.iter().any(|id| id.starts_with("egm"));
        let keys = if slices { "\"memory.size\" or a slice's \"size\"" } else { "\"memory.size\"" };
        let elsewhere = self.nodes.is_some() && facts.nodes.len() > 1;
        let huge = free_huge_pages(local, facts).and_then(PageSize::hugetlb);
        let ways = [
            Some(format!("lower {keys}")),
            elsewhere.then(|| "bind it to other host nodes with \"host_nodes\"".to_owned()),
            huge.map(|pages| {
                format!("set \"page_size\": \"{pages}\", of which the host has enough free pages")
            }),
        ];
        ways.into_iter().flatten().collect::<Vec<_>>().join(", or ")
    }
}

/// The needs of each set of host nodes, then that of the whole host.
fn needs<'a>(ordinary: &[&'a BackingPlan]) -> Vec<Need<'a>> {
    let mut all = Need { nodes: None, ids: Vec::new(), bytes: 0 };
    let mut bound: Vec<Need<'a>> = Vec::new();
    for &backing in ordinary {
        all.add(backing);
        let Some(nodes) = backing.host_nodes.as_ref() else { continue };
        match bound.iter_mut().find(|need| need.nodes == Some(nodes)) {
            Some(need) => need.add(backing),
            None => {
                bound.push(Need { nodes: Some(nodes), ids: vec![backing.id.as_str()], bytes: backing.size });
            }
        }
    }
    bound.push(all);
    bound
}

/// Huge pages of which the host has enough free ones for all ordinary memory of the machine.
fn free_huge_pages(local: &[&BackingPlan], facts: &Facts) -> Option<PageSize> {
    [PageSize::Size1G, PageSize::Size2M].into_iter().find(|page_size| {
        let huge: Vec<BackingPlan> = local.iter().map(|backing| in_huge_pages(backing, *page_size)).collect();
        let whole = |backing: &BackingPlan| backing.size.is_multiple_of(backing.page_size.bytes());
        let huge_only = huge.iter().all(|backing| !backing.guest_memfd && whole(backing));
        huge_only && check_pools(&huge.iter().collect::<Vec<_>>(), facts).is_ok()
    })
}

/// `backing` in pages of `page_size`, if it is not in huge pages already.
fn in_huge_pages(backing: &BackingPlan, page_size: PageSize) -> BackingPlan {
    let page_size = if backing.page_size.is_hugetlb() { backing.page_size } else { page_size };
    BackingPlan { page_size, ..backing.clone() }
}

/// Memory of host nodes outside hugetlb pools, in bytes.
struct Supply {
    total: u64,
    available: u64,
}

impl Supply {
    /// Memory of `nodes`, or of the whole host.
    fn of(nodes: Option<&CpuSet>, facts: &Facts) -> Self {
        let of = |node: &&HostNode| nodes.is_none_or(|nodes| nodes.contains(node.id));
        let pools: u64 = facts
            .nodes
            .iter()
            .filter(of)
            .flat_map(|node| &node.pools)
            .map(|pool| pool.total.saturating_mul(pool.page_size.get()))
            .fold(0, u64::saturating_add);
        let (total, available) = match nodes {
            None => (facts.memory.total.get(), facts.memory.available.get()),
            Some(_) => facts.nodes.iter().filter(of).fold((0u64, 0u64), |(total, available), node| {
                let HostMemory { total: t, available: a } = node.memory;
                (total.saturating_add(t.get()), available.saturating_add(a.get()))
            }),
        };
        Self { total: total.saturating_sub(pools), available }
    }
}

/// Words for a set of host nodes, or for the whole host.
pub(crate) fn scope(nodes: Option<&CpuSet>) -> String {
    nodes.map_or_else(|| "the host".to_owned(), |nodes| format!("host node {nodes}"))
}
