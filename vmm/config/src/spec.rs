//! The checked form of a configuration.
//!
//! Outside of tests only [`load`](crate::load) makes a [`Spec`]. It checks everything that the fields document, so
//! users of a [`Spec`] need no checks of their own. No check compares it with a host: that is the plan's work.

use std::collections::BTreeMap;
use std::path::PathBuf;

use egm_address::{ByteSize, CpuSet, Gpa, PciAddress};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::on_reset::OnReset;
use super::pages::PageSize;
use super::tap::Tap;

/// Largest number of vCPUs; x2APIC ids above 254 would need interrupt remapping in the guest.
pub const MAX_VCPUS: u32 = 254;
/// NUMA node ids are below this: SLIT is a square, and Linux's usual `NODES_SHIFT` for Arm servers is 6 to 10.
pub const MAX_NODES: u32 = 256;

/// Instruction set of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// 64-bit x86 (Intel 64, AMD64).
    #[serde(rename = "x86_64")]
    X86_64,
    /// 64-bit Arm (AArch64), which Grace has.
    Aarch64,
}

/// A whole virtual machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spec {
    /// Shown in logs, process names and SMBIOS; 1 to 64 of `[A-Za-z0-9._-]`.
    pub name: String,
    /// Hardware or use that the configuration is for.
    pub description: String,
    /// The guest's instruction set.
    pub arch: Architecture,
    /// Virtual processors, their topology and their affinity.
    pub cpus: Cpus,
    /// Ordinary memory and its NUMA nodes.
    pub memory: Memory,
    /// Kernel, initial RAM disk and command line.
    pub boot: Boot,
    /// Extended GPU Memory slices, in the order written.
    pub egm: Vec<EgmSlice>,
    /// PCI devices, in the order written; ids are unique.
    pub devices: Vec<Device>,
    /// Where the guest's serial console goes.
    pub console: Console,
    /// PCIe address windows and tree.
    pub pcie: Pcie,
    /// What a reset by the guest does.
    pub on_reset: OnReset,
    /// Trust domain, if it has a named one: its owners share regions that GPUs reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<String>,
}

impl Spec {
    /// The slice that is all memory of node `id`, and its index.
    pub fn slice_of(&self, id: u32) -> Option<(usize, &EgmSlice)> {
        let memory = |slice: &EgmSlice| slice.form == EgmForm::Memory && slice.node == id;
        self.egm.iter().enumerate().find(|(_, slice)| memory(slice))
    }

    /// The slices that are memory of nodes of their own, not of [`Memory::nodes`].
    pub fn nodes_of_slices(&self) -> impl Iterator<Item = &EgmSlice> {
        let own = |slice: &&EgmSlice| self.memory.nodes.iter().all(|node| node.id != slice.node);
        self.egm.iter().filter(|slice| slice.form == EgmForm::Memory).filter(own)
    }
}

/// Virtual processors: `count == sockets * cores * threads`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cpus {
    /// Number of vCPUs, 1 to [`MAX_VCPUS`].
    pub count: u32,
    /// Sockets, at least 1.
    pub sockets: u32,
    /// Cores in a socket, at least 1.
    pub cores: u32,
    /// Threads in a core, at least 1.
    pub threads: u32,
    /// Host CPUs that vCPU `i` may run on; empty, or one non-empty set for each vCPU.
    pub affinity: Vec<CpuSet>,
}

/// Ordinary guest memory; `nodes` is never empty and their sizes add up to `size`, 0 where slices are their memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// All ordinary memory, EGM not counted; a multiple of `page_size`.
    pub size: ByteSize,
    /// Host pages behind it.
    pub page_size: PageSize,
    /// Whether every page is touched before the guest starts.
    pub prefault: bool,
    /// NUMA nodes by ascending id; the first is node 0 and has vCPU 0.
    pub nodes: Vec<Node>,
}

