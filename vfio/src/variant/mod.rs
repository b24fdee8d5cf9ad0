//! What is special about a function, beyond what PCI says. Decisions only: nothing here reads the host.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod clique;
pub mod data_direct;
pub mod nvgrace;

use crate::host::{DeviceMemory, HostBar, HostFunction};
use crate::ids::{DATA_DIRECT, MELLANOX, NVIDIA};

/// What kind of function it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Nothing special.
    Plain,
    /// An NVIDIA GPU: takes the P2P approval of [`clique`].
    NvidiaDisplay,
    /// An NVIDIA GPU whose memory is on the host's coherent fabric, under the kernel's driver for it: [`nvgrace`].
    NvGrace,
    /// A `ConnectX` or `BlueField` network function: may have a partner, [`data_direct`].
    ConnectX,
    /// The partner.
    DataDirect,
}

/// Base class of display controllers (PCI Code and ID Assignment §1.4).
const DISPLAY: u32 = 0x03;
/// Base class of network controllers; InfiniBand is one.
const NETWORK: u32 = 0x02;

impl Variant {
    /// The kind of `function`, by the driver that holds it and its ids. What nvgrace-gpu has is its device whatever the ids
    /// are: new GPUs are given to it by name, and so are emulated ones.
    pub fn of(function: &HostFunction) -> Self {
        if function.driver.as_deref() == Some(nvgrace::DRIVER) {
            return Self::NvGrace;
        }
        match (function.vendor, function.class >> 16) {
            (NVIDIA, DISPLAY) => Self::NvidiaDisplay,
            (MELLANOX, _) if function.device == DATA_DIRECT => Self::DataDirect,
            (MELLANOX, NETWORK) => Self::ConnectX,
            _ => Self::Plain,
        }
    }

    /// Whether an NVIDIA driver in the guest would look for a clique.
    pub fn takes_clique(self) -> bool {
        matches!(self, Self::NvidiaDisplay | Self::NvGrace)
    }

    /// The regions of `function` that are memory, among those of these numbers and sizes that its driver shows.
    pub fn memory(function: &HostFunction, regions: &[(u8, u64)]) -> Vec<DeviceMemory> {
        let variant = Self::of(function);
        let is_memory =
            |&(bar, size): &(u8, u64)| variant.region(&function.bars, bar, size).dma == DmaSource::Memory;
        let memory = regions.iter().copied().filter(is_memory);
        memory.map(|(bar, size)| DeviceMemory { bar, size }).collect()
    }

    /// What region `bar` of `size` bytes is, as VFIO shows it, of a function whose own BARs are `bars`.
    pub fn region(self, bars: &[HostBar], bar: u8, size: u64) -> RegionPolicy {
        match self {
            Self::NvGrace => nvgrace::region(bars, bar, size),
            _ => RegionPolicy::REGISTERS,
        }
    }
}

/// How a region is given to a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPolicy {
    /// What the kernel's mapping of it is, and with it the guest's.
    pub caching: Caching,
    /// KVM capability that the virtual machine must have for it (asked on its descriptor, not on `/dev/kvm`).
    pub kvm_capability: Option<u32>,
    /// How other devices reach it.
    pub dma: DmaSource,
}

impl RegionPolicy {
    /// An ordinary BAR.
    pub const REGISTERS: Self = Self { caching: Caching::Device, kvm_capability: None, dma: DmaSource::Peer };
}

/// How CPUs reach a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// As device memory, or write-combined where the guest says so.
    Device,
    /// As memory without caches.
    Uncached,
    /// As memory.
    Cacheable,
}

/// How devices reach a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaSource {
    /// Peer to peer: a BAR that other functions are given where the host can, and do without where it cannot.
    Peer,
    /// As memory: a device that cannot reach it is broken, so failing to map it is an error.
    Memory,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostBarKind;
    use crate::topology::Place;

    #[test]
    fn what_nvgrace_gpu_has_is_its_device_whatever_the_ids_are() {
        let own = HostBar { index: 2, kind: HostBarKind::Memory32, size: 0x1000, start: 0 };
        let function = |vendor: u16, driver: Option<&str>| HostFunction {
            address: "0000:00:03.0".parse().unwrap(),
            vendor,
            device: 0x1111,
            class: 0x03_8000,
            driver: driver.map(str::to_owned),
            numa_node: None,
            iommu_group: Some(3),
            bars: vec![own],
            msix_vectors: None,
            reserved: Vec::new(),
            iova_bits: None,
            memory: Vec::new(),
            card: None,
            place: Place::default(),
        };
        for vendor in [NVIDIA, 0x1234] {
            assert_eq!(
                Variant::of(&function(vendor, Some(nvgrace::DRIVER))),
                Variant::NvGrace,
                "{vendor:#x}"
            );
        }
        assert_eq!(Variant::of(&function(NVIDIA, Some("vfio-pci"))), Variant::NvidiaDisplay);
        assert_eq!(Variant::of(&function(0x1234, None)), Variant::Plain);
        let shown =
            Variant::memory(&function(0x1234, Some(nvgrace::DRIVER)), &[(2, 0x8000_0000), (4, 0x4000_0000)]);
        assert_eq!(shown.iter().map(|memory| memory.bar).collect::<Vec<_>>(), [2, 4]);
    }
}
