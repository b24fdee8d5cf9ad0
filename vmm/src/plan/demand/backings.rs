//! Memory of the host behind the guest's: a backing for each node and slice, and whether the host has all of it.

use std::path::Path;

use egm_address::{CpuSet, align_up};

use crate::config::{Device, DeviceKind, EgmForm, EgmSlice, Node, Spec};
use crate::facts::Facts;
use crate::plan::demand::regions::Source;
use crate::plan::demand::{host_memory, pages, regions};
use crate::plan::{AssignedRule, BackingPlan, PlanError};

/// The backings of nodes with memory of their own, then those of the slices; `sources` has one for each slice.
pub(super) fn of(spec: &Spec, sources: &[Source]) -> Vec<BackingPlan> {
    let nodes = spec.memory.nodes.iter().filter(|node| node.size.get() > 0);
    let slices = spec.egm.iter().zip(sources).enumerate();
    let slices = slices.map(|(index, (slice, source))| slice_backing(spec, index, slice, source));
    nodes.map(|node| node_backing(spec, node)).chain(slices).collect()
}

/// The backing `id` of the only slice of `spec`, for a machine that runs.
///
/// # Errors
/// [`PlanError`].
pub(crate) fn of_slice(id: &str, spec: &Spec, facts: &Facts) -> Result<BackingPlan, PlanError> {
    let missing = || PlanError::Internal("there is no slice");
    let (sources, slice) = (regions::choose(spec, facts)?, spec.egm.first().ok_or_else(missing)?);
    let source = sources.first().ok_or_else(missing)?;
    let mut backing = [BackingPlan { id: id.to_owned(), ..slice_backing(spec, 0, slice, source) }];
    pages::decide(spec, facts, &mut backing);
    check_nodes(&backing, facts)?;
    host_memory::check(&backing, facts)?;
    let [backing] = backing;
    Ok(backing)
}

impl BackingPlan {
    /// Host processors on the nodes that it is bound to.
    pub(crate) fn near(&self, facts: &Facts) -> Option<CpuSet> {
        let nodes = self.host_nodes.as_ref()?;
        let near = facts.nodes.iter().filter(|node| nodes.contains(node.id));
        Some(near.flat_map(|node| node.cpus.iter()).collect()).filter(|cpus: &CpuSet| !cpus.is_empty())
    }
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

/// Checks that the host has the memory and the huge pages, and that servers may have what is shared with them. Returns notes
/// on memory that it has, but not free.
///
/// # Errors
/// [`PlanError`].
pub(super) fn check(spec: &Spec, facts: &Facts, backings: &[BackingPlan]) -> Result<Vec<String>, PlanError> {
    check_nodes(backings, facts)?;
    let not_free = host_memory::check(backings, facts)?;
    check_shareable(spec, facts, backings)?;
    Ok(not_free)
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
