//! Why there is no plan: which thing, by how much, and what to change.

use egm_address::{ByteSize, CpuSet, Gpa, Guest, PciAddress, PlacerError, Span};
use egm_device::trust::Conflict;
use egm_report::show::{self, counted, size};
use egm_vfio::host::MISSING_REMEDY;

use crate::config::PageSize;
use crate::error::{Blame, Remedy, Report};
use crate::plan::{AddressBits, AssignedRule, NoPlacement};

/// Why a specification has no plan on a host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum PlanError {
    /// Facts of another kind of host.
    #[error("the configuration is for {wanted}, the facts are of a host with {host}")]
    Architecture {
        /// The guest's instruction set.
        wanted: &'static str,
        /// The host's instruction set.
        host: &'static str,
    },
    /// Address bits that no host has.
    #[error("the facts give {bits} guest physical address bits, which is not between 32 and 52")]
    AddressBits {
        /// Number of bits in the facts.
        bits: u8,
    },
    /// Guest memory beyond the address bits.
    #[error(
        "{what} does not fit below {limit:#x}, the end of {bits}: {} too many",
        size(*short_by)
    )]
    AddressSpace {
        /// `memory of node 1`, `EGM slice 0`.
        what: String,
        /// End of the guest's addresses.
        limit: u64,
        /// Source of that limit.
        bits: AddressBits,
        /// Bytes that found no place.
        short_by: u64,
        /// Configuration key to lower.
        key: &'static str,
    },
    /// Not enough memory in the first node.
    #[error(
        "node {node} has {}, but the first node with memory holds the guest's tables and needs {}",
        show::size(*size), show::size(*least)
    )]
    FirstNode {
        node: u32,
        /// Its memory in bytes.
        size: u64,
        /// Smallest size in bytes.
        least: u64,
    },
    /// A slice that is the guest's first memory and too large to begin where that begins.
    #[error("EGM slice {slice}, {} in one piece, is the guest's first memory, and does not fit at {at:#x}, where that begins", show::size(*size))]
    FirstSlice {
        /// Index of the slice.
        slice: usize,
        size: u64,
        at: Gpa,
    },
    /// Bad pages where the guest's tables are to be, in a slice that is its first memory.
    #[error(
        "EGM slice {slice} is the guest's first memory, and {region} has a retired page at {offset:#x}, where the guest's tables would be"
    )]
    RetiredTables {
        /// Index of the slice.
        slice: usize,
        region: String,
        /// Of the page, in the region.
        offset: u64,
    },
    /// Memory that the largest pages of a guest do not divide.
    #[error("node {node} has {}, which is no multiple of {}, the largest page of such a guest: change its size",
        show::size(*size), show::size(*page))]
    NodeSize {
        node: u32,
        /// Its memory in bytes.
        size: u64,
        /// The page in bytes.
        page: u64,
    },
    /// A range that the host's IOMMU cannot map where the guest must have memory.
    #[error(
        "function {function} cannot reach {reserved} (reserved by the host's IOMMU), where the guest must have {what} at {span}"
    )]
    Reserved {
        /// The function with the IOMMU group that reserves it.
        function: PciAddress,
        reserved: Span<Guest>,
        /// The guest's use of them.
        what: &'static str,
        /// Guest addresses of that use.
        span: Span<Guest>,
    },
    /// More memory than the host has.
    #[error("guest memory needs {} and {scope} has {} {state}: {} too few", size(*needed), size(*has), size(needed.saturating_sub(*has)))]
    HostMemory {
        /// Changes of the configuration after which it fits.
        remedy: String,
        /// `the host`, `host node 1`.
        scope: String,
        needed: u64,
        has: u64,
        /// `in all` or `available`.
        state: &'static str,
    },
    /// A hugetlb pool that is too small.
    #[error("{backing} needs {} of {}, and {scope} has {free}", counted(*needed, "free huge page"), ByteSize::new(page_size.bytes()))]
    HugePages {
        backing: String,
        /// Size of a page.
        page_size: PageSize,
        needed: u64,
        free: u64,
        /// `the host`, `host node 1`.
        scope: String,
        /// sysfs file that sets the pool's size.
        file: String,
        /// Number to write to it.
        write: u64,
        /// Whether ordinary pages for it are available.
        ordinary_fits: bool,
    },
    /// A host node that does not exist.
    #[error("{what} names host node {node}, and the host has nodes {nodes}")]
    HostNode { what: String, node: u32, nodes: CpuSet },
    /// A host CPU that does not exist.
    #[error("vCPU {vcpu} is to run on host CPU {cpu}, and the host has CPUs {cpus}")]
    HostCpu { vcpu: u32, cpu: u32, cpus: CpuSet },
    /// More vCPUs than KVM allows.
    #[error("{} more than the {max} that this host's KVM allows", excess(*count, *max))]
    Vcpus { count: u32, max: u32 },
    /// A vCPU with an interrupt id out of reach.
    #[error(
        "vCPU {vcpu} gets interrupt id {id:#x}, above {max:#x}: each of sockets, cores and threads takes a power of two of ids"
    )]
    HardwareId {
        vcpu: u32,
        id: u32,
        /// Highest that interrupts reach.
        max: u32,
    },
    /// A vCPU of no node.
    #[error("vCPU {vcpu} is in no NUMA node")]
    VcpuNode { vcpu: u32 },
    /// An EGM region that does not exist.
    #[error("EGM slice {slice} comes from region \"{region}\", and the host has {}", list(known))]
    Region {
        /// Index of the slice.
        slice: usize,
        region: String,
        known: Vec<String>,
        kinds: Vec<&'static str>,
    },
    /// Two trust domains would meet in a region that a GPU reaches.
    #[error(transparent)]
    Exclusive(#[from] Box<Conflict>),
    /// None of the regions that a slice would take can give it.
    #[error("EGM slice {slice} has no place: {}", tried.iter().map(|(region, why)| format!("\"{region}\": {why}")).collect::<Vec<_>>().join("; "))]
    NoPlacement {
        /// Index of the slice.
        slice: usize,
        /// Each region, and why it cannot.
        tried: Vec<(String, NoPlacement)>,
    },
    /// More root ports than the bus near a node has places: the node, and their number.
    #[error("cannot put {1} root ports near node {0}: the bus of its host bridge has 32 places")]
    NodeBus(u32, usize),
    /// More functions than the root bus has places.
    #[error("{devices} root ports and devices on bus 0 are more than its {max} places after the host bridge")]
    Bus0 { devices: usize, max: usize },
    /// A function that the facts do not describe.
    #[error("device \"{device}\": host function {function} does not exist")]
    UnknownFunction {
        /// Id of the device.
        device: String,
        function: PciAddress,
    },
    /// Two devices that are one host function.
    #[error("devices \"{first}\" and \"{second}\" are both host function {function}")]
    FunctionTwice {
        /// Id of a device.
        first: String,
        /// Id of the other.
        second: String,
        function: PciAddress,
    },
    /// A BAR that cannot exist.
    #[error("device \"{device}\": BAR {index} of {} cannot be given to a guest: {why}", show::size(*size))]
    Bar {
        /// Id of the device.
        device: String,
        index: u8,
        size: u64,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// More buses than configuration space has addresses for.
    #[error("{devices} devices need {buses} PCI buses, and configuration space has room for {max}")]
    Buses {
        devices: usize,
        /// Buses of their bridges.
        buses: u64,
        /// Buses that there can be.
        max: u64,
    },
    #[error(transparent)]
    Assigned(#[from] AssignedRule),
    /// A BAR, or the BARs behind a root port, found no place.
    #[error("cannot place device \"{device}\" in the {window} PCI window {span}")]
    Window {
        /// Id of the device.
        device: String,
        /// Width of its addresses: `32-bit` or `64-bit`.
        window: &'static str,
        span: Span<Guest>,
        /// How much is missing.
        source: PlacerError<()>,
        /// Size of the 64-bit window that would hold all of them.
        suggested: Option<ByteSize>,
    },
    /// The BARs of a function do not fit into the windows of the spare port that it is to be plugged into.
    #[error("cannot place \"{device}\" in the {window}-bit window of a free slot")]
    SpareWindow {
        /// Id that it would have.
        device: String,
        /// Width of its addresses in bits: 32 or 64.
        window: u8,
        /// How much is missing.
        source: PlacerError<()>,
    },
    /// The 64-bit window found no place.
    #[error(
        "the 64-bit PCI window of {size} does not fit between the end of memory {from:#x} and {limit:#x}, the end of {bits}"
    )]
    Window64 {
        /// Size of the window, the least when the configuration leaves it to the plan.
        size: ByteSize,
        from: Gpa,
        /// End of the guest's addresses.
        limit: u64,
        /// Source of that limit.
        bits: AddressBits,
        /// Whether the configuration set it.
        configured: bool,
    },
    /// The plan broke one of its own rules: our mistake.
    #[error("the plan contradicts itself: {0}")]
    Internal(&'static str),
}

impl Report for PlanError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Architecture { .. } => Blame::Host.help(
                "run it on such a host; to plan it here, record that host's facts with \"egm-vmm facts\" and \
                 name the file with --facts",
            ),
            Self::AddressSpace { key, .. } => Blame::Configuration.help(format!("lower \"{key}\"")),
            Self::FirstNode { node, least, .. } => Blame::Configuration
                .help(format!("give node {node} at least {} in \"memory\"", ByteSize::new(*least))),
            Self::FirstSlice { slice, .. } => Blame::Configuration.help(own_node(*slice)),
            Self::RetiredTables { slice, .. } => Blame::Host.help(own_node(*slice)),
            Self::HostMemory { remedy, .. } => Blame::Host.help(remedy),
            Self::HugePages { file, write, ordinary_fits, .. } => {
                let other = if *ordinary_fits { ", or set \"page_size\": \"auto\"" } else { "" };
                Blame::Host.help(format!("echo {write} > {file} (as root){other}"))
            }
            Self::HostNode { .. } => Blame::Host.help("change \"host_nodes\""),
            Self::HostCpu { .. } => Blame::Host.help("change \"cpus\": {\"affinity\": …}"),
            Self::Vcpus { max, .. } => {
                Blame::Host.help(format!("set \"cpus\": {{\"count\": {max}}} or less"))
            }
            Self::HardwareId { .. } => Blame::Configuration
                .help("make \"sockets\", \"cores\" and \"threads\" powers of two, or their product smaller"),
            Self::VcpuNode { .. } => Blame::Configuration.help("name it in the \"cpus\" of a node"),
            Self::Region { region, known, kinds, .. } => {
                Blame::Host.help(NoPlacement::unknown(region, known, kinds))
            }
            Self::Exclusive(conflict) => conflict.remedy(),
            Self::NoPlacement { tried, .. } => Blame::Host.help(NoPlacement::remedy(tried)),
            Self::Bus0 { .. } | Self::NodeBus(..) | Self::Buses { .. } => {
                Blame::Configuration.help("remove devices")
            }
            Self::Assigned(rule) => Blame::Configuration.help(rule.help()),
            Self::UnknownFunction { .. } => Blame::Host.help(format!(
                "{MISSING_REMEDY}; facts of another host are recorded there, by \"egm-vmm facts\""
            )),
            Self::Window { suggested: Some(size), .. } => Blame::Configuration
                .help(format!("set \"pcie\": {{\"window64\": \"{size}\"}}, or leave it out")),
            Self::SpareWindow { window, source, .. } => Blame::Configuration.help(format!(
                "give spare ports \"window{window}\": \"{}\" in \"pcie\": {{\"spare\": …}}",
                ByteSize::new(source.size.next_power_of_two())
            )),
            Self::Window64 { configured: true, .. } => {
                Blame::Configuration.help("lower \"pcie\": {\"window64\": …} or memory")
            }
            Self::Window64 { configured: false, .. } => {
                Blame::Configuration.help("lower memory, or remove devices")
            }
            Self::Window { suggested: None, .. } => {
                Blame::Configuration.help("remove devices with large 32-bit BARs")
            }
            Self::AddressBits { .. }
            | Self::Bar { .. }
            | Self::NodeSize { .. }
            | Self::FunctionTwice { .. } => Blame::Configuration.into(),
            Self::Reserved { .. } => Blame::Host.into(),
            Self::Internal(_) => Blame::Internal.into(),
        }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// `1 vCPU is 1`, `9 vCPUs are 8`.
fn excess(count: u32, max: u32) -> String {
    let verb = if count == 1 { "is" } else { "are" };
    format!("{} {verb} {}", counted(count.into(), "vCPU"), count.saturating_sub(max))
}

fn own_node(slice: usize) -> String {
    format!("give node 0 a \"size\" in \"memory\".\"nodes\", and egm[{slice}] a node of its own")
}
