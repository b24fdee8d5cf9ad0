//! Behaviour of a function beyond PCI. Decisions only: nothing here reads the host.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod clique;
pub mod data_direct;
pub mod nvgrace;

use crate::host::{DeviceMemory, HostBar, HostFunction};
use crate::ids::{DATA_DIRECT, MELLANOX, NVIDIA};

/// Kind of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// A function without special behaviour.
    Plain,
    /// An NVIDIA GPU: accepts the P2P approval of [`clique`].
    NvidiaDisplay,
    /// An NVIDIA GPU with memory on the host's coherent fabric, under the kernel's driver for it: [`nvgrace`].
    NvGrace,
    /// A `ConnectX` or `BlueField` network function: may have a partner, [`data_direct`].
    ConnectX,
    /// Data Direct partner of such a function: [`data_direct`].
    DataDirect,
}

/// Base class of display controllers (PCI Code and ID Assignment §1.4).
const DISPLAY: u32 = 0x03;
/// Base class of network controllers; InfiniBand is one.
const NETWORK: u32 = 0x02;

impl Variant {
    /// Kind of `function`, by its driver and its ids. A function bound to nvgrace-gpu is of that kind regardless of its
    /// ids: new GPUs, and emulated ones, are bound to that driver by name.
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

    /// Regions of `function` that are memory, among `regions`: the numbers and sizes that its driver presents.
    pub fn memory(function: &HostFunction, regions: &[(u8, u64)]) -> Vec<DeviceMemory> {
        let variant = Self::of(function);
        let is_memory =
            |&(bar, size): &(u8, u64)| variant.region(&function.bars, bar, size).dma == DmaSource::Memory;
        let memory = regions.iter().copied().filter(is_memory);
        memory.map(|(bar, size)| DeviceMemory { bar, size }).collect()
    }

    /// Policy for region `bar` of `size` bytes, as VFIO presents it; `bars` are the function's own BARs.
    pub fn region(self, bars: &[HostBar], bar: u8, size: u64) -> RegionPolicy {
        match self {
            Self::NvGrace => nvgrace::region(bars, bar, size),
            _ => RegionPolicy::REGISTERS,
        }
    }
}

/// How a guest gets a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPolicy {
    /// Caching of the kernel's mapping, and with it of the guest's.
    pub caching: Caching,
    /// KVM capability that the virtual machine must have for it (checked on its descriptor, not on `/dev/kvm`).
    pub kvm_capability: Option<u32>,
    /// Access of other devices to it.
    pub dma: DmaSource,
}

impl RegionPolicy {
    /// Policy of an ordinary BAR, with registers of a device.
    pub const REGISTERS: Self = Self { caching: Caching::Device, kvm_capability: None, dma: DmaSource::Peer };
}

/// How CPUs reach a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// As device memory, or write-combined if the guest requests it.
    Device,
    /// As memory without caches.
    Uncached,
    /// As memory that CPUs cache.
    Cacheable,
}

/// How devices reach a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaSource {
    /// Peer to peer: a BAR that is mapped for other functions if the host can, and left out if it cannot.
    Peer,
    /// As memory: a device that cannot reach it is broken, so failing to map it is an error.
    Memory,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostBarKind;
    use crate::topology::FunctionPlacement;

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
            place: FunctionPlacement::default(),
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
