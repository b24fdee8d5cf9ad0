//! GPUs with memory that the host's CPUs share coherently (Grace Hopper, Grace Blackwell), under `nvgrace-gpu`.
//!
//! The driver shows that memory as two BARs that the hardware does not have: region 4, which CPUs cache ("usemem"), and
//! on parts that need it region 2, which they do not ("resmem"). A region's size is a power of two; how much of it is
//! memory is its one mappable span, and [`crate::pci::bars::cut`] traps the tail (Linux
//! `drivers/vfio/pci/nvgrace-gpu/main.c`).

use std::time::Duration;

use super::{Caching, DmaSource, RegionPolicy};
use crate::host::HostBar;

/// The driver's name in sysfs.
pub const DRIVER: &str = "nvgrace_gpu_vfio_pci";

/// `KVM_CAP_ARM_CACHEABLE_PFNMAP_SUPPORTED` (Linux 6.17): without it KVM refuses a slot over usemem.
pub const KVM_CACHEABLE_PFNMAP: u32 = 243;

const USEMEM: u8 = 4;
const RESMEM: u8 = 2;

/// Policy for region `bar` of `size` bytes. Without the firmware's properties the driver presents the hardware's BARs,
/// so a region is memory if its size differs from the BAR that the host knows.
pub(super) fn region(bars: &[HostBar], bar: u8, size: u64) -> RegionPolicy {
    let own = bars.iter().find(|own| own.index == bar).map_or(0, |own| own.size);
    let other = size != 0 && size != own;
    match bar {
        USEMEM if other => RegionPolicy {
            caching: Caching::Cacheable,
            kvm_capability: Some(KVM_CACHEABLE_PFNMAP),
            dma: DmaSource::Memory,
        },
        RESMEM if other => {
            RegionPolicy { caching: Caching::Uncached, kvm_capability: None, dma: DmaSource::Memory }
        }
        _ => RegionPolicy::REGISTERS,
    }
}

/// How long the driver waits for a device; an open after a reset takes as long.
pub const READY_WITHIN: Duration = Duration::from_secs(30);

/// A register of BAR 0 that shows whether the memory can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyRegister {
    /// Offset in BAR 0; 32 bits.
    pub offset: u64,
    /// Name of what the register reports on.
    pub name: &'static str,
}

/// All must read [`DONE`]. A device that does not answer reads as all ones, which is a different value.
const READY: [ReadyRegister; 2] = [
    ReadyRegister { offset: 0x1498, name: "C2C link" },
    ReadyRegister { offset: 0x200bc, name: "HBM training" },
];

/// Value of a register that is ready.
const DONE: u32 = 0xff;

/// The first register that is not ready, and what it read.
pub fn waits_for(mut read: impl FnMut(u64) -> u32) -> Option<(ReadyRegister, u32)> {
    let mut all = READY.into_iter().map(|register| (register, read(register.offset)));
    all.find(|(_, value)| *value != DONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostBarKind;

    /// A GH200's own BARs, as sysfs has them.
    fn bars() -> [HostBar; 3] {
        let kind = HostBarKind::Memory64Prefetchable;
        [(0, 16 << 20), (2, 64 << 10), (4, 32 << 20)].map(|(index, size)| HostBar {
            index,
            kind,
            size,
            start: 0,
        })
    }

    #[test]
    fn memory_is_cached_in_region_4_and_not_in_region_2() {
        let usemem = region(&bars(), 4, 128 << 30);
        assert_eq!((usemem.caching, usemem.kvm_capability), (Caching::Cacheable, Some(243)));
        let resmem = region(&bars(), 2, 1 << 30);
        assert_eq!((resmem.caching, resmem.kvm_capability), (Caching::Uncached, None));
        assert_eq!([usemem.dma, resmem.dma], [DmaSource::Memory; 2]);
        assert_eq!(region(&bars(), 0, 16 << 20), RegionPolicy::REGISTERS);
    }

    #[test]
    fn without_firmware_properties_all_regions_are_ordinary() {
        for bar in bars() {
            assert_eq!(region(&bars(), bar.index, bar.size), RegionPolicy::REGISTERS);
        }
    }

    #[test]
    fn a_device_is_ready_when_link_and_memory_are() {
        let name = |c2c, hbm| {
            waits_for(|offset| if offset == 0x1498 { c2c } else { hbm }).map(|(register, _)| register.name)
        };
        assert_eq!(name(0xff, 0xff), None);
        assert_eq!(name(0xff, 0x7f), Some("HBM training"));
        assert_eq!(name(0, 0), Some("C2C link"));
        assert_eq!(name(u32::MAX, u32::MAX), Some("C2C link"), "gone, not ready");
    }
}
