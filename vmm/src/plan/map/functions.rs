//! PCI functions of the tree, with their bus numbers and windows.

use egm_address::PciAddress;

use crate::plan::demand::devices::DeviceDemand;
use crate::plan::map::placement::{Placed, Placements};
use crate::plan::map::tree::{Node, Port, ROOT, Tree, What};
use crate::plan::{BridgePlan, ExpanderPlan, FunctionPlan, FunctionRole, PlanError};

/// PCI functions of a guest.
pub(super) struct Functions {
    /// By address; how those of the host are assigned is not decided yet.
    pub(super) all: Vec<FunctionPlan>,
    pub(super) expanders: Vec<ExpanderPlan>,
}

/// The functions of all nodes of `tree`.
pub(super) fn functions(
    devices: &[DeviceDemand<'_>],
    tree: &Tree,
    placed: &Placed,
) -> Result<Functions, PlanError> {
    let mut all = vec![function(0, 0, FunctionRole::HostBridge)?];
    let mut expanders = Vec::new();
    let bridges = bridges(tree, placed);
    let is_root = |node: &&Node| matches!(node.what, What::Port(Port::Root, _) | What::Spare(_));
    let ports = tree.nodes.iter().filter(is_root).count();
    let (mut root_slots, mut slots) = (1.., u16::try_from(ports).unwrap_or(u16::MAX).saturating_add(1)..);
    for (number, node) in tree.nodes.iter().enumerate() {
        let (Some(bridge), Some(above)) = (bridges.get(number).copied(), bridges.get(node.above)) else {
            return Err(PlanError::Internal("a node has no bus"));
        };
        let place = tree.on(node.above).position(|other| other == number).unwrap_or(0);
        // The host bridge is the first on bus 0.
        let place = place.saturating_add(usize::from(node.above == ROOT));
        let place = u8::try_from(place).unwrap_or(u8::MAX);
        let role = match node.what {
            What::Host { near } => {
                expanders.extend(near.map(|node| ExpanderPlan { node, bridge }));
                continue;
            }
            What::Port(Port::Root, _) | What::Spare(_) => {
                FunctionRole::RootPort { slot: root_slots.next().unwrap_or(u16::MAX), bridge }
            }
            What::Port(Port::Upstream, _) => FunctionRole::SwitchUpstream { bridge },
            What::Port(Port::Downstream, _) => {
                FunctionRole::SwitchDownstream { slot: slots.next().unwrap_or(u16::MAX), bridge }
            }
            What::Device(index) => {
                let one = devices.get(index).ok_or(PlanError::Internal("the tree has an unknown device"))?;
                FunctionRole::Endpoint { device: one.device.clone(), assigned: None }
            }
        };
        let mut function = function(above.secondary, place, role)?;
        if let What::Device(index) = node.what {
            let bars = |places: &Placements| places.bars.get(index).cloned().unwrap_or_default();
            function.bars = [bars(&placed.low), bars(&placed.high)].concat();
            function.bars.sort_by_key(|bar| bar.index);
            function.msix_vectors = devices.get(index).map_or(0, |one| one.msix_vectors);
        }
        all.push(function);
    }
    all.sort_by_key(|function| function.address);
    Ok(Functions { all, expanders })
}

/// Buses and windows by node; a device has its bridge's.
fn bridges(tree: &Tree, placed: &Placed) -> Vec<BridgePlan> {
    let has_bus = |node: &&Node| !matches!(node.what, What::Device(_));
    let mut bridges = Vec::new();
    let mut secondary = 0u8;
    for (number, node) in tree.nodes.iter().enumerate() {
        let behind = tree.nodes.get(number..node.end).unwrap_or_default().iter().filter(has_bus).count();
        let last = u8::try_from(behind.saturating_sub(1)).unwrap_or(u8::MAX);
        let acs = match node.what {
            What::Port(_, acs) => acs,
            _ => None,
        };
        bridges.push(BridgePlan {
            secondary,
            subordinate: secondary.saturating_add(last),
            window32: placed.low.span(number),
            window64: placed.high.span(number),
            acs,
        });
        secondary = secondary.saturating_add(u8::from(has_bus(&node)));
    }
    bridges
}

fn function(bus: u8, device: u8, role: FunctionRole) -> Result<FunctionPlan, PlanError> {
    let address = PciAddress::new(0, bus, device, 0);
    let address = address.map_err(|_| PlanError::Internal("a bus has more than 32 places"))?;
    Ok(FunctionPlan { address, role, bars: Vec::new(), msix_vectors: 0 })
}
