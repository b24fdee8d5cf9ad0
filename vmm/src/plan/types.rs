//! The plan: every address, number and node of a virtual machine, decided before anything is opened.

use egm_address::{CpuSet, Gpa, Guest, PciAddress, Span};
use egm_vfio::topology::Acs;
use serde::{Deserialize, Serialize};

use crate::config::{Access, Architecture, Boot, Console, Device};
use crate::plan::{AssignedPlan, BackingPlan, MemoryPlan, PassthroughPlan};

/// Version of the JSON form of [`Plan`]; a reader refuses others.
pub const PLAN_VERSION: u32 = 1;

/// Owner of the interrupt line that notifies a guest of new records of bad memory in its tables.
pub const ERRORS: &str = "errors";
/// Owner of the interrupt line that signals a press of the guest's power button.
pub const POWER_BUTTON: &str = "power-button";

/// Everything that [`crate::resources`] opens and [`crate::machine`] builds, in guest terms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// Name of the virtual machine.
    pub name: String,
    /// Purpose of the configuration.
    pub description: String,
    /// The guest's instruction set.
    pub arch: Architecture,
    /// Kernel to boot, and its settings.
    pub boot: Boot,
    /// Where the serial console goes.
    pub console: Console,
    /// Number of guest physical address bits, as reported to the guest.
    pub address_bits: u8,
    /// vCPUs by index.
    pub vcpus: Vec<VcpuPlan>,
    /// Sources of guest memory.
    pub backings: Vec<BackingPlan>,
    /// Guest RAM, ascending and disjoint.
    pub memory: Vec<MemoryPlan>,
    /// Properties that the machine lacks because the host could not give its first choice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Address ranges that are not RAM, ascending and disjoint.
    pub windows: Vec<WindowPlan>,
    /// PCI functions by address.
    pub pci: Vec<FunctionPlan>,
    /// Host bridges beside that of bus 0, by bus; their windows are pieces of the machine's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expanders: Vec<ExpanderPlan>,
    /// SMMUs in front of buses. Planning makes none: no device of this machine is one yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub smmus: Vec<SmmuPlan>,
    /// How host functions are opened; `None` without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passthrough: Option<PassthroughPlan>,
    /// NUMA nodes in SRAT order.
    pub nodes: Vec<NodePlan>,
    /// `distances[i][j]`: ACPI SLIT distance from `nodes[i]` to `nodes[j]`.
    pub distances: Vec<Vec<u8>>,
    /// Interrupt lines (global system interrupts).
    pub lines: Vec<LinePlan>,
    /// I/O ports (x86 only).
    pub ports: Vec<PortPlan>,
}

/// One vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuPlan {
    /// Position among the vCPUs; also the ACPI processor UID.
    pub index: u32,
    /// x86: x2APIC id. aarch64: MPIDR affinity fields.
    pub hardware_id: u32,
    /// Socket number.
    pub socket: u32,
    /// Core number within the socket.
    pub core: u32,
    /// Thread number within the core.
    pub thread: u32,
    /// NUMA node.
    pub node: u32,
    /// Host CPUs that it may run on; `None` leaves it to the host.
    pub host_cpus: Option<CpuSet>,
}

/// Purpose of an address window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WindowKind {
    /// Tables that the VMM writes for the guest, memory but not RAM: see [`Plan::window_memory`].
    Firmware,
    /// Option ROM area of a PC: empty memory, not RAM either.
    OptionRoms,
    /// 32-bit PCI memory window.
    PciMemory32,
    /// 64-bit prefetchable PCI memory window.
    PciMemory64,
    /// PCI Express enhanced configuration space, 1 MiB a bus from bus 0, a power of two of them.
    Ecam,
    /// Interrupt controllers.
    Interrupts,
    /// Registers of a platform device; the label is its name (aarch64: `serial`, `clock`, `pvpanic`).
    Device,
    /// Kept free: the CPU, KVM or the host's IOMMU reserves it.
    Reserved,
}

/// A range of guest physical addresses that is not RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowPlan {
    /// Purpose.
    pub kind: WindowKind,
    /// Name for display: `I/O APIC`, `AMD HyperTransport`.
    pub label: String,
    /// Where.
    pub span: Span<Guest>,
}

/// Type and width of a base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BarKind {
    /// 32-bit memory, not prefetchable.
    Memory32,
    /// 64-bit memory, not prefetchable; takes two registers. It lies in the 32-bit window, because that is the
    /// only one of its kind that a bridge forwards (PCI Express Base 7.5.1.3).
    Memory64,
    /// 64-bit memory, prefetchable; takes two registers.
    Memory64Prefetchable,
}

/// A base address register and its guest addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarPlan {
    /// Register number, 0 to 5.
    pub index: u8,
    /// Type and width.
    pub kind: BarKind,
    /// Guest addresses; the size is a power of two and the start a multiple of it.
    pub span: Span<Guest>,
}

/// A PCI function of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionPlan {
    /// Segment, bus, device and function number.
    pub address: PciAddress,
    /// Kind of function.
    pub role: FunctionRole,
    /// Its base address registers.
    pub bars: Vec<BarPlan>,
    /// MSI-X vectors; 0 when it has none.
    pub msix_vectors: u16,
}

