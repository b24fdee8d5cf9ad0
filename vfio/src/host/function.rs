//! A PCI function of the host, as sysfs describes it.

use egm_address::{Io, PciAddress, Span};
use serde::{Deserialize, Serialize};

use super::bar::{DeviceMemory, HostBar, HostBarKind};
use crate::topology::FunctionPlacement;
use crate::variant::data_direct::Card;

/// A PCI function of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFunction {
    /// Address on the host.
    pub address: PciAddress,
    /// Vendor id, which PCI-SIG assigns.
    pub vendor: u16,
    /// Device id, which the vendor assigns.
    pub device: u16,
    /// Class, subclass and programming interface, 24 bits.
    pub class: u32,
    /// Bound driver, if any.
    pub driver: Option<String>,
    /// Host NUMA node, if the firmware reports one.
    pub numa_node: Option<u32>,
    /// IOMMU group; `None` when no IOMMU translates its accesses.
    pub iommu_group: Option<u32>,
    /// Its base address registers, by index.
    pub bars: Vec<HostBar>,
    /// MSI-X vectors; `None` when its configuration space beyond 64 bytes could not be read (not root).
    pub msix_vectors: Option<u16>,
    /// I/O virtual addresses that its group cannot map.
    pub reserved: Vec<ReservedRegion>,
    /// Width of the I/O virtual addresses that its IOMMU translates, in bits, if the IOMMU reports it (Intel).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iova_bits: Option<u8>,
    /// Regions that its driver backs with memory, in place of the hardware's registers ([`crate::variant::nvgrace`]).
    /// Only an open function reports them, so [`super::function()`] leaves this empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<DeviceMemory>,
    /// Identification of the partner, for a function that may have one ([`crate::variant::data_direct`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<Card>,
    /// Position in the host's PCI topology.
    #[serde(default, skip_serializing_if = "FunctionPlacement::is_empty")]
    pub place: FunctionPlacement,
}

impl HostFunction {
    /// BARs as the driver presents them: those of memory replace the hardware's.
    pub fn shown_bars(&self) -> Vec<HostBar> {
        let is_memory = |bar: &&HostBar| !self.memory.iter().any(|memory| memory.bar == bar.index);
        let memory = self.memory.iter().map(|&DeviceMemory { bar, size }| HostBar {
            index: bar,
            kind: HostBarKind::Memory64Prefetchable,
            size,
            start: 0,
        });
        let mut bars: Vec<HostBar> = self.bars.iter().filter(is_memory).copied().chain(memory).collect();
        bars.sort_by_key(|bar| bar.index);
        bars
    }
}

/// A range that an IOMMU group cannot map freely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReservedRegion {
    /// Reserved I/O virtual addresses.
    pub span: Span<Io>,
    /// Reason for the reservation.
    pub kind: ReservedKind,
}

/// Why a range of I/O virtual addresses is reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReservedKind {
    /// The firmware's device needs an identity mapping there.
    Direct,
    /// As `Direct`, but only until a driver takes the device: a guest may use it.
    DirectRelaxable,
    /// Not translated at all.
    Reserved,
    /// Writes there are interrupts.
    Msi,
}
