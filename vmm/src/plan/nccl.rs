//! NCCL's topology file for the guest: the host's tree under the guest's addresses.
//!
//! NCCL reads paths from sysfs, where a guest shows emulated ports with emulated link speeds. A file that
//! `NCCL_TOPO_FILE` names (default `/var/run/nvidia-topologyd/virtualTopology.xml`) comes first; what it leaves out, CPU
//! model and GPU details, NCCL fills in itself (`src/graph/xml.cc`, version 1).

use std::fmt::Write;

use egm_address::{CpuSet, PciAddress};
use egm_vfio::host::HostFunction;
use egm_vfio::topology::{self, Link, upstream_port};

use crate::config::Architecture;
use crate::facts::Facts;
use crate::plan::{AssignedPlan, FunctionPlan, FunctionRole, Plan};

/// A host function and where the guest sees it.
struct Assigned<'a> {
    guest: &'a FunctionPlan,
    plan: &'a AssignedPlan,
    host: &'a HostFunction,
}

/// The file, a `cpu` for each node with processors and host functions near it.
pub fn nccl(plan: &Plan, facts: &Facts) -> String {
    let assigned = plan.pci.iter().filter_map(|guest| match &guest.role {
        FunctionRole::Endpoint { assigned: Some(plan), .. } => {
            Some(Assigned { guest, plan, host: topology::find(&facts.functions, plan.function)? })
        }
        _ => None,
    });
    let assigned: Vec<Assigned<'_>> = assigned.collect();
    let arch = match plan.arch {
        Architecture::X86_64 => "x86_64",
        Architecture::Aarch64 => "arm64",
    };
    let mut writer = Writer { plan, facts, out: "<system version=\"1\">\n".to_owned() };
    for node in plan.nodes.iter().filter(|node| !node.cpus.is_empty()) {
        let here = |one: &&Assigned<'_>| processors_near(plan, one.plan.node) == Some(node.id);
        let here: Vec<&Assigned<'_>> = assigned.iter().filter(here).collect();
        if here.is_empty() {
            continue;
        }
        let affinity = mask(&node.cpus);
        let _ =
            writeln!(writer.out, "  <cpu numaid=\"{}\" affinity=\"{affinity}\" arch=\"{arch}\">", node.id);
        writer.below(&here, 0, 2);
        writer.out.push_str("  </cpu>\n");
    }
    writer.out + "</system>\n"
}

/// The node with processors nearest to `node`, the first for one that is not known: memory of a slice has none.
fn processors_near(plan: &Plan, node: Option<u32>) -> Option<u32> {
    let row = plan.nodes.iter().position(|known| Some(known.id) == node).unwrap_or(0);
    let distances = plan.distances.get(row)?;
    let near = plan.nodes.iter().zip(distances).filter(|(other, _)| !other.cpus.is_empty());
    near.min_by_key(|(_, distance)| **distance).map(|(other, _)| other.id)
}

struct Writer<'a> {
    plan: &'a Plan,
    facts: &'a Facts,
    out: String,
}

