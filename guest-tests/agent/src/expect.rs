//! The part of a plan that the agent holds the guest to.
//!
//! Its JSON is what `egm-vmm plan --json` prints. Fields that no check reads are left out and unknown kinds of
//! devices are `Other`, so that a plan may grow without a new agent; another version is refused.

use std::path::Path;

use egm_address::{CpuSet, Gpa, Guest, PciAddress, Span, SpanSet};
use serde::Deserialize;

use crate::error::Broken;

/// Version of the plan that is understood.
const VERSION: u32 = 1;

/// A virtual machine as planned.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Plan {
    pub(crate) version: u32,
    pub(crate) arch: String,
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) memory: Vec<RamPiece>,
    pub(crate) windows: Vec<Window>,
    pub(crate) pci: Vec<Function>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) distances: Vec<Vec<u8>>,
    pub(crate) lines: Vec<InterruptLine>,
    pub(crate) ports: Vec<Port>,
}

/// A vCPU; Linux numbers them as the plan does.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Vcpu {
    pub(crate) index: u32,
    pub(crate) hardware_id: u32,
    pub(crate) socket: u32,
    pub(crate) core: u32,
    pub(crate) node: u32,
}

/// A piece of RAM.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct RamPiece {
    pub(crate) span: Span<Guest>,
    pub(crate) node: u32,
}

/// Purpose of an address window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WindowKind {
    PciMemory32,
    PciMemory64,
    /// PCI Express configuration space.
    Ecam,
    /// The VMM's own tables.
    Firmware,
    /// Interrupt controllers, devices, reserved.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Window {
    pub(crate) kind: WindowKind,
    pub(crate) label: String,
    pub(crate) span: Span<Guest>,
}

/// Type of a base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BarKind {
    /// 32-bit memory, not prefetchable.
    Memory32,
    /// 64-bit memory, not prefetchable.
    Memory64,
    Memory64Prefetchable,
}

/// A base address register.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Bar {
    pub(crate) index: u8,
    pub(crate) kind: BarKind,
    pub(crate) span: Span<Guest>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Function {
    pub(crate) address: PciAddress,
    pub(crate) role: Role,
    pub(crate) bars: Vec<Bar>,
    pub(crate) msix_vectors: u16,
}

/// Type of a PCI function.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "role", rename_all = "kebab-case")]
pub(crate) enum Role {
    HostBridge,
    /// A root port, or a port of a switch.
    #[serde(alias = "switch-upstream", alias = "switch-downstream")]
    RootPort {
        /// Bus directly behind it.
        secondary: u8,
        /// Highest bus behind it.
        subordinate: u8,
        /// 32-bit window that it forwards.
        window32: Option<Span<Guest>>,
        /// 64-bit window that it forwards.
        window64: Option<Span<Guest>>,
    },
    Endpoint {
        /// The device, by its kind.
        device: Device,
        /// What a host function has beside.
        #[serde(default)]
        passed: Option<PlannedAssignment>,
    },
}

/// Planned properties of a host function.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PlannedAssignment {
    /// The number by which an NVIDIA GPU knows others that it reaches.
    pub(crate) clique: Option<u8>,
    /// The memory of a GPU that processors share.
    #[serde(default)]
    pub(crate) memory: Option<GpuMemory>,
}

/// Location of a GPU's memory.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct GpuMemory {
    /// Numbers of the BARs that are memory.
    pub(crate) bars: Vec<u8>,
}

/// A device of the configuration.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Device {
    pub(crate) id: String,
    pub(crate) kind: DeviceKind,
}

/// Kind of a device, with the properties that checks compare.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub(crate) enum DeviceKind {
    VirtioBlk {
        /// Whether writes are refused.
        read_only: bool,
    },
    VirtioNet {
        mac: [u8; 6],
    },
    VirtioVsock {
        /// The guest's context id on the vsock.
        cid: u32,
    },
    VirtioRng,
    /// Host functions and devices of other processes.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Node {
    pub(crate) id: u32,
    pub(crate) cpus: CpuSet,
    pub(crate) egm: bool,
    pub(crate) access: Vec<Access>,
    /// The GPU that brings its memory.
    #[serde(default)]
    pub(crate) initiator: Option<PciAddress>,
}

/// HMAT figures of a node's memory.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct Access {
    pub(crate) from: u32,
    pub(crate) latency_ns: u32,
    pub(crate) bandwidth_mbps: u32,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct InterruptLine {
    pub(crate) gsi: u32,
    pub(crate) owner: String,
}

/// A range of I/O ports.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Port {
    pub(crate) first: u16,
    pub(crate) count: u16,
}

impl Plan {
    pub(crate) fn read(path: &Path) -> Result<Self, Broken> {
        let text = std::fs::read_to_string(path).map_err(Broken::file("read", path))?;
        let plan: Self =
            serde_json::from_str(&text).map_err(|source| Broken::Plan { path: path.to_owned(), source })?;
        if plan.version == VERSION {
            Ok(plan.counted_as_linux_does())
        } else {
            Err(Broken::PlanVersion(plan.version))
        }
    }