/// A NUMA node with processors, memory or both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Node {
    /// Node number, below [`MAX_NODES`]; it is the ACPI proximity domain as well.
    pub id: u32,
    /// Ordinary memory; 0 for a node of processors only, and for one with a slice as memory ([`Spec::slice_of`]).
    pub size: ByteSize,
    /// vCPU numbers; every vCPU is in exactly one node.
    pub cpus: CpuSet,
    /// Host nodes that its pages come from; `None` leaves it to the host.
    pub host_nodes: Option<CpuSet>,
    /// ACPI SLIT distance to other nodes (10 to 254; 10 only to itself).
    pub distances: BTreeMap<u32, u8>,
    /// ACPI HMAT figures of this node's memory as seen from processors elsewhere.
    pub access: Vec<Access>,
}

/// Latency and bandwidth of a node's memory for the processors of node `from`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// Node of the processors that use the memory.
    #[schemars(range(max = 255))]
    pub from: u32,
    /// Nanoseconds for a read or a write, 1 to 65534.
    #[schemars(range(min = 1, max = 65534))]
    pub latency_ns: u32,
    /// Megabytes (10^6 bytes) a second for reads or writes, 1 to 65534000.
    #[schemars(range(min = 1, max = 65_534_000))]
    pub bandwidth_mbps: u32,
}

/// How the guest sees an EGM slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EgmForm {
    /// Ordinary RAM of a NUMA node.
    Memory,
    /// A PCI function with the slice as its BAR.
    Device,
}

/// A piece of a host EGM region that this VM owns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EgmSlice {
    /// Host regions by name or kind, the most wanted first, at least one; `local` is memory of this process (memfd or
    /// hugetlb), which exists on every host.
    pub regions: Vec<String>,
    /// Bytes; a multiple of its page size and of 2 MiB.
    pub size: ByteSize,
    /// Guest NUMA node that it becomes, one of `memory.nodes` without memory or none of them, and no other slice's; or that the
    /// device is near to.
    pub node: u32,
    /// How the guest sees it: as memory or as a device.
    pub form: EgmForm,
    /// Host pages behind it, for `local`.
    pub page_size: PageSize,
    /// Host nodes that its pages come from, for `local`.
    pub host_nodes: Option<CpuSet>,
    /// ACPI SLIT distance to other nodes.
    pub distances: BTreeMap<u32, u8>,
    /// ACPI HMAT figures of the slice, as seen from processors elsewhere.
    pub access: Vec<Access>,
}

/// Kernel, initial RAM disk and command line. Paths are absolute or joined to the folder of the file that named them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// x86_64: bzImage, or an ELF vmlinux with a 64-bit or PVH entry. aarch64: Image.
    pub kernel: PathBuf,
    /// Initial RAM disk; `None` boots without one.
    pub initramfs: Option<PathBuf>,
    /// Kernel command line, at most 2047 bytes, without NUL or newline.
    pub cmdline: String,
    /// Tables that describe the machine to the kernel.
    #[serde(default, skip_serializing_if = "BootTables::is_acpi")]
    pub tables: BootTables,
}

/// A PCI device of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Unique name, for messages.
    pub id: String,
    /// Whether it sits behind a root port of its own; otherwise on the root bus.
    pub root_port: bool,
    /// Kind of device, with its settings.
    pub kind: DeviceKind,
}

/// Kinds of devices, with the settings of each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum DeviceKind {
    /// virtio block device over a raw file or block device.
    VirtioBlk {
        /// Raw file or block device with the disk's content.
        path: PathBuf,
        /// Whether writes are refused.
        read_only: bool,
    },
    /// virtio network device over a tap.
    VirtioNet {
        /// The host's side of it.
        tap: Tap,
        /// Guest's hardware address, unicast.
        mac: [u8; 6],
        /// Receive/transmit queue pairs, 1 to 16.
        queue_pairs: u16,
        /// Whether the kernel's vhost-net moves the packets: `None` means when the host has it.
        vhost: Option<bool>,
    },
    /// virtio socket device, AF_VSOCK in the guest.
    VirtioVsock {
        /// Guest's context id, 3 to 0xfffffffe.
        cid: u32,
        /// Unix socket path for the userspace form; `None` means the kernel's vhost-vsock.
        socket: Option<PathBuf>,
    },
    /// virtio entropy device, with random bytes of the host.
    VirtioRng,
    /// A host PCI function.
    Vfio {
        /// Address of the function on the host.
        function: PciAddress,
        /// Kernel interface that opens it.
        #[serde(default)]
        backend: VfioBackend,
        /// Number by which an NVIDIA driver in the guest finds the GPUs that it reaches by PCI Express.
        #[serde(default)]
        clique: Clique,
        /// Where its BARs lie.
        #[serde(default)]
        bars: BarPlacements,
        /// Whether the machine's other assigned devices reach its BARs.
        p2p: bool,
    },
    /// A device served by another process.
    VfioUser {
        /// Unix socket of the server.
        socket: PathBuf,
    },
    /// An EGM slice as a PCI function of this process.
    Egm {
        /// Index of the slice.
        slice: u32,
        /// Guest NUMA node that it is near to.
        node: u32,
    },
}

