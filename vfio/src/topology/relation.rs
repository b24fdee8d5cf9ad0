//! Proximity of two functions, in NCCL's terms.

use std::fmt;

use egm_address::PciAddress;

use crate::host::HostFunction;

/// Path between two functions, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Relation {
    /// Both are the same function.
    Same,
    /// One switch, or one device that has both functions.
    Pix,
    /// Several switches, but no host bridge.
    Pxb,
    /// A host bridge, which both are behind.
    Phb,
    /// Two host bridges of one NUMA node.
    Node,
    /// The link between NUMA nodes.
    Sys,
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Same => "X",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// The host bridge of a function: its segment and the number of its first bus.
fn host_bridge(function: &HostFunction) -> (u16, u8) {
    let top = function.place.bridges.first().copied().unwrap_or(function.address);
    (top.segment(), top.bus())
}

/// Number of bridges that both functions are behind.
pub(super) fn common(a: &HostFunction, b: &HostFunction) -> usize {
    a.place.bridges.iter().zip(&b.place.bridges).take_while(|(a, b)| a == b).count()
}

/// Proximity of two functions.
pub fn relation(a: &HostFunction, b: &HostFunction) -> Relation {
    if a.address == b.address {
        return Relation::Same;
    }
    let slot = |f: &HostFunction| (f.address.segment(), f.address.bus(), f.address.device());
    let common = common(a, b);
    let below = |f: &HostFunction| f.place.bridges.len().saturating_sub(common);
    match (common, below(a), below(b)) {
        _ if slot(a) == slot(b) => Relation::Pix,
        // On one bus behind a bridge: one device with many functions.
        (1.., 0, 0) => Relation::Pix,
        (2.., 1, 1) => Relation::Pix,
        (1.., _, _) => Relation::Pxb,
        _ if host_bridge(a) == host_bridge(b) => Relation::Phb,
        // A host with one node does not report it.
        _ if a.numa_node == b.numa_node => Relation::Node,
        _ => Relation::Sys,
    }
}

/// The upstream port of switch number `depth` above `function`, from the root, 0 the first: a switch is two bridges, and
/// above the first is the root port.
pub fn upstream_port(function: &HostFunction, depth: usize) -> Option<PciAddress> {
    let at = depth.checked_mul(2)?.checked_add(1)?;
    // A switch's downstream port is above the function too.
    function.place.bridges.get(at.checked_add(1)?)?;
    function.place.bridges.get(at).copied()
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    #[test]
    fn a_gpu_has_a_nic_behind_its_switch_and_the_rest_further_off() {
        let host = Host::two_switches();
        let all = host.functions();
        let far = |a: PciAddress, b: PciAddress| {
            let find = |address| super::super::find(&all, address).unwrap();
            relation(find(a), find(b)).to_string()
        };
        assert_eq!(far(host.gpu(0), host.gpu(0)), "X");
        assert_eq!(far(host.gpu(0), host.nic(0)), "PIX");
        assert_eq!(far(host.gpu(0), host.deep()), "PXB");
        assert_eq!(far(host.gpu(0), host.disk()), "PHB");
        assert_eq!(far(host.gpu(0), host.gpu(1)), "SYS");
    }

    #[test]
    fn the_switches_above_a_function_are_counted_from_the_root() {
        let host = Host::two_switches();
        let all = host.functions();
        let switch = |of, depth| {
            upstream_port(super::super::find(&all, of).unwrap(), depth).map(|port| port.to_string())
        };
        assert_eq!(switch(host.gpu(0), 0).as_deref(), Some("0000:16:00.0"));
        assert_eq!([switch(host.gpu(0), 1), switch(host.disk(), 0)], [None, None]);
        assert_eq!(switch(host.deep(), 1).as_deref(), Some("0000:1a:00.0"));
        assert_eq!(switch(host.deep(), usize::MAX), None);
    }
}