    /// On Arm the memory of the VMM's tables is RAM that the kernel keeps, of the node of the RAM above it (EFI type 9).
    pub(crate) fn counted_as_linux_does(mut self) -> Self {
        let tables = self.windows.iter().position(|window| window.kind == WindowKind::Firmware);
        if let Some((at, first)) = tables.zip(self.memory.first().cloned()).filter(|_| self.arch == "aarch64")
        {
            let span = self.windows.remove(at).span;
            self.memory.insert(0, RamPiece { span, ..first });
        }
        self
    }

    /// Linux's number of the node `id`, `None` for a node without processors and memory.
    ///
    /// Linux numbers proximity domains as it parses the SRAT: those of processors, then those of generic
    /// initiators, then those of memory (`acpi_numa_init`). Without gaps in the ids this is the id.
    pub(crate) fn linux_node(&self, id: u32) -> Option<u32> {
        let initiators = self.nodes.iter().filter(|node| node.initiator.is_some()).map(|node| node.id);
        let met =
            self.vcpus.iter().map(|v| v.node).chain(initiators).chain(self.memory.iter().map(|m| m.node));
        let mut order: Vec<u32> = Vec::new();
        for node in met {
            if !order.contains(&node) {
                order.push(node);
            }
        }
        order.iter().position(|node| *node == id).and_then(|number| u32::try_from(number).ok())
    }

    /// RAM that the guest may use: planned memory without windows, of one node or of all.
    pub(crate) fn usable(&self, node: Option<u32>) -> SpanSet<Guest> {
        let memory: SpanSet<Guest> =
            self.memory.iter().filter(|m| node.is_none_or(|id| m.node == id)).map(|m| m.span).collect();
        memory.minus(&self.windows.iter().map(|w| w.span).collect())
    }

    /// Nodes of EGM memory.
    pub(crate) fn egm_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.egm && self.memory.iter().any(|m| m.node == node.id))
    }

    /// The planned clique of `function`.
    pub(crate) fn clique(function: &Function) -> Option<u8> {
        match &function.role {
            Role::Endpoint { passed, .. } => passed.as_ref()?.clique,
            _ => None,
        }
    }

    /// BARs of GPUs that are memory which processors share.
    pub(crate) fn gpu_memory(&self) -> impl Iterator<Item = (&Function, &Bar)> {
        self.pci.iter().flat_map(|function| {
            let memory = match &function.role {
                Role::Endpoint { passed: Some(passed), .. } => passed.memory.as_ref(),
                _ => None,
            };
            let numbers = memory.map_or(&[][..], |memory| &memory.bars);
            function.bars.iter().filter(|bar| numbers.contains(&bar.index)).map(move |bar| (function, bar))
        })
    }

    /// Devices and where each is.
    pub(crate) fn devices(&self) -> impl Iterator<Item = (&Function, &Device)> {
        self.pci.iter().filter_map(|function| match &function.role {
            Role::Endpoint { device, .. } => Some((function, device)),
            _ => None,
        })
    }
}

/// The first MiB, of which firmware and kernel keep parts on x86.
pub(crate) fn first_mebibyte() -> SpanSet<Guest> {
    Span::between(Gpa::new(0), Gpa::new(1 << 20)).into_iter().collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The plan of the machine that has the fixtures as its `/proc` and `/sys`.
    pub(crate) fn q35() -> Plan {
        serde_json::from_str(include_str!("../fixtures/q35/plan.json")).unwrap()
    }

    /// The plan of a Grace machine with two sockets and four GPUs.
    pub(crate) fn grace() -> Plan {
        let text = include_str!("../../../vmm/tests/golden/gb200-nvl4-egm.json");
        serde_json::from_str::<Plan>(text).unwrap().counted_as_linux_does()
    }

    #[test]
    fn linux_numbers_nodes_of_gpus_before_those_of_memory_alone() {
        let plan = grace();
        assert!((0..36).all(|node| plan.linux_node(node) == Some(node)));
    }

    #[test]
    fn a_gpus_memory_is_in_the_bars_that_the_plan_names() {
        let (plan, none) = (grace(), q35());
        let bars: Vec<_> = plan.gpu_memory().map(|(function, bar)| (function.address, bar.index)).collect();
        let functions: std::collections::BTreeSet<_> = bars.iter().map(|(address, _)| *address).collect();
        assert_eq!(functions.len(), 4);
        assert!(bars.iter().any(|(_, index)| *index == 4), "{bars:?}");
        assert_eq!(none.gpu_memory().count(), 0);
    }

    #[test]
    fn memory_of_the_tables_is_ram_on_arm() {
        let start = |plan: &Plan| plan.usable(Some(0)).iter().next().unwrap().start();
        assert_eq!(start(&grace()), Gpa::new(0x4000_0000));
    }

    #[test]
    fn a_plan_is_read_with_unknown_keys() {
        let plan = q35();
        assert_eq!((plan.vcpus.len(), plan.nodes.len()), (2, 2));
        assert!(plan.devices().any(|(_, device)| device.kind == DeviceKind::Other));
        assert_eq!(plan.egm_nodes().map(|n| n.id).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn linux_numbers_nodes_of_processors_first() {
        let mut plan = q35();
        assert_eq!((plan.linux_node(0), plan.linux_node(1)), (Some(0), Some(1)));
        for vcpu in &mut plan.vcpus {
            vcpu.node = 7;
        }
        assert_eq!((plan.linux_node(7), plan.linux_node(0), plan.linux_node(3)), (Some(0), Some(1), None));
    }
}