impl DeviceKind {
    /// Whether it is a function of the host, of a vfio-user server, or of a slice, and not a virtio device of ours.
    pub const fn is_assigned(&self) -> bool {
        matches!(self, Self::Vfio { .. } | Self::VfioUser { .. } | Self::Egm { .. })
    }
}

/// Interface of the kernel that host functions are opened by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VfioBackend {
    /// The plan chooses, from the host and the machine's memory.
    #[default]
    Auto,
    /// `/dev/vfio/GROUP` in a container with a type 1 IOMMU.
    Legacy,
    /// `/dev/vfio/devices/vfioN` with an I/O address space of `/dev/iommu`.
    Iommufd,
}

/// NVIDIA's number for GPUs that reach each other by PCI Express. A capability in configuration space reports it to
/// their driver in a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clique {
    /// GPUs behind one switch of the host get one number.
    #[default]
    Auto,
    /// No number: the guest finds no such capability.
    Off,
    /// This one, 0 to 15.
    Number(u8),
}

/// Where the BARs of a host function lie in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BarPlacements {
    /// Where the plan puts them.
    #[default]
    Guest,
    /// 64-bit prefetchable ones at their host physical addresses, the others where the plan puts them.
    Host,
    /// These 64-bit prefetchable ones as given, by ascending number; the others where the plan puts them.
    Each(Vec<FixedBar>),
}

/// A BAR that the configuration places in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixedBar {
    /// Register number, 0 to 5.
    pub index: u8,
    /// Its guest physical address: the host's, or as given.
    pub place: BarPlacement,
}

/// Where one BAR lies in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BarPlacement {
    /// At its host physical address.
    Host,
    /// At this guest physical address.
    At(Gpa),
}

/// Whether the guest sees the host's PCI Express switches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PciTopology {
    /// Host functions that share a switch share one in the guest.
    #[default]
    Mirror,
    /// Each device has a root port of its own.
    Flat,
}

/// Where the guest's serial console goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Console {
    /// Standard input and output.
    Stdio,
    /// Output is appended to a file; no input.
    File {
        /// The file, made when missing.
        path: PathBuf,
    },
    /// A pseudo-terminal; its name is printed.
    Pty,
    /// A Unix stream socket that one client at a time connects to.
    Socket {
        /// The socket, made at start and removed at the end.
        path: PathBuf,
    },
    /// Output is discarded; no input.
    Null,
}

/// PCIe address windows and tree; `None` leaves the size to the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pcie {
    /// Size of the window for 64-bit BARs.
    pub window64: Option<ByteSize>,
    /// Whether the guest sees the host's switches.
    pub topology: PciTopology,
    /// Root ports for what is plugged in while the guest runs.
    pub spare: Option<SparePorts>,
}

/// Root ports with nothing behind them; sizes are powers of two, 1 MiB at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SparePorts {
    /// How many, at least 1.
    pub ports: u8,
    /// Addresses of each for 64-bit prefetchable BARs.
    pub window64: ByteSize,
    /// Addresses of each for other BARs.
    pub window32: ByteSize,
}

/// Form of the description of a machine for its kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BootTables {
    /// ACPI tables, on either architecture.
    #[default]
    Acpi,
    /// A device tree: aarch64 only.
    DeviceTree,
}

impl BootTables {
    /// Whether it is the default.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls is given a reference")]
    pub(crate) fn is_acpi(&self) -> bool {
        *self == Self::Acpi
    }
}
