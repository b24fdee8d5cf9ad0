//! The guest node that a host function is near to.

use egm_address::CpuSet;
use egm_device::region::Region;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, upstream_port};

use crate::config::distance::LOCAL;
use crate::config::{DeviceKind, Node, Spec};
use crate::facts::Facts;
use crate::plan::demand::regions::Source;

/// In this order: the EGM node of the function's own slice, which its driver looks for; the only node; the node with
/// the memory nearest to the function's host node. Memory that may come from anywhere is near nothing.
pub(super) fn guest_node(spec: &Spec, facts: &Facts, sources: &[Source], host: &HostFunction) -> Option<u32> {
    egm_node(spec, facts, sources, host).or_else(|| match spec.memory.nodes.as_slice() {
        [only] => Some(only.id),
        _ => nearest(spec, facts, sources, host.numa_node?),
    })
}

/// What shares a switch with such a function stays with it: a switch is behind one host bridge.
fn egm_node(spec: &Spec, facts: &Facts, sources: &[Source], host: &HostFunction) -> Option<u32> {
    let switch = upstream_port(host, 0);
    let shares = |other: &&HostFunction| {
        other.address == host.address || switch.is_some() && upstream_port(other, 0) == switch
    };
    let assigned = spec.devices.iter().filter_map(|device| match device.kind {
        DeviceKind::Vfio { function, .. } => topology::find(&facts.functions, function).filter(shares),
        _ => None,
    });
    assigned.filter_map(|function| own_slice(spec, facts, sources, function)).next()
}

fn own_slice(spec: &Spec, facts: &Facts, sources: &[Source], host: &HostFunction) -> Option<u32> {
    let serves = |source: &Source| {
        region(facts, source).is_some_and(|region| region.functions.contains(&host.address))
    };
    spec.egm.iter().zip(sources).find(|(_, source)| serves(source)).map(|(slice, _)| slice.node)
}

/// The region that a slice comes from, if any.
fn region<'a>(facts: &'a Facts, source: &Source) -> Option<&'a Region> {
    facts.region(source.region.as_ref()?).map(|host| &host.region)
}

fn nearest(spec: &Spec, facts: &Facts, sources: &[Source], from: u32) -> Option<u32> {
    let row = &facts.nodes.iter().find(|node| node.id == from)?.distances;
    let distance = |to: u32| match facts.nodes.iter().position(|node| node.id == to) {
        _ if to == from => LOCAL,
        position => position.and_then(|at| row.get(at).copied()).unwrap_or(u8::MAX),
    };
    let farthest = |nodes: &CpuSet| nodes.iter().map(distance).max();
    let of_slice = |id: u32| {
        let (index, _) = spec.slice_of(id)?;
        region(facts, sources.get(index)?)?.node
    };
    let host_distance = |node: &Node| match &node.host_nodes {
        Some(nodes) => farthest(nodes),
        None => of_slice(node.id).map(distance),
    };
    let bound = spec.memory.nodes.iter().map(|node| (host_distance(node), node.id));
    let all_bound = bound.clone().all(|(distance, _)| distance.is_some());
    let near = bound.filter_map(|(distance, id)| Some((distance?, id))).min();
    near.filter(|(distance, _)| all_bound || *distance == LOCAL).map(|(_, id)| id)
}