/// Kind of a PCI function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "kebab-case")]
pub enum FunctionRole {
    /// The host bridge, 00:00.0.
    HostBridge,
    /// A PCI Express root port.
    RootPort {
        /// Physical slot number.
        slot: u16,
        /// Buses and windows behind it.
        #[serde(flatten)]
        bridge: BridgePlan,
    },
    /// The upstream port of a PCI Express switch, alone on the bus behind a root port.
    SwitchUpstream {
        /// Buses and windows behind it.
        #[serde(flatten)]
        bridge: BridgePlan,
    },
    /// A downstream port of a PCI Express switch, on the bus behind its upstream port.
    SwitchDownstream {
        /// Physical slot number.
        slot: u16,
        /// Buses and windows behind it.
        #[serde(flatten)]
        bridge: BridgePlan,
    },
    /// A device of the configuration.
    Endpoint {
        /// The device, as configured.
        device: Device,
        /// Plan of the host function, if the device is one.
        #[serde(default, rename = "passed", skip_serializing_if = "Option::is_none")]
        assigned: Option<AssignedPlan>,
    },
}

impl FunctionRole {
    /// Buses and windows of a bridge; `None` for other functions.
    pub const fn bridge(&self) -> Option<&BridgePlan> {
        match self {
            Self::RootPort { bridge, .. }
            | Self::SwitchUpstream { bridge }
            | Self::SwitchDownstream { bridge, .. } => Some(bridge),
            Self::HostBridge | Self::Endpoint { .. } => None,
        }
    }
}

/// Buses and windows of a bridge, programmed before the guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgePlan {
    /// Bus directly behind it.
    pub secondary: u8,
    /// Highest bus behind it.
    pub subordinate: u8,
    /// 32-bit window that it forwards, if any.
    pub window32: Option<Span<Guest>>,
    /// 64-bit prefetchable window that it forwards, if any.
    pub window64: Option<Span<Guest>>,
    /// Access Control Services of the host's port in its place; the guest sees them and cannot change them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acs: Option<Acs>,
}

/// A host bridge for devices near another node than that of bus 0: a guest gives devices the node of their host bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpanderPlan {
    /// Guest NUMA node.
    pub node: u32,
    /// Its buses and windows.
    #[serde(flatten)]
    pub bridge: BridgePlan,
}

/// An SMMUv3 of an Arm guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmmuPlan {
    /// Its registers: two pages of 64 KiB.
    pub span: Span<Guest>,
    /// First and last bus with functions behind it; no bus has two SMMUs.
    pub buses: (u8, u8),
    /// Interrupt lines of events, page requests, errors and finished commands.
    pub lines: [u32; 4],
}

/// A NUMA node of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePlan {
    /// Node number and ACPI proximity domain.
    pub id: u32,
    /// Its vCPUs.
    pub cpus: CpuSet,
    /// Bytes of memory in [`Plan::memory`] with this node.
    pub memory: u64,
    /// Whether its memory is EGM.
    pub egm: bool,
    /// HMAT figures of its memory, by initiator node.
    pub access: Vec<Access>,
    /// The GPU with the driver that adds the node's memory: ACPI's generic initiator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initiator: Option<PciAddress>,
}

/// An interrupt line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinePlan {
    /// Global system interrupt number.
    pub gsi: u32,
    /// Source of the interrupt: `serial`, or a host function: `gpu0 INTA`.
    pub owner: String,
}

/// A range of I/O ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortPlan {
    /// First port.
    pub first: u16,
    /// Number of ports, at least 1.
    pub count: u16,
    /// Device that decodes the ports: `serial`, `pvpanic`, `sleep`, `reset`.
    pub owner: String,
}

/// Owner of the interrupt line of a host function's pin; unambiguous, since no id has a space.
pub(super) fn intx_owner(id: &str) -> String {
    format!("{id} INTA")
}

impl Plan {
    /// The first window of `kind`.
    pub fn window(&self, kind: WindowKind) -> Option<Span<Guest>> {
        self.windows.iter().find(|w| w.kind == kind).map(|w| w.span)
    }

    /// The interrupt line of `owner`.
    pub fn line(&self, owner: &str) -> Option<u32> {
        self.lines.iter().find(|l| l.owner == owner).map(|l| l.gsi)
    }

    /// The interrupt line of the pin of host function `id`.
    pub fn intx(&self, id: &str) -> Option<u32> {
        self.line(&intx_owner(id))
    }

    /// Where the registers of the platform device `name` are.
    pub fn device(&self, name: &str) -> Option<Span<Guest>> {
        self.windows.iter().find(|w| w.kind == WindowKind::Device && w.label == name).map(|w| w.span)
    }

    /// The first I/O port of `owner`.
    pub fn port(&self, owner: &str) -> Option<u16> {
        self.ports.iter().find(|p| p.owner == owner).map(|p| p.first)
    }

    /// The windows that are memory, the backing of each and its offset there. The first RAM above a window has the same
    /// backing, with offsets that grow with guest addresses over the windows too.
    pub fn window_memory(&self) -> impl Iterator<Item = (Span<Guest>, usize, u64)> {
        let kinds = [WindowKind::OptionRoms, WindowKind::Firmware];
        kinds.into_iter().filter_map(|kind| self.behind(self.window(kind)?))
    }

    fn behind(&self, span: Span<Guest>) -> Option<(Span<Guest>, usize, u64)> {
        let near = self.memory.iter().find(|m| m.span.end() > span.start())?;
        let below = near.span.start().offset_from(span.start())?;
        Some((span, near.backing, near.offset.checked_sub(below)?))
    }

    /// One past the highest RAM address, 0 without RAM.
    pub fn memory_end(&self) -> Gpa {
        self.memory.last().map_or(Gpa::new(0), |m| m.span.end())
    }
}
