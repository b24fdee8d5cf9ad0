//! Peer-to-peer writes of one function to another's BAR: whether they arrive, by which route, and why.
//!
//! Both are behind an IOMMU, and the BAR is mapped in the writer's address space. The address on the wire is the
//! guest's, and only the IOMMU in the root complex can translate it. So a request goes up there and comes back down,
//! unless the writer requested the translation before (ATS) and no port on the route sends it up nevertheless.

use std::fmt;

use egm_address::PciAddress;

use super::placement::{Acs, Port};
use super::relation::common;
use super::{Relation, find, relation};
use crate::host::{HostBarKind, HostFunction};

/// Route of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// The request stays in the switch.
    Direct,
    /// Up to the root port that both are behind, and back.
    Redirected,
    /// From one root port to another: the result depends on the root complex.
    RootComplex,
    /// The request does not arrive.
    Blocked,
}

impl Route {
    /// One letter for a table.
    pub const fn letter(self) -> char {
        match self {
            Self::Direct => 'D',
            Self::Redirected => 'R',
            Self::RootComplex => 'C',
            Self::Blocked => '-',
        }
    }
}

/// Reason for a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The target has nothing to write to.
    NoMemory(PciAddress),
    /// No IOMMU in front of a function.
    NoIommu(PciAddress),
    /// ATS, and a port that lets translated requests pass.
    Translated(PciAddress),
    /// A port sends requests up.
    Redirects(PciAddress),
    /// A port lets requests pass, and the writer has no host addresses.
    Untranslated(PciAddress),
    /// A port refuses translated requests.
    BlocksTranslated(PciAddress),
    /// A table in the port may refuse the target.
    EgressControl(PciAddress),
    /// Configuration space could not be read.
    Unknown(PciAddress),
    /// No switch port lies between the two: they are functions of one device.
    OneDevice,
    /// No common switch, but one host bridge.
    OtherRootPort,
    /// Two host bridges of one NUMA node.
    OtherHostBridge,
    /// Host bridges of two NUMA nodes.
    OtherNode,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory(at) => write!(f, "{at} has no memory BAR"),
            Self::NoIommu(at) => write!(f, "{at} is in no IOMMU group"),
            Self::Translated(at) => write!(f, "ATS, and {at} lets translated requests pass"),
            Self::Redirects(at) => write!(f, "ACS of {at} sends requests to the root complex"),
            Self::Untranslated(at) => write!(
                f,
                "ACS of {at} redirects nothing, and without ATS the address on the wire is the guest's: it stays in the \
                 switch only where the BAR has its host address in the guest"
            ),
            Self::BlocksTranslated(at) => write!(f, "ACS of {at} blocks translated requests"),
            Self::EgressControl(at) => {
                write!(f, "ACS of {at} has an egress control table, which may refuse it")
            }
            Self::Unknown(at) => write!(f, "the ACS state of {at} could not be read: root can"),
            Self::OneDevice => write!(f, "functions of one device: inside it, or by the port above"),
            Self::OtherRootPort => {
                write!(f, "another root port: Xeon and EPYC pass it on, PCI Express does not promise it")
            }
            Self::OtherHostBridge => {
                write!(f, "another host bridge of the same node: it depends on the processor")
            }
            Self::OtherNode => write!(f, "another NUMA node: slow where it works"),
        }
    }
}

/// The verdict on one writer and one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Proximity of the two.
    pub relation: Relation,
    /// Route of the writes.
    pub route: Route,
    /// Reasons for the route, the deciding one first.
    pub reasons: Vec<Reason>,
}

/// Whether and how requests of `from` reach the BARs of `to`.
pub fn peer(functions: &[HostFunction], from: &HostFunction, to: &HostFunction) -> Peer {
    let relation = relation(from, to);
    let verdict = |route, reasons| Peer { relation, route, reasons };
    if !to.bars.iter().any(|bar| bar.kind != HostBarKind::Ports) {
        return verdict(Route::Blocked, vec![Reason::NoMemory(to.address)]);
    }
    if let Some(bare) = [from, to].into_iter().find(|function| function.iommu_group.is_none()) {
        return verdict(Route::Blocked, vec![Reason::NoIommu(bare.address)]);
    }
    match relation {
        Relation::Same | Relation::Pix | Relation::Pxb => match down_ports(functions, from, to).as_slice() {
            [] => verdict(Route::Redirected, vec![Reason::OneDevice]),
            ports => {
                let (route, reasons) = through_switch(from, ports);
                verdict(route, reasons)
            }
        },
        Relation::Phb => verdict(Route::RootComplex, vec![Reason::OtherRootPort]),
        Relation::Node => verdict(Route::RootComplex, vec![Reason::OtherHostBridge]),
        Relation::Sys => verdict(Route::RootComplex, vec![Reason::OtherNode]),
    }
}

/// A switch's port towards devices, and its ACS if that is known.
struct DownPort {
    address: PciAddress,
    known: bool,
    acs: Option<Acs>,
}

