//! The plan: every address, number and node of a virtual machine, decided before anything is opened.

use std::collections::BTreeMap;
use std::fmt;

use egm_address::{ByteSize, CpuSet, Gpa, Guest, Hpa, PciAddress, Span};
use serde::{Deserialize, Serialize};

use crate::config::{Access, Architecture, Boot, Console, OnReset, PageSize};
use crate::plan::{ExpanderPlan, FunctionPlan, FunctionRole, PassthroughPlan};

/// Version of the JSON form of [`Plan`]; a reader refuses others.
pub const PLAN_VERSION: u32 = 1;

/// Owner of the interrupt line that notifies a guest of new records of bad memory in its tables.
pub const ERRORS: &str = "errors";
/// Owner of the interrupt line that signals a press of the guest's power button.
pub(crate) const POWER_BUTTON: &str = "power-button";

/// Everything that [`crate::resources`] opens and [`crate::machine`] builds, in guest terms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Version of this form, [`PLAN_VERSION`]; a reader refuses others.
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
    /// What a reset by the guest does.
    #[serde(default, skip_serializing_if = "OnReset::is_exit")]
    pub on_reset: OnReset,
    /// Number of guest physical address bits, as reported to the guest.
    pub address_bits: u8,
    /// vCPUs in the order of their indexes.
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

/// Memory that will be allocated as one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingPlan {
    /// For messages: `node0`, `egm0`.
    pub id: String,
    /// Host EGM region, or `None` for ordinary memory of this process.
    pub region: Option<String>,
    /// Whether it is memory of the machine itself, which no other machine can have (guest_memfd); `region` is `None` then.
    #[serde(default, skip_serializing_if = "is_false")]
    pub guest_memfd: bool,
    /// Whether a function of the machine has it behind a BAR; it is no RAM then.
    #[serde(default, skip_serializing_if = "is_false")]
    pub device: bool,
    /// Offset of its first byte in the region.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: u64,
    /// Host physical address of its first byte, where the region's is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hpa: Option<Hpa>,
    /// Bytes, rounded up to whole pages of `page_size`.
    pub size: u64,
    /// Host pages that the configuration or the region asks for.
    pub page_size: PageSize,
    /// Host pages of ordinary memory; `None` for memory of a region or of the machine itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<HostPages>,
    /// Host nodes that pages come from; `None` leaves it to the host.
    pub host_nodes: Option<CpuSet>,
    /// Whether every page is touched before the guest starts.
    pub prefault: bool,
}

/// How ordinary memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// A sealed memfd, of hugetlb pages where those are asked for.
    Memfd,
    /// A file on a tmpfs that the process mounts for itself with `huge=within_size`; it has no seals.
    HugeFile,
    /// Private memory without a file.
    Private,
}

/// Host pages behind ordinary memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPages {
    /// How they are allocated.
    pub allocation: Allocation,
    /// Bytes of each, except at the edges of spans.
    pub size: ByteSize,
    /// Why they are not larger, where the host or the configuration has only base pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not_larger: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Kind of a piece of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Ordinary memory of a node in the configuration.
    Ram,
    /// An EGM slice that is RAM, not a device.
    Egm,
}

/// A piece of guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Guest addresses; both ends are multiples of the guest's largest base page.
    pub span: Span<Guest>,
    /// Whether it is ordinary memory or a slice.
    pub kind: MemoryKind,
    /// Guest NUMA node that it belongs to.
    pub node: u32,
    /// Index of its backing in [`Plan::backings`].
    pub backing: usize,
    /// Offset of its first byte in the backing.
    pub offset: u64,
}

/// How many bits addresses have, and why not more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressBits {
    /// The guest's processors have as many.
    Guest(u8),
    /// An IOMMU above the machine's host functions translates as many, and guest addresses are their devices' too.
    Translated(u8),
}

impl AddressBits {
    pub(super) const fn number(self) -> u8 {
        let (Self::Guest(bits) | Self::Translated(bits)) = self;
        bits
    }
}

impl fmt::Display for AddressBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Guest(bits) => write!(f, "{bits} guest physical address bits"),
            Self::Translated(bits) => write!(f, "the {bits} bits that the host's IOMMU translates"),
        }
    }
}

/// The memory behind a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowMemory {
    pub span: Span<Guest>,
    /// Index of the memory in [`Plan::backings`].
    pub backing: usize,
    /// Offset of its first byte in the backing.
    pub offset: u64,
}

/// A vCPU: its ids, position in the topology, and host CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuPlan {
    /// Position among the vCPUs; also the ACPI processor UID.
    pub index: u32,
    /// x86: x2APIC id. aarch64: MPIDR affinity fields.
    pub hardware_id: u32,
    /// Socket number, counted from 0.
    pub socket: u32,
    /// Core number within the socket.
    pub core: u32,
    /// Thread number within the core.
    pub thread: u32,
    /// Guest NUMA node that it belongs to.
    pub node: u32,
    /// Host CPUs that it may run on; `None` leaves it to the host.
    pub host_cpus: Option<CpuSet>,
}

