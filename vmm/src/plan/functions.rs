//! PCI functions of the plan, and how those of the host are assigned.

use egm_address::{Guest, PciAddress, Span};
use egm_vfio::topology::Acs;
use serde::{Deserialize, Serialize};

use crate::config::Device;

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

impl BarKind {
    /// Whether it lies in the 64-bit window.
    pub(super) const fn is_high(self) -> bool {
        matches!(self, Self::Memory64Prefetchable)
    }

    /// Whether it takes two registers.
    pub(super) const fn is_wide(self) -> bool {
        matches!(self, Self::Memory64 | Self::Memory64Prefetchable)
    }
}

/// A base address register and its guest addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarPlan {
    /// Register number, 0 to 5.
    pub index: u8,
    /// Width of its addresses, and whether it is prefetchable.
    pub kind: BarKind,
    /// Guest addresses; the size is a power of two and the start a multiple of it.
    pub span: Span<Guest>,
}

/// A PCI function of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionPlan {
    /// Segment, bus, device and function number.
    pub address: PciAddress,
    /// Kind of function, with the plan of a bridge or a device.
    pub role: FunctionRole,
    /// Its base address registers.
    pub bars: Vec<BarPlan>,
    /// MSI-X vectors; 0 when it has none.
    pub msix_vectors: u16,
}

impl FunctionPlan {
    /// Whether it is a port with nothing behind it among `all` functions.
    pub(crate) fn is_spare_port(&self, all: &[Self]) -> bool {
        let bus = self.role.bridge().map(|bridge| bridge.secondary);
        bus.is_some_and(|bus| all.iter().all(|function| function.address.bus() != bus))
    }
}

/// Kind of a PCI function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "kebab-case")]
pub enum FunctionRole {
    /// The host bridge, 00:00.0.
    HostBridge,
    /// A PCI Express root port.
    RootPort {
        /// Physical slot number, 13 bits (Slot Capabilities).
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
        /// Physical slot number, 13 bits (Slot Capabilities).
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

impl BridgePlan {
    /// The address of a device that is alone behind it.
    pub(crate) fn only_device(&self) -> Option<PciAddress> {
        PciAddress::new(0, self.secondary, 0, 0).ok()
    }
}

/// A host bridge for devices near another node than that of bus 0: a guest gives devices the node of their host bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpanderPlan {
    /// Guest NUMA node of the devices behind it.
    pub node: u32,
    /// Its buses and windows.
    #[serde(flatten)]
    pub bridge: BridgePlan,
}

/// Plan of one assigned host function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedPlan {
    /// Address of the function on the host.
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
    /// First of its `GPU_NODES` guest NUMA nodes, which the guest's driver fills.
    pub first_node: u32,
    /// Index of the backing that its driver may use as EGM, in [`Plan::backings`](crate::plan::Plan::backings): a slice of its own
    /// region that begins where that does, because the GPU counts from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egm: Option<usize>,
}

/// Nodes of a GPU's memory: one for each part that it can be divided into.
pub(crate) const GPU_NODES: u32 = 8;

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
    /// `/dev/vfio/devices/vfioN`, with I/O address spaces of `/dev/iommu`.
    Iommufd,
}

/// An IOMMU group that the machine needs as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPlan {
    /// Number of the group in `/sys/kernel/iommu_groups`.
    pub id: u32,
    /// The host functions in it that are assigned, ascending.
    pub functions: Vec<PciAddress>,
}