/// The downstream ports that a request of `from` passes upwards before it could turn towards `to`.
fn down_ports(functions: &[HostFunction], from: &HostFunction, to: &HostFunction) -> Vec<DownPort> {
    let own = from.place.bridges.iter().enumerate().skip(common(from, to));
    let port = |(position, address): (usize, &PciAddress)| {
        let express = find(functions, *address).and_then(|bridge| bridge.place.express);
        // Below the root port a switch has its upstream port, then a downstream one.
        let downstream = match express {
            Some(express) => express.port == Port::Downstream,
            None => position >= 2 && position.is_multiple_of(2),
        };
        let acs = express.and_then(|express| express.acs);
        downstream.then_some(DownPort { address: *address, known: express.is_some(), acs })
    };
    own.filter_map(port).collect()
}

/// Route of a request that could turn in a switch; `ports` is not empty.
fn through_switch(from: &HostFunction, ports: &[DownPort]) -> (Route, Vec<Reason>) {
    let on = |port: &&DownPort, bit| port.acs.is_some_and(|acs| acs.has(bit));
    let ats = from.place.express.is_some_and(|express| express.ats.is_some());
    let sends_up = |port: &&DownPort| {
        let redirects = on(port, Acs::REQUEST_REDIRECT);
        redirects && !(ats && on(port, Acs::DIRECT_TRANSLATED))
    };
    let mut reasons = Vec::new();
    let route = if let Some(port) = ports.iter().find(|port| ats && on(port, Acs::TRANSLATION_BLOCKING)) {
        reasons.push(Reason::BlocksTranslated(port.address));
        Route::Redirected
    } else if let Some(port) = ports.iter().find(sends_up) {
        reasons.push(Reason::Redirects(port.address));
        Route::Redirected
    } else {
        let first = ports.first().map(|port| port.address).unwrap_or(from.address);
        reasons.push(if ats { Reason::Translated(first) } else { Reason::Untranslated(first) });
        if ats { Route::Direct } else { Route::Redirected }
    };
    reasons.extend(ports.iter().filter(|port| !port.known).map(|port| Reason::Unknown(port.address)));
    let egress = ports.iter().filter(|port| on(port, Acs::EGRESS_CONTROL));
    reasons.extend(egress.map(|port| Reason::EgressControl(port.address)));
    (route, reasons)
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    fn judged(host: &Host, from: PciAddress, to: PciAddress, change: impl Fn(&mut HostFunction)) -> Peer {
        let mut all = host.functions();
        all.iter_mut().for_each(change);
        peer(&all, find(&all, from).unwrap(), find(&all, to).unwrap())
    }

    fn acs(at: &'static str, control: u8) -> impl Fn(&mut HostFunction) {
        move |function| {
            if function.address.to_string() == at {
                let express = function.place.express.as_mut().unwrap();
                express.acs = Some(Acs { capability: 0x7f, control });
            }
        }
    }

    #[test]
    fn redirection_sends_a_gpu_s_requests_through_the_iommu() {
        let host = Host::two_switches();
        let found = judged(&host, host.gpu(0), host.nic(0), |_| {});
        assert_eq!((found.relation, found.route), (Relation::Pix, Route::Redirected));
        assert_eq!(found.reasons[0].to_string(), "ACS of 0000:17:00.0 sends requests to the root complex");
    }

    #[test]
    fn ats_and_direct_translated_keep_a_nic_s_requests_in_the_switch() {
        let host = Host::two_switches();
        let found = judged(&host, host.nic(0), host.gpu(0), acs("0000:17:01.0", 0x5d));
        assert_eq!(
            (found.route, found.reasons),
            (Route::Direct, vec![Reason::Translated("0000:17:01.0".parse().unwrap())])
        );
        let blocked = judged(&host, host.nic(0), host.gpu(0), acs("0000:17:01.0", 0x5f));
        assert_eq!(blocked.route, Route::Redirected);
        assert!(blocked.reasons[0].to_string().ends_with("blocks translated requests"));
    }

    #[test]
    fn without_redirection_and_ats_the_guest_s_address_is_on_the_wire() {
        let host = Host::two_switches();
        let found = judged(&host, host.gpu(0), host.nic(0), acs("0000:17:00.0", 0x20));
        let reasons: Vec<_> = found.reasons.iter().map(ToString::to_string).collect();
        assert!(reasons[0].contains("the address on the wire is the guest's"), "{reasons:?}");
        assert!(reasons[1].contains("egress control"), "{reasons:?}");
    }

    #[test]
    fn a_port_that_could_not_be_read_is_named() {
        let host = Host::two_switches();
        let found = judged(&host, host.gpu(0), host.nic(0), |function| function.place.express = None);
        assert!(found.reasons.contains(&Reason::Unknown("0000:17:00.0".parse().unwrap())), "{found:?}");
    }

    #[test]
    fn other_root_ports_and_nodes_are_distinguished_and_nothing_is_reached_without_an_iommu() {
        let host = Host::two_switches();
        let route = |from, to| judged(&host, from, to, |_| {});
        assert_eq!(route(host.gpu(0), host.disk()).reasons, [Reason::OtherRootPort]);
        assert_eq!(route(host.gpu(0), host.gpu(1)).reasons, [Reason::OtherNode]);
        let bare = judged(&host, host.gpu(0), host.nic(0), |function| function.iommu_group = None);
        assert_eq!((bare.route.letter(), bare.reasons), ('-', vec![Reason::NoIommu(host.gpu(0))]));
        let ports = judged(&host, host.gpu(0), host.nic(0), |function| function.bars.clear());
        assert_eq!(ports.reasons, [Reason::NoMemory(host.nic(0))]);
    }
}
