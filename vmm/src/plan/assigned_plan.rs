//! The plan's part about host functions.

use egm_address::PciAddress;
use serde::{Deserialize, Serialize};

/// Plan of one assigned host function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedPlan {
    /// The host function.
    pub function: PciAddress,
    /// Its IOMMU group; `None` when the facts have none.
    pub group: Option<u32>,
    /// Guest NUMA node that it is near to, where that is known.
    pub node: Option<u32>,
    /// Number for NVIDIA's peer-to-peer capability, 0 to 15; `None` leaves the capability out.
    pub clique: Option<u8>,
    /// Whether the machine's other assigned functions reach its BARs.
    pub p2p: bool,
    /// The other host function of a Data Direct pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partner: Option<PciAddress>,
    /// Memory that it shares with processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<GpuMemoryPlan>,
}

/// Memory of a GPU that processors reach as their own ([`egm_vfio::variant::nvgrace`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemoryPlan {
    /// BARs that are memory.
    pub bars: Vec<u8>,
    /// First of its [`GPU_NODES`] guest NUMA nodes, which the guest's driver fills.
    pub first_node: u32,
    /// Index of the backing that its driver may use as EGM, in [`Plan::backings`](crate::plan::Plan::backings): a slice of its own
    /// region that begins where that does, because the GPU counts from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egm: Option<usize>,
}

/// Nodes of a GPU's memory: one for each part that it can be divided into.
pub const GPU_NODES: u32 = 8;

/// How host functions are opened, all of a machine in one way: guest memory is then pinned once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassthroughPlan {
    /// Interface of all functions.
    pub interface: Interface,
    /// Reason for this one, for the operator.
    pub why: String,
    /// IOMMU groups by ascending number.
    pub groups: Vec<GroupPlan>,
    /// Bytes of guest memory that the kernel pins and counts against the memlock limit.
    pub pinned: u64,
}

/// Interface of the kernel to host functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interface {
    /// `/dev/vfio/GROUP` in a container with a type 1 IOMMU.
    Legacy,
    /// `/dev/vfio/devices/vfioN` and `/dev/iommu`.
    Iommufd,
}

/// An IOMMU group that the machine needs as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPlan {
    /// Its number.
    pub id: u32,
    /// The host functions in it that are assigned, ascending.
    pub functions: Vec<PciAddress>,
}