/// Purpose of an address window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WindowKind {
    /// Tables that the VMM writes for the guest, memory but not RAM: see `Plan::window_memory`.
    Firmware,
    /// Option ROM area of a PC: empty memory, not RAM either.
    OptionRoms,
    /// 32-bit PCI memory window.
    PciMemory32,
    /// 64-bit prefetchable PCI memory window.
    PciMemory64,
    /// PCI Express enhanced configuration space, 1 MiB a bus from bus 0, a power of two of them.
    Ecam,
    /// Registers of interrupt controllers: I/O APIC and local APIC (x86), GIC (aarch64).
    Interrupts,
    /// Registers of a platform device; the label is its name (aarch64: `serial`, `clock`, `pvpanic`).
    Device,
    /// Kept free: the CPU, KVM or the host's IOMMU reserves it.
    Reserved,
}

/// A range of guest physical addresses that is not RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowPlan {
    /// What the addresses are used for.
    pub kind: WindowKind,
    /// Name for display: `I/O APIC`, `AMD HyperTransport`.
    pub label: String,
    /// Guest addresses of the range.
    pub span: Span<Guest>,
}

/// A NUMA node of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePlan {
    /// Node number and ACPI proximity domain.
    pub id: u32,
    /// Indexes of its vCPUs; a node may have none.
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

/// An interrupt line of the guest, and its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinePlan {
    /// Global system interrupt number.
    pub gsi: u32,
    /// Source of the interrupt: `serial`, or a host function: `gpu0 INTA`.
    pub owner: String,
}

impl LinePlan {
    /// Whether it is for a function that may come to a spare port; no id has a space.
    pub(crate) fn is_of_spare_port(&self) -> bool {
        self.owner.starts_with(SPARE_PORT)
    }
}

/// A range of I/O ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortPlan {
    /// Number of the first port.
    pub first: u16,
    /// Number of ports, at least 1.
    pub count: u16,
    /// Device that decodes the ports: `serial`, `pvpanic`, `sleep`, `reset`.
    pub owner: String,
}

/// Begins the owner of the line of a spare port, before the number of its slot.
const SPARE_PORT: &str = "slot ";

/// Owner of the interrupt line of the function that may come to the spare port with slot `number`.
pub(super) fn spare_intx_owner(number: u16) -> String {
    intx_owner(&format!("{SPARE_PORT}{number}"))
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

    /// Where the registers of the platform device `name` are.
    pub fn device(&self, name: &str) -> Option<Span<Guest>> {
        self.windows.iter().find(|w| w.kind == WindowKind::Device && w.label == name).map(|w| w.span)
    }

    /// The first I/O port of `owner`.
    pub fn port(&self, owner: &str) -> Option<u16> {
        self.ports.iter().find(|p| p.owner == owner).map(|p| p.first)
    }

    /// PCI address in the guest of each device, by id.
    pub(crate) fn device_addresses(&self) -> BTreeMap<String, PciAddress> {
        let endpoint = |function: &FunctionPlan| match &function.role {
            FunctionRole::Endpoint { device, .. } => Some((device.id.clone(), function.address)),
            _ => None,
        };
        self.pci.iter().filter_map(endpoint).collect()
    }

    /// The windows that are memory, the backing of each and its offset there. The first RAM above a window has the same
    /// backing, with offsets that grow with guest addresses over the windows too.
    pub(crate) fn window_memory(&self) -> impl Iterator<Item = WindowMemory> {
        let kinds = [WindowKind::OptionRoms, WindowKind::Firmware];
        kinds.into_iter().filter_map(|kind| self.behind(self.window(kind)?))
    }

    fn behind(&self, span: Span<Guest>) -> Option<WindowMemory> {
        let near = self.memory.iter().find(|m| m.span.end() > span.start())?;
        let below = near.span.start().offset_from(span.start())?;
        Some(WindowMemory { span, backing: near.backing, offset: near.offset.checked_sub(below)? })
    }

    /// Host functions that are assigned.
    pub(crate) fn assigned_functions(&self) -> impl Iterator<Item = PciAddress> {
        self.pci.iter().filter_map(|function| match &function.role {
            FunctionRole::Endpoint { assigned: Some(assigned), .. } => Some(assigned.function),
            _ => None,
        })
    }

    /// One past the highest RAM address, 0 without RAM.
    pub fn memory_end(&self) -> Gpa {
        self.memory.last().map_or(Gpa::new(0), |m| m.span.end())
    }
}
