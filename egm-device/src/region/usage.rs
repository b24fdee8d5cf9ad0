//! Granted and dirty parts of the regions, and their sums for each socket.

use std::collections::{BTreeMap, BTreeSet};

use egm_address::{ByteSize, CpuSet, PciAddress};
use serde::Serialize;

use crate::region::{Region, Survey};

/// State of a region in the ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Slices that have an owner, by offset.
    pub held: Vec<OwnedPart>,
    /// Bytes that must be scrubbed before they are granted.
    pub dirty: Vec<RegionPart>,
    /// GPUs that make the region exclusive, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exclusive: Vec<String>,
}

/// A slice and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnedPart {
    /// Offset and size of the slice.
    #[serde(flatten)]
    pub part: RegionPart,
    /// The owner, by the name that operators use.
    pub owner: String,
}

/// Bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RegionPart {
    /// First byte, counted in the region.
    pub offset: u64,
    /// Number of bytes from `offset` on.
    pub size: ByteSize,
}

impl Usage {
    /// Number of bytes that have an owner.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.held.iter().fold(0, |sum, held| sum.saturating_add(held.part.size.get()))
    }

    /// Number of bytes that must be scrubbed.
    #[must_use]
    pub fn dirty(&self) -> u64 {
        self.dirty.iter().fold(0, |sum, part| sum.saturating_add(part.size.get()))
    }
}

/// The ledger's state of each region; a region that it does not know is missing.
pub type Usages = BTreeMap<String, Usage>;

/// A socket: a node with processors, and the memory and GPUs at it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Socket {
    /// The node's number; regions of an unknown node have a line of their own.
    pub node: Option<u32>,
    /// Processors of the node.
    pub cpus: CpuSet,
    /// All memory: visible, aside and invisible.
    pub total: ByteSize,
    /// Memory of the kernel's allocator, hugetlb pools included.
    pub visible: ByteSize,
    /// Device-DAX: the kernel has struct pages for it and does not allocate from it.
    pub aside: ByteSize,
    /// Memory that the kernel does not see.
    pub invisible: ByteSize,
    /// Granted memory of the regions; `None` without a ledger.
    pub granted: Option<ByteSize>,
    /// Memory of the regions that must be scrubbed; `None` without a ledger.
    pub dirty: Option<ByteSize>,
    /// Pages that must not be used.
    pub retired: ByteSize,
    /// Sizes of the regions' pages.
    pub page_sizes: BTreeSet<ByteSize>,
    /// GPUs that reach the regions at link speed.
    pub functions: BTreeSet<PciAddress>,
}

impl Socket {
    /// Whether `region` lies here. A pool of no node belongs to no socket.
    #[must_use]
    pub fn has(&self, region: &Region) -> bool {
        lies_at(region, self.node)
    }
}

fn lies_at(region: &Region, node: Option<u32>) -> bool {
    region.node == node && (node.is_some() || !region.kind.is_pool())
}

/// The host's sockets, by node. This process's own memory may lie on any node and belongs to none.
#[must_use]
pub fn sockets(survey: &Survey, usages: &Usages) -> Vec<Socket> {
    let nodes: BTreeSet<Option<u32>> = survey
        .host
        .nodes
        .iter()
        .map(|node| Some(node.id))
        .chain(survey.regions.iter().filter(|region| !region.kind.is_pool()).map(|region| region.node))
        .collect();
    // Regions of no known node come last.
    let (known, unknown): (Vec<_>, Vec<_>) = nodes.into_iter().partition(Option::is_some);
    known.into_iter().chain(unknown).map(|node| socket(survey, usages, node)).collect()
}

fn socket(survey: &Survey, usages: &Usages, node: Option<u32>) -> Socket {
    let of_kernel = survey.host.nodes.iter().find(|of_kernel| Some(of_kernel.id) == node);
    let here: Vec<&Region> = survey.regions.iter().filter(|region| lies_at(region, node)).collect();
    let used = |of: &dyn Fn(&Usage) -> u64| {
        let bytes = here.iter().filter_map(|region| usages.get(&region.name)).map(of);
        (!usages.is_empty()).then(|| sum(bytes))
    };
    let (invisible, rest): (Vec<&Region>, Vec<&Region>) =
        here.iter().copied().partition(|region| region.kind.is_invisible());
    let visible = of_kernel.map(|node| node.total).unwrap_or_default();
    let invisible = sum(invisible.iter().map(|region| region.size.get()));
    let aside = sum(rest.iter().filter(|region| !region.kind.is_pool()).map(|region| region.size.get()));
    let total = sum([visible, invisible, aside].map(ByteSize::get).into_iter());
    Socket {
        node,
        cpus: of_kernel.map(|node| node.cpus.clone()).unwrap_or_default(),
        total,
        visible,
        aside,
        invisible,
        granted: used(&Usage::granted),
        dirty: used(&Usage::dirty),
        retired: sum(here.iter().map(|region| region.retired.spans().size())),
        page_sizes: here.iter().map(|region| region.page_size).collect(),
        functions: here.iter().flat_map(|region| region.functions.iter().copied()).collect(),
    }
}

fn sum(sizes: impl Iterator<Item = u64>) -> ByteSize {
    ByteSize::new(sizes.fold(0, u64::saturating_add))
}
