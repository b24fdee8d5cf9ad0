//! The tree of bridges, the devices behind each, and the numbers of buses.
//!
//! ```text
//!  00:00.0 host bridge
//!  00:01.0 root port ── 01:00.0 first device that asks for a port
//!  00:02.0 root port ── 02:00.0 switch ─ 03:00.0 port ── 04:00.0 host functions that share a switch there
//!                                      └ 03:01.0 port ── 05:00.0 switch ─ 06:00.0 port ── 07:00.0 and one further down
//!  00:03.0 root port ── spare
//!  00:04.0 first device that does not ask, …
//!  08:00.0 root port ── 09:00.0 host functions near another node: an expander, a host bridge of its own
//! ```
//!
//! Buses are numbered as the list of nodes runs: everything behind a bridge follows it.

use egm_address::PciAddress;
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, Acs, upstream_port};

use crate::config::{PciTopology, SparePorts};
use crate::plan::PlanError;
use crate::plan::demand::Demand;
use crate::plan::demand::devices::DeviceDemand;

/// Device numbers on a bus.
const BUS_PLACES: usize = 32;
/// Number of the node that is bus 0.
pub(super) const ROOT: usize = 0;

/// Kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// The bus of a host bridge, the first of which is bus 0; near a guest node.
    Host { near: Option<u32> },
    /// A port, with the Access Control Services of its counterpart on the host.
    Port(Port, Option<Acs>),
    /// A root port with nothing behind it.
    Spare(SparePorts),
    /// The device with this number in the configuration.
    Device(usize),
}

/// Kind of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Port {
    Root,
    Upstream,
    Downstream,
}

/// A place of the tree.
pub(super) struct Node {
    pub(super) what: What,
    /// Number of the node that owns the bus it is on; a host bridge is on its own.
    pub(super) above: usize,
    /// One past the number of the last node behind it.
    pub(super) end: usize,
}

/// All nodes; each is followed by those behind it.
pub(super) struct Tree {
    pub(super) nodes: Vec<Node>,
}

/// Devices that share a switch of the host, or a device alone.
struct Group {
    /// Upstream port of that switch.
    switch: Option<PciAddress>,
    /// Number of that switch among those above a member, from the root.
    depth: usize,
    members: Vec<usize>,
}

impl Tree {
    /// Numbers of the nodes on the bus of node `number`.
    pub(super) fn on(&self, number: usize) -> impl Iterator<Item = usize> {
        let end = self.nodes.get(number).map_or(0, |node| node.end);
        let below = number.saturating_add(1)..end;
        below.filter(move |below| self.nodes.get(*below).is_some_and(|node| node.above == number))
    }

    /// The devices behind node `number`, or itself.
    pub(super) fn devices(&self, number: usize) -> impl Iterator<Item = usize> {
        let end = self.nodes.get(number).map_or(0, |node| node.end);
        self.nodes.get(number..end).unwrap_or_default().iter().filter_map(|node| match node.what {
            What::Device(device) => Some(device),
            _ => None,
        })
    }

    /// Nodes with addresses that no other PCI node encloses: those on bus 0, and expanders.
    pub(super) fn tops(&self) -> impl Iterator<Item = usize> {
        self.on(ROOT).chain(self.expanders())
    }

    fn expanders(&self) -> impl Iterator<Item = usize> {
        let host = |(number, node): (usize, &Node)| matches!(node.what, What::Host { .. }).then_some(number);
        self.nodes.iter().enumerate().filter_map(host).filter(|number| *number != ROOT)
    }

    pub(super) fn buses(&self) -> usize {
        self.nodes.iter().filter(|node| !matches!(node.what, What::Device(_))).count()
    }
}

/// The tree of the machine's devices: functions near the first node and what is near none on bus 0, the others each on the bus of an
/// expander for their node. `first` is the node of bus 0.
pub(super) fn tree(demand: &Demand<'_>, first: u32) -> Result<Tree, PlanError> {
    let mut builder = Builder { demand, tree: Tree { nodes: Vec::new() } };
    let elsewhere = |one: &DeviceDemand<'_>| one.node.filter(|node| *node != first && one.device.root_port);
    let mut near: Vec<Option<u32>> = demand.devices.iter().map(elsewhere).collect();
    near.push(None); // bus 0 is there without devices too
    near.sort_unstable();
    near.dedup();
    for near in near {
        let numbers = (0..).zip(&demand.devices).filter(|(_, one)| elsewhere(one) == near);
        let here: Vec<usize> = numbers.map(|(number, _)| number).collect();
        builder.host(near, &here);
    }
    let devices = builder.tree.on(ROOT).count();
    if devices >= BUS_PLACES {
        return Err(PlanError::Bus0 { devices, max: BUS_PLACES - 1 });
    }
    for expander in builder.tree.expanders() {
        let ports = builder.tree.on(expander).count();
        if let Some(What::Host { near: Some(node) }) = builder.tree.nodes.get(expander).map(|node| node.what)
            && ports > BUS_PLACES
        {
            return Err(PlanError::NodeBus(node, ports));
        }
    }
    Ok(builder.tree)
}

