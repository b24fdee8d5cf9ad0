//! Guest RAM in the plan, and the memory of the host behind it.

use egm_address::{ByteSize, CpuSet, Guest, Hpa, Span};
use serde::{Deserialize, Serialize};

use crate::config::PageSize;

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
    /// Size in bytes.
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
    /// Ordinary memory.
    Ram,
    /// An EGM slice.
    Egm,
}

/// A piece of guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Guest addresses.
    pub span: Span<Guest>,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// Its NUMA node.
    pub node: u32,
    /// Index into [`Plan::backings`](crate::plan::Plan::backings).
    pub backing: usize,
    /// Offset of its first byte in the backing.
    pub offset: u64,
}