impl Writer<'_> {
    /// Functions below the switches above so far: `depth` upstream ports of the host's.
    fn below(&mut self, here: &[&Assigned<'_>], depth: usize, indent: usize) {
        let mut done: Vec<PciAddress> = Vec::new();
        for one in here {
            match upstream_port(one.host, depth) {
                None => self.function(one, indent),
                Some(switch) if done.contains(&switch) => {}
                Some(switch) => {
                    done.push(switch);
                    let inside: Vec<&Assigned<'_>> = here
                        .iter()
                        .copied()
                        .filter(|other| upstream_port(other.host, depth) == Some(switch))
                        .collect();
                    self.switch(switch, &inside, depth, indent);
                }
            }
        }
    }

    fn switch(&mut self, switch: PciAddress, inside: &[&Assigned<'_>], depth: usize, indent: usize) {
        let guest = inside.first().and_then(|one| self.mirrored(one, depth));
        let link = topology::find(&self.facts.functions, switch).and_then(|host| self.link(host));
        // Where the guest has no such switch, an address that no function of it has.
        let address = guest.map_or_else(|| foreign(switch), |address| address.to_string());
        self.open(&address, 0x06_0400, link, indent, ">");
        self.below(inside, depth.saturating_add(1), indent.saturating_add(1));
        let _ = writeln!(self.out, "{}</pci>", "  ".repeat(indent));
    }

    fn function(&mut self, one: &Assigned<'_>, indent: usize) {
        let link = self.link(one.host);
        self.open(&one.guest.address.to_string(), one.host.class, link, indent, "/>");
    }

    fn open(&mut self, address: &str, class: u32, link: Option<LinkSpeed>, indent: usize, end: &str) {
        let pad = "  ".repeat(indent);
        // NCCL takes empty ones for what is usual.
        let speed = link.map_or_else(String::new, |link| link.speed());
        let width = link.map_or_else(String::new, |link| link.width.to_string());
        let _ = writeln!(
            self.out,
            "{pad}<pci busid=\"{address}\" class=\"{class:#08x}\" link_speed=\"{speed}\" link_width=\"{width}\"{end}"
        );
    }

    /// The guest's upstream port above a function in the place of the host's switch number `depth`. The guest has no
    /// switches that nothing else shares at the top, so they are counted from the function.
    fn mirrored(&self, one: &Assigned<'_>, depth: usize) -> Option<PciAddress> {
        let below = (depth..).take_while(|depth| upstream_port(one.host, *depth).is_some()).count();
        self.upstream_ports(one.guest.address).nth(below.checked_sub(1)?)
    }

    /// Upstream ports above a function of the guest, the nearest first.
    fn upstream_ports(&self, function: PciAddress) -> impl Iterator<Item = PciAddress> {
        let above = |below: &FunctionPlan| {
            let leads = |f: &&FunctionPlan| {
                let behind = f.role.bridge().map(|bridge| bridge.secondary);
                f.address.bus() < below.address.bus() && behind == Some(below.address.bus())
            };
            self.plan.pci.iter().find(leads)
        };
        let start = self.plan.pci.iter().find(|f| f.address == function);
        let chain = std::iter::successors(start, move |below| above(below));
        chain.filter(|f| matches!(f.role, FunctionRole::SwitchUpstream { .. })).map(|f| f.address)
    }

    /// Speed and width that both ends of a function's link support.
    fn link(&self, host: &HostFunction) -> Option<LinkSpeed> {
        let own = LinkSpeed::of(host.place.link?);
        let port = host.place.bridges.last().and_then(|port| topology::find(&self.facts.functions, *port));
        let port = port.and_then(|port| port.place.link).map(LinkSpeed::of);
        Some(port.map_or(own, |port| own.least(port)))
    }
}

/// What a link supports.
#[derive(Clone, Copy)]
struct LinkSpeed {
    /// Speed of each lane, in megatransfers per second.
    speed: u32,
    /// Width as a number of lanes.
    width: u8,
}

impl LinkSpeed {
    const fn of(link: Link) -> Self {
        Self { speed: link.max_speed, width: link.max_width }
    }

    fn least(self, other: Self) -> Self {
        Self { speed: self.speed.min(other.speed), width: self.width.min(other.width) }
    }

    /// As sysfs has it.
    fn speed(self) -> String {
        format!("{}.{} GT/s PCIe", self.speed / 1000, self.speed % 1000 / 100)
    }
}

/// The host's address in a segment that the guest does not have.
fn foreign(host: PciAddress) -> String {
    let text = host.to_string();
    format!("ffff{}", text.get(4..).unwrap_or_default())
}

/// As `/sys/devices/system/node/node0/cpumap`: groups of 32 bits, the highest first.
fn mask(cpus: &CpuSet) -> String {
    let words = cpus.iter().max().map_or(1, |last| last / 32 + 1);
    let word = |index: u32| {
        let bits = cpus.iter().filter(|cpu| cpu / 32 == index).map(|cpu| 1u32 << (cpu % 32));
        format!("{:08x}", bits.fold(0, |mask, bit| mask | bit))
    };
    (0..words).rev().map(word).collect::<Vec<_>>().join(",")
}
