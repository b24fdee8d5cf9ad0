//! Rules of each part of a configuration, as the messages state them.

use egm_address::{ByteSize, Quoted};
use egm_report::show::counted;

use super::distance::LOCAL;

/// Longest kernel command line in bytes: x86's `COMMAND_LINE_SIZE` less the closing NUL, and Arm's the same.
pub(super) const MAX_CMDLINE: usize = 2047;

/// Longest path in bytes: Linux's `PATH_MAX` less the closing NUL.
pub(super) const MAX_PATH: usize = 4095;

/// Linux's `IFNAMSIZ` less the closing NUL.
pub(super) const MAX_TAP: usize = 15;

/// Linux's `sun_path` less the closing NUL.
pub(super) const MAX_SOCKET: usize = 107;

/// Neither x86-64 nor Arm addresses more (52 bits).
pub(super) const MAX_BYTES: u64 = 1 << 52;

/// Regions a list may name, each once.
pub(super) const MAX_REGIONS: usize = 16;

/// Faults in the kernel, its files and its command line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum BootRule {
    #[error(
        "no kernel is named: set \"boot\": {{ \"kernel\": \"FILE\" }} (egm-vmm run also takes --kernel FILE)"
    )]
    NoKernel,
    #[error("the kernel command line has {length} bytes: Linux reads {MAX_CMDLINE} at most, shorten it")]
    Long { length: usize },
    #[error("the path has {length} bytes: the kernel takes {MAX_PATH} at most, choose a shorter one")]
    LongPath { length: usize },
    #[error("the path is empty: name a file")]
    Path,
    #[error("kernels for x86_64 are not started with a device tree: leave \"tables\" out")]
    Tree,
}

/// Faults in the processors.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum CpuRule {
    #[error(
        "{} x {} x {} are {}, not {count}: change one of them",
        counted((*sockets).into(), "socket"),
        counted((*cores).into(), "core"),
        counted((*threads).into(), "thread"),
        counted(*product, "vCPU")
    )]
    Topology { count: u32, sockets: u32, cores: u32, threads: u32, product: u64 },
    #[error(
        "{} for {}: write one list for all, or an array with one for each",
        counted(*lists, "CPU list"),
        counted((*count).into(), "vCPU")
    )]
    Affinity { count: u32, lists: u64 },
}

/// Faults in devices and the console.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum DeviceRule {
    #[error("id \"{id}\" is that of {first} already: choose another")]
    DuplicateId { id: String, first: String },
    #[error("{what} belongs to {first} already: they cannot share it, choose another")]
    Shared { what: String, first: String },
    #[error(
        "{} cannot name a network interface: write 1 to {MAX_TAP} bytes without space, control character, \"/\" or \":\"",
        Quoted(tap)
    )]
    Tap { tap: String },
    #[error(
        "{} for {}: name one for each queue pair",
        counted(u64::try_from(*count).unwrap_or(u64::MAX), "descriptor"),
        counted((*pairs).into(), "queue pair")
    )]
    Descriptors { count: usize, pairs: u16 },
    #[error(
        "{} is not a hardware address: write six bytes in hexadecimal, \"52:54:00:12:34:56\"",
        Quoted(mac)
    )]
    Mac { mac: String },
    #[error("{mac} is a multicast address or all zero: make the first byte even, for instance 52")]
    Multicast { mac: String },
    #[error("socket path of {length} bytes: the kernel takes {MAX_SOCKET} at most, choose a shorter one")]
    Socket { length: usize },
    #[error("{} is not the number of a BAR: write \"0\" to \"5\"", Quoted(index))]
    BarIndex { index: String },
    #[error(
        "{} is not a place for a BAR: write \"host\", or an address as hexadecimal digits after 0x, for instance \"0x200000000000\"",
        Quoted(place)
    )]
    BarPlacement { place: String },
    #[error("a guest has one virtio-vsock, which {first} names already: remove one")]
    SecondVsock { first: String },
}

/// Faults in memory and slices.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum MemoryRule {
    #[error("{size} is not a multiple of {unit}: round it, for instance to {rounded}")]
    Multiple { size: ByteSize, unit: ByteSize, rounded: ByteSize },
    #[error("{size} is not a power of two: write for instance {}", ByteSize::new(size.get().next_power_of_two()))]
    PowerOfTwo { size: ByteSize },
    #[error("the size is 0: write for instance \"1GiB\"")]
    Empty,
    #[error("{size} is more than {} of address space", ByteSize::new(MAX_BYTES))]
    TooLarge { size: ByteSize },
    #[error("the nodes add up to {sum}, {} {} the size, {size}: change either",
        ByteSize::new(sum.get().abs_diff(size.get())), if sum < size { "less than" } else { "more than" })]
    Sum { sum: ByteSize, size: ByteSize },
    #[error("node {id} exists already, in {first}: choose another number")]
    DuplicateNode { id: u32, first: String },
    #[error("node {id} has neither memory nor vCPUs: give it one of them, or remove it")]
    EmptyNode { id: u32 },
    #[error("there is no node 0: number the nodes from 0")]
    NoNodeZero,
    #[error("vCPU 0 is in node {node}: it belongs to node 0")]
    FirstVcpu { node: u32 },
    #[error("vCPU {vcpu} is in node {first} already: each vCPU is in one node")]
    VcpuTwice { vcpu: u32, first: u32 },
    #[error("there is no vCPU {vcpu}: the last of {count} is {}", count.saturating_sub(1))]
    NoSuchVcpu { vcpu: u32, count: u32 },
    #[error("vCPU {vcpu} is in no node: add it to the \"cpus\" of one")]
    VcpuNowhere { vcpu: u32 },
    #[error(
        "only a \"local\" slice chooses this, the host decides it for region \"{region}\": leave the key out"
    )]
    NotLocal { region: String },
    #[error("a list of regions has 1 to {MAX_REGIONS} different ones, the most wanted first")]
    RegionList,
    #[error("the slice is a device, it has no NUMA node of its own: leave the key out")]
    NotMemory,
    #[error(
        "node {id} has ordinary memory, and a slice is all memory of its node: leave out that node's \"size\" and \"host_nodes\", or choose another number"
    )]
    OrdinaryMemory { id: u32 },
    #[error("node {id} is described in \"memory\".\"nodes\": write the key there")]
    DescribedElsewhere { id: u32 },
}

/// Faults in distances and access figures of nodes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum NumaRule {
    #[error("there is no node {}: nodes are {known:?}", Quoted(node))]
    NoSuchNode { node: String, known: Vec<u32> },
    #[error("the distance of a node to itself is {LOCAL}, not {distance}: leave it out")]
    ToItself { distance: u8 },
    #[error("node {node} has no vCPUs that could look: name a node that has")]
    NoProcessor { node: u32 },
    #[error("memory as seen from node {node} is described twice: remove one")]
    AccessTwice { node: u32 },
}
