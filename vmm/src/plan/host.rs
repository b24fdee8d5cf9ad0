//! Whether the host has what the plan takes.

use egm_address::CpuSet;

use crate::arch::layout_of;
use crate::config::{Architecture, PageSize, Spec};
use crate::facts::{Facts, HostMemory, HostNode};
use crate::plan::{BackingPlan, PlanError, VcpuPlan};

/// Whether guests with the instruction set `wanted` run on a `host`.
///
/// # Errors
/// [`PlanError::Architecture`].
pub(crate) fn check_architecture(wanted: Architecture, host: Architecture) -> Result<(), PlanError> {
    if wanted == host {
        return Ok(());
    }
    Err(PlanError::Architecture { wanted: layout_of(wanted).name, host: layout_of(host).name })
}

/// Whether the host is of the guest's kind and runs that many vCPUs.
pub(super) fn check_target(spec: &Spec, facts: &Facts) -> Result<(), PlanError> {
    check_architecture(spec.arch, facts.arch)?;
    match facts.kvm.present() {
        Some(kvm) if spec.cpus.count > kvm.max_vcpus => {
            Err(PlanError::Vcpus { count: spec.cpus.count, max: kvm.max_vcpus })
        }
        _ => Ok(()),
    }
}

/// Whether the host has the CPUs that vCPUs are pinned to.
pub(super) fn check_cpus(vcpus: &[VcpuPlan], facts: &Facts) -> Result<(), PlanError> {
    let cpus: CpuSet = facts.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
    let pinned = vcpus.iter().flat_map(|vcpu| vcpu.host_cpus.iter().map(move |set| (vcpu.index, set)));
    for (vcpu, set) in pinned {
        if let Some(cpu) = set.iter().find(|cpu| !cpus.contains(*cpu)) {
            return Err(PlanError::HostCpu { vcpu, cpu, cpus });
        }
    }
    Ok(())
}

/// Whether the host has the memory and the huge pages.
pub(super) fn check_backings(backings: &[BackingPlan], facts: &Facts) -> Result<(), PlanError> {
    let known: CpuSet = facts.nodes.iter().map(|node| node.id).collect();
    for backing in backings {
        let missing = backing.host_nodes.iter().flat_map(CpuSet::iter).find(|node| !known.contains(*node));
        if let Some(node) = missing {
            return Err(PlanError::HostNode { what: backing.id.clone(), node, nodes: known });
        }
    }
    let local: Vec<&BackingPlan> = backings.iter().filter(|backing| backing.region.is_none()).collect();
    check_pools(&local, facts)?;
    check_memory(&local, facts)
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
    let mut wanted: Vec<(Option<&CpuSet>, u64)> = Vec::new();
    let small: Vec<_> = backings.iter().filter(|backing| !backing.page_size.is_hugetlb()).collect();
    let all = small.iter().fold(0u64, |sum, backing| sum.saturating_add(backing.size));
    for backing in &small {
        let Some(nodes) = backing.host_nodes.as_ref() else { continue };
        match wanted.iter_mut().find(|(set, _)| *set == Some(nodes)) {
            Some((_, size)) => *size = size.saturating_add(backing.size),
            None => wanted.push((Some(nodes), backing.size)),
        }
    }
    wanted.push((None, all));
    let prefault = small.iter().any(|backing| backing.prefault);
    for (nodes, needed) in wanted {
        let of = |node: &&HostNode| nodes.is_none_or(|nodes| nodes.contains(node.id));
        let pools: u64 = facts
            .nodes
            .iter()
            .filter(of)
            .flat_map(|node| &node.pools)
            .map(|pool| pool.total.saturating_mul(pool.page_size.bytes()))
            .fold(0, u64::saturating_add);
        let (total, available) = match nodes {
            None => (facts.memory.total.get(), facts.memory.available.get()),
            Some(_) => facts.nodes.iter().filter(of).fold((0u64, 0u64), |(total, available), node| {
                let HostMemory { total: t, available: a } = node.memory;
                (total.saturating_add(t.get()), available.saturating_add(a.get()))
            }),
        };
        let total = total.saturating_sub(pools);
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

fn scope(nodes: Option<&CpuSet>) -> String {
    nodes.map_or_else(|| "the host".to_owned(), |nodes| format!("host node {nodes}"))
}
