//! The recorded form of a host.

use std::path::PathBuf;

use egm_address::{ByteSize, CpuSet, InRegion, PciAddress, Span};
use egm_device::owner::Owner;
use egm_device::record::RECORD_VERSION;
use egm_device::region::{MemoryMap, Region};
use egm_vfio::host::{HostBar, HostFunction};
use serde::{Deserialize, Serialize};

use crate::config::Architecture;

pub use egm_device::region::Pool;

/// Version of the JSON form of [`Facts`]; a reader refuses others.
pub(crate) const FACTS_VERSION: u32 = RECORD_VERSION;

/// A host, as far as plans depend on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Version of this form, `FACTS_VERSION`; a reader refuses others.
    pub version: u32,
    /// The machine, and whether the facts were recorded or made by hand.
    pub description: String,
    /// Instruction set of the host's kernel.
    pub arch: Architecture,
    /// Product name of the machine; empty when unknown.
    pub product: String,
    /// As the CPU names its maker: `GenuineIntel`, `AuthenticAMD`; empty when unknown.
    pub cpu_vendor: String,
    /// Kernel release, as `uname -r` prints it; empty when it was not read.
    pub kernel: String,
    /// The kernel's command line; empty when unknown.
    pub command_line: String,
    /// Guest physical address bits, 32 to 52.
    pub address_bits: u8,
    /// The kernel's virtual machine support.
    pub kvm: Probe<Kvm>,
    /// Memory of the whole host.
    pub memory: HostMemory,
    /// Addresses of its memory, for `egm-device`; empty where no region was looked for.
    pub memory_map: MemoryMap,
    /// When the kernel uses transparent huge pages for shared memory: `always`, `advise`, `never`, …; empty when
    /// unknown.
    pub shmem_huge_pages: String,
    /// When it uses them for private memory: `always`, `madvise`, `never`; empty when unknown.
    #[serde(default)]
    pub anonymous_huge_pages: String,
    /// Bytes of a transparent huge page.
    #[serde(default = "usual_huge_page")]
    pub huge_page: ByteSize,
    /// Whether this user may mount a tmpfs with huge pages.
    #[serde(default = "not_recorded")]
    pub huge_files: Probe<HugeFiles>,
    /// NUMA nodes, by ascending id.
    pub nodes: Vec<HostNode>,
    /// Translation of device accesses.
    pub iommu: Probe<Iommu>,
    /// Carve-outs of its memory, by name.
    pub regions: Vec<HostRegion>,
    /// PCI functions, by address.
    pub functions: Vec<HostFunction>,
    /// vfio-user servers, by socket.
    #[serde(default)]
    pub servers: Vec<Server>,
}

impl Facts {
    /// The region called `name`, with the owners of its spans.
    pub fn region(&self, name: &str) -> Option<&HostRegion> {
        self.regions.iter().find(|host| host.region.name == name)
    }
}

/// The transparent huge page of processors with pages of 4 KiB.
const fn usual_huge_page() -> ByteSize {
    ByteSize::new(2 << 20)
}

fn not_recorded() -> Probe<HugeFiles> {
    Probe::Absent("not recorded".to_owned())
}

/// How a tmpfs with huge pages is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HugeFiles {
    /// By a child in a user namespace, for a user without the right.
    pub user_namespace: bool,
}

/// A property of a host, or the reason why it is unavailable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Probe<T> {
    /// The host has it, and it can be used.
    Present(T),
    /// The host lacks it, or it cannot be used, for this reason.
    Absent(String),
}

impl<T> Probe<T> {
    /// The value, if there is one.
    pub fn present(&self) -> Option<&T> {
        match self {
            Self::Present(value) => Some(value),
            Self::Absent(_) => None,
        }
    }
}

/// Limits that `/dev/kvm` reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kvm {
    /// Most vCPUs of a virtual machine.
    pub max_vcpus: u32,
    /// Whether vCPUs may have 32-bit APIC ids (x86).
    pub x2apic: bool,
}

/// Memory of a host or of one of its nodes, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostMemory {
    /// Memory that the kernel manages.
    pub total: ByteSize,
    /// Memory available without swapping when the facts were recorded.
    pub available: ByteSize,
}

impl Facts {
    /// The same as if no memory were in use: for a machine that has its memory already.
    pub(crate) fn with_all_memory_free(mut self) -> Self {
        self.memory.available = self.memory.total;
        for node in &mut self.nodes {
            node.memory.available = node.memory.total;
            node.pools.iter_mut().for_each(|pool| pool.free = pool.total);
        }
        self
    }
}

/// A NUMA node of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct HostNode {
    pub id: u32,
    /// Its CPUs that are online.
    pub cpus: CpuSet,
    pub memory: HostMemory,
    /// Distance to each online node, in the order of [`Facts::nodes`].
    pub distances: Vec<u8>,
    pub pools: Vec<Pool>,
}

/// IOMMUs that the kernel uses, as its IOMMU groups show.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iommu {
    /// Number of entries in `/sys/kernel/iommu_groups`.
    pub groups: u32,
    /// Whether the kernel offers `/dev/iommu`.
    #[serde(default)]
    pub iommufd: bool,
}

/// A carve-out of host memory, with its held and its clean spans.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRegion {
    /// The carve-out by name, source, size and addresses.
    pub region: Region,
    /// Spans that have an owner.
    #[serde(default)]
    pub held: Vec<HeldSpan>,
    /// Spans that need no scrub before they are granted.
    #[serde(default)]
    pub clean: Vec<Span<InRegion>>,
    /// GPUs with a live owner that reach all of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<HeldGpu>,
}

/// A GPU that reaches a region and has an owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldGpu {
    /// Address of the GPU on the host.
    pub function: PciAddress,
    /// Its owner, in words.
    pub owner: String,
    /// The owner's trust domain.
    #[serde(default, skip_serializing_if = "Trust::is_unrecorded")]
    pub trust: Trust,
}

/// Trust domain of an owner.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trust {
    /// From facts without trust domains: no plan is refused because of it.
    #[default]
    Unrecorded,
    /// A domain of its own.
    Alone,
    /// The domain of this name.
    Domain(String),
}

impl Trust {
    /// The trust domain of `owner`; an unknown one trusts no other.
    pub(super) fn of(owner: Option<&Owner>) -> Self {
        owner.and_then(|owner| owner.domain.clone()).map_or(Self::Alone, Self::Domain)
    }

    /// The name of the domain.
    pub fn domain(&self) -> Option<&str> {
        match self {
            Self::Domain(name) => Some(name),
            Self::Unrecorded | Self::Alone => None,
        }
    }

    fn is_unrecorded(&self) -> bool {
        *self == Self::Unrecorded
    }
}

/// Bytes of a region that have an owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldSpan {
    /// Span in the region.
    pub span: Span<InRegion>,
    /// Its owner, in words.
    pub owner: String,
    /// The owner's trust domain.
    #[serde(default, skip_serializing_if = "Trust::is_unrecorded")]
    pub trust: Trust,
}

/// A vfio-user server, and the resources of its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Path of the Unix socket that it listens on.
    pub socket: PathBuf,
    /// Its base address registers.
    pub bars: Vec<HostBar>,
    /// Number of MSI-X vectors; 0 when it has none.
    pub msix_vectors: u16,
}