struct Builder<'a> {
    demand: &'a Demand<'a>,
    tree: Tree,
}

impl Builder<'_> {
    /// A host bridge with the devices `here`: those with root ports in the order of their first devices, spare ports on
    /// bus 0, then the others.
    fn host(&mut self, near: Option<u32>, here: &[usize]) {
        let host = self.tree.nodes.len();
        self.open(host, What::Host { near });
        let asks = |index: &&usize| self.demand.devices.get(**index).is_some_and(|one| one.device.root_port);
        let (behind, direct): (Vec<&usize>, Vec<&usize>) = here.iter().partition(asks);
        let behind: Vec<usize> = behind.into_iter().copied().collect();
        for group in self.groups(&behind, 0) {
            let group = self.without_lone_switches(group);
            self.port(host, Port::Root, &group);
        }
        if let Some(spare) = self.demand.spec.pcie.spare.filter(|_| host == ROOT) {
            for _ in 0..spare.ports {
                let port = self.open(host, What::Spare(spare));
                self.close(port);
            }
        }
        for index in direct {
            self.device(host, *index);
        }
        self.close(host);
    }

    /// Replaces a top switch with one branch by that branch: such a switch does not show how near devices are.
    fn without_lone_switches(&self, group: Group) -> Group {
        let mut inner = self.groups(&group.members, group.depth.saturating_add(1));
        match inner.pop() {
            Some(only) if group.switch.is_some() && inner.is_empty() => self.without_lone_switches(only),
            _ => group,
        }
    }

    /// Adds a port on the bus of node `above`, and behind it `group`.
    fn port(&mut self, above: usize, kind: Port, group: &Group) {
        let acs = self.acs(kind, group);
        let [first, ..] = group.members.as_slice() else { return };
        if group.switch.is_none() {
            let port = self.open(above, What::Port(kind, acs));
            self.device(port, *first);
            return self.close(port);
        }
        let inside = group.depth.saturating_add(1);
        for part in self.groups(&group.members, inside).chunks(BUS_PLACES) {
            let port = self.open(above, What::Port(kind, acs));
            let switch = self.open(port, What::Port(Port::Upstream, None));
            for group in part {
                self.port(switch, Port::Downstream, group);
            }
            self.close(switch);
            self.close(port);
        }
    }

    /// `members` by the host's switch number `depth` above them, from the root.
    fn groups(&self, members: &[usize], depth: usize) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for &member in members {
            let host = self.host_function(member).filter(|_| self.mirrors());
            let switch = host.and_then(|host| upstream_port(host, depth));
            match groups.iter_mut().find(|group| group.switch.is_some() && group.switch == switch) {
                Some(group) => group.members.push(member),
                None => groups.push(Group { switch, depth, members: vec![member] }),
            }
        }
        groups
    }

    fn host_function(&self, device: usize) -> Option<&HostFunction> {
        self.demand.devices.get(device)?.host
    }

    /// Whether the guest has the host's switches.
    fn mirrors(&self) -> bool {
        self.demand.spec.pcie.topology == PciTopology::Mirror
    }

    /// Access Control Services of the host's root port, or of its port of the switch above that of `group`.
    fn acs(&self, kind: Port, group: &Group) -> Option<Acs> {
        let host = self.host_function(*group.members.first()?).filter(|_| self.mirrors())?;
        let place = match kind {
            Port::Root => 0,
            Port::Upstream => return None,
            Port::Downstream => group.depth.saturating_mul(2),
        };
        let port = topology::find(&self.demand.facts.functions, *host.place.bridges.get(place)?)?;
        port.place.express?.acs
    }

    fn device(&mut self, above: usize, device: usize) {
        let node = self.open(above, What::Device(device));
        self.close(node);
    }

    fn open(&mut self, above: usize, what: What) -> usize {
        let number = self.tree.nodes.len();
        self.tree.nodes.push(Node { what, above, end: number });
        number
    }

    fn close(&mut self, number: usize) {
        let end = self.tree.nodes.len();
        if let Some(node) = self.tree.nodes.get_mut(number) {
            node.end = end;
        }
    }
}
