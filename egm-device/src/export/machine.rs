//! What was meant: a machine in words that no monitor owns.

use std::collections::BTreeMap;

use egm_address::{ByteSize, CpuSet, PciAddress};
use serde::{Deserialize, Serialize};

/// Instruction set of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// 64-bit x86.
    #[serde(rename = "x86_64")]
    X86_64,
    /// 64-bit Arm.
    Aarch64,
}

/// A machine, of which every id is unique, every vCPU in one node, and every path absolute.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Machine {
    /// 1 to 64 of `[A-Za-z0-9._-]`.
    pub name: String,
    /// The guest's instruction set.
    pub arch: Architecture,
    /// Virtual processors.
    pub cpus: Cpus,
    /// Host pages behind ordinary memory.
    pub page_size: PageSize,
    /// Whether every page of ordinary memory is touched before the guest starts.
    pub prefault: bool,
    /// Nodes of ordinary memory and processors by ascending id; the first is node 0.
    pub nodes: Vec<Node>,
    /// Slices of EGM, in the order written.
    pub slices: Vec<EgmSlice>,
    /// PCI devices, in the order written.
    pub devices: Vec<Device>,
    /// What is booted.
    pub boot: Boot,
    /// Where the serial console goes.
    pub console: Console,
    /// Bytes of the window for 64-bit BARs; `None` leaves it to the monitor.
    pub window64: Option<ByteSize>,
    /// Root ports for what is plugged in while the guest runs.
    pub spare_ports: u8,
    /// Whether host functions shall share switches as on the host.
    pub mirror: bool,
}

/// Virtual processors: `count == sockets * cores * threads`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cpus {
    /// At least 1.
    pub count: u32,
    /// Sockets.
    pub sockets: u32,
    /// Cores in a socket.
    pub cores: u32,
    /// Threads in a core.
    pub threads: u32,
    /// Host CPUs of vCPU `i`; empty, or one set for each vCPU.
    pub affinity: Vec<CpuSet>,
}

/// Size of the host pages behind memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum PageSize {
    /// The host's choice.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// 4 KiB.
    #[serde(rename = "4K")]
    Size4K,
    /// hugetlb pages of 2 MiB.
    #[serde(rename = "2M")]
    Size2M,
    /// hugetlb pages of 1 GiB.
    #[serde(rename = "1G")]
    Size1G,
}

impl PageSize {
    /// The word for hugetlb pages, as all monitors and the kernel write it; `None` for others.
    #[must_use]
    pub const fn hugetlb(self) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Size4K => None,
            Self::Size2M => Some("2M"),
            Self::Size1G => Some("1G"),
        }
    }

    /// Bytes that memory of such pages is a multiple of.
    pub(super) const fn bytes(self) -> u64 {
        match self {
            Self::Auto | Self::Size4K => 4 << 10,
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

/// A node with processors, ordinary memory or both.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Memory; 0 for processors only.
    pub size: ByteSize,
    /// vCPUs.
    pub cpus: CpuSet,
    /// Host nodes that its pages come from.
    pub host_nodes: Option<CpuSet>,
    /// Distances that were written.
    pub distances: BTreeMap<u32, u8>,
    /// Figures of its memory, by the node that looks.
    pub access: Vec<Access>,
}

/// What a processor of `from` sees of some node's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// The node whose processors look.
    pub from: u32,
    /// Nanoseconds.
    pub latency_ns: u32,
    /// Megabytes (10^6 bytes) a second.
    pub bandwidth_mbps: u32,
}

/// How the guest sees a slice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// RAM of a node.
    #[default]
    Memory,
    /// A PCI function whose BAR is the slice.
    Device,
}

/// A slice of EGM.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EgmSlice {
    /// Regions by name or kind, the most wanted first.
    pub regions: Vec<String>,
    /// A multiple of 2 MiB.
    pub size: ByteSize,
    /// The node that it becomes, or that the device is near to.
    pub node: u32,
    /// Memory or device.
    pub form: Form,
    /// Host pages behind it, for `local`.
    pub page_size: PageSize,
    /// Host nodes that its pages come from, for `local`.
    pub host_nodes: Option<CpuSet>,
    /// Distances that were written.
    pub distances: BTreeMap<u32, u8>,
    /// Figures of its memory.
    pub access: Vec<Access>,
}

/// A PCI device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Unique.
    pub id: String,
    /// Whether it sits behind a root port of its own.
    pub root_port: bool,
    /// What it is.
    pub kind: DeviceKind,
}

/// The kinds of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the schema of configurations documents them")]
pub enum DeviceKind {
    VirtioBlk { path: String, read_only: bool },
    VirtioNet { tap: String, mac: [u8; 6], queue_pairs: u16, vhost: Option<bool> },
    VirtioVsock { cid: u32, socket: Option<String> },
    VirtioRng,
    Vfio { function: PciAddress, backend: Backend, clique: Option<u8>, bars_placed: bool, p2p: bool },
    VfioUser { socket: String },
}

/// `52:54:00:12:34:56`
pub(super) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Interface of the kernel that host functions are opened by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// A container with a type 1 IOMMU, which takes memory without `struct page` too.
    #[default]
    Auto,
    /// The same.
    Legacy,
    /// `/dev/iommu`.
    Iommufd,
}

/// What is booted; paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the schema of configurations documents them")]
pub struct Boot {
    pub kernel: String,
    pub initramfs: Option<String>,
    pub cmdline: String,
}

/// Where the serial console goes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the schema of configurations documents them")]
pub enum Console {
    Stdio,
    File(String),
    Pty,
    Socket(String),
    Null,
}
