//! Parser of the kernel's answers. Pure; it does not trust an answer because the kernel sent it: every chain ends.

use std::mem::offset_of;

use egm_address::{InBar, Io, Iova, PciAddress, Span};
use vfio_bindings::bindings::vfio;

use super::message::Message;
use crate::backend::{Interrupts, Region};
use crate::dma::Limits;

/// A capability in an answer: `struct vfio_info_cap_header`, then the fields of its kind.
struct Capability {
    id: u32,
    /// Offset in the answer.
    at: usize,
}

/// Bytes of `struct vfio_info_cap_header`.
const HEADER: usize = size_of::<vfio::vfio_info_cap_header>();

/// Most capabilities that are followed: the kernel has five kinds.
const MOST_CAPABILITIES: usize = 16;

/// Follows the chain of capabilities from `first`. It ends at 0, outside the answer, where it does not ascend, and
/// after [`MOST_CAPABILITIES`].
fn capabilities(answer: &Message, first: u32) -> Vec<Capability> {
    let mut found: Vec<Capability> = Vec::new();
    let mut next = first;
    while found.len() < MOST_CAPABILITIES {
        let Ok(at) = usize::try_from(next) else { break };
        let ascends = found.last().map_or(at > 0, |last| at > last.at);
        let id = answer.get_short(at);
        let following = answer.get(at.saturating_add(offset_of!(vfio::vfio_info_cap_header, next)));
        let (true, Some(id), Some(following)) = (ascends, id, following) else { break };
        found.push(Capability { id: u32::from(id), at });
        next = following;
    }
    found
}

/// `count` pairs of 64-bit numbers from `at`, as far as the answer has them.
fn pairs(answer: &Message, at: usize, count: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
    let places = (at..answer.len()).step_by(16).take(usize::try_from(count).unwrap_or(usize::MAX));
    places.map_while(|at| Some((answer.get_long(at)?, answer.get_long(at.checked_add(8)?)?)))
}

/// A region, and where it starts in the function's file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Placed {
    pub(super) region: Region,
    pub(super) at: u64,
}

/// What the kernel reports of a region: `VFIO_DEVICE_GET_REGION_INFO`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct RegionInfo {
    pub(super) flags: u32,
    pub(super) size: u64,
    /// Where the region starts in the function's file.
    pub(super) at: u64,
    /// Areas that can be mapped (offset, bytes), if only these can.
    pub(super) areas: Option<Vec<(u64, u64)>>,
    pub(super) msix_mappable: bool,
}

impl RegionInfo {
    /// Reads an answer; `None` if it ends too early.
    pub(super) fn read(answer: &Message) -> Option<Self> {
        let mut info = Self {
            flags: answer.get(offset_of!(vfio::vfio_region_info, flags))?,
            size: answer.get_long(offset_of!(vfio::vfio_region_info, size))?,
            at: answer.get_long(offset_of!(vfio::vfio_region_info, offset))?,
            ..Self::default()
        };
        if info.flags & vfio::VFIO_REGION_INFO_FLAG_CAPS == 0 {
            return Some(info);
        }
        let first = answer.get(offset_of!(vfio::vfio_region_info, cap_offset))?;
        for Capability { id, at } in capabilities(answer, first) {
            match id {
                vfio::VFIO_REGION_INFO_CAP_SPARSE_MMAP => {
                    type Sparse = vfio::vfio_region_info_cap_sparse_mmap;
                    let count = answer.get(at.checked_add(offset_of!(Sparse, nr_areas))?)?;
                    let areas = pairs(answer, at.checked_add(size_of::<Sparse>())?, count);
                    info.areas = Some(areas.collect());
                }
                vfio::VFIO_REGION_INFO_CAP_MSIX_MAPPABLE => info.msix_mappable = true,
                _ => {}
            }
        }
        Some(info)
    }

    /// The region, on a host with pages of `page` bytes.
    pub(super) fn placed(&self, page: u64) -> Placed {
        let has = |flag: u32| self.flags & flag != 0;
        let whole = [(0, self.size)];
        let areas = self.areas.as_deref().unwrap_or(&whole);
        let region = Region {
            size: self.size,
            readable: has(vfio::VFIO_REGION_INFO_FLAG_READ),
            writable: has(vfio::VFIO_REGION_INFO_FLAG_WRITE),
            mappable: if has(vfio::VFIO_REGION_INFO_FLAG_MMAP) {
                mappable(areas, self.size, page)
            } else {
                Vec::new()
            },
            msix_mappable: self.msix_mappable,
        };
        Placed { region, at: self.at }
    }
}

/// The whole pages of `areas` (offset, bytes) inside `size` bytes, ascending and disjoint.
fn mappable(areas: &[(u64, u64)], size: u64, page: u64) -> Vec<Span<InBar>> {
    let whole = |(offset, length): &(u64, u64)| {
        let end = egm_address::align_down(offset.checked_add(*length)?.min(size), page);
        Span::between(
            egm_address::Address::new(egm_address::align_up(*offset, page)?),
            egm_address::Address::new(end),
        )
    };
    let set: egm_address::SpanSet<InBar> = areas.iter().filter_map(whole).collect();
    set.iter().collect()
}

/// What the kernel reports of interrupts: `VFIO_DEVICE_GET_IRQ_INFO`. `None` if the answer ends too early.
pub(super) fn interrupts(answer: &Message) -> Option<Interrupts> {
    let flags = answer.get(offset_of!(vfio::vfio_irq_info, flags))?;
    Some(interrupts_of(flags, answer.get(offset_of!(vfio::vfio_irq_info, count))?))
}

/// `count` interrupts with the flags `VFIO_IRQ_INFO_*`.
pub(super) fn interrupts_of(flags: u32, count: u32) -> Interrupts {
    let connectable = flags & vfio::VFIO_IRQ_INFO_EVENTFD != 0;
    Interrupts {
        count: if connectable { count } else { 0 },
        dynamic: flags & vfio::VFIO_IRQ_INFO_NORESIZE == 0,
    }
}

/// What the kernel reports of a type1 IOMMU: `VFIO_IOMMU_GET_INFO`. `None` if the answer ends too early.
pub(super) fn limits(answer: &Message) -> Option<Limits> {
    type Info = vfio::vfio_iommu_type1_info;
    let flags = answer.get(offset_of!(Info, flags))?;
    let mut limits = Limits { page_size: 4096, ..Limits::default() };
    if flags & vfio::VFIO_IOMMU_INFO_PGSIZES != 0 {
        let sizes = answer.get_long(offset_of!(Info, iova_pgsizes))?;
        limits.page_size = 1_u64.checked_shl(sizes.trailing_zeros())?;
    }
    if flags & vfio::VFIO_IOMMU_INFO_CAPS == 0 {
        return Some(limits);
    }
    for Capability { id, at } in capabilities(answer, answer.get(offset_of!(Info, cap_offset))?) {
        match id {
            vfio::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                type Ranges = vfio::vfio_iommu_type1_info_cap_iova_range;
                let count = answer.get(at.checked_add(HEADER)?)?;
                limits.ranges = ranges(pairs(answer, at.checked_add(size_of::<Ranges>())?, count));
            }
            vfio::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => {
                limits.mappings = Some(answer.get(at.checked_add(HEADER)?)?);
            }
            _ => {}
        }
    }
    Some(limits)
}

/// Pairs of first and last address as spans. A range up to the very last address loses its last byte: no span ends
/// there, and no guest has memory there.
pub(super) fn ranges(pairs: impl Iterator<Item = (u64, u64)>) -> Vec<Span<Io>> {
    let span = |(first, last): (u64, u64)| {
        Span::between(Iova::new(first), Iova::new(last.checked_add(1).unwrap_or(last)))
    };
    let set: egm_address::SpanSet<Io> = pairs.filter_map(span).collect();
    set.iter().collect()
}

/// A function that a hot reset resets too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dependent {
    pub(super) address: PciAddress,
    /// Its group (legacy), or its number in our iommufd: 0 for one that we have, -1 for one that we have not.
    pub(super) id: u32,
}

/// `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO`: the affected functions, and whether ids are those of iommufd.
pub(super) fn dependents(answer: &Message) -> Option<(Vec<Dependent>, bool)> {
    type Info = vfio::vfio_pci_hot_reset_info;
    type Entry = vfio::vfio_pci_dependent_device;
    let by_device = answer.get(offset_of!(Info, flags))? & vfio::VFIO_PCI_HOT_RESET_FLAG_DEV_ID != 0;
    let count = usize::try_from(answer.get(offset_of!(Info, count))?).ok()?;
    let entry = |at: usize| {
        let segment = answer.get_short(at.checked_add(offset_of!(Entry, segment))?)?;
        let [bus, devfn] = answer.get_short(at.checked_add(offset_of!(Entry, bus))?)?.to_ne_bytes();
        let address = PciAddress::new(segment, bus, devfn >> 3, devfn & 7).ok()?;
        Some(Dependent { address, id: answer.get(at)? })
    };
    let places = (size_of::<Info>()..answer.len()).step_by(size_of::<Entry>()).take(count);
    let entries: Option<Vec<_>> = places.map(entry).collect();
    entries.filter(|entries| entries.len() == count).map(|entries| (entries, by_device))
}

/// Number of entries that the kernel reported, for a second request with room for them.
pub(super) fn dependent_count(answer: &Message) -> usize {
    let count = answer.get(offset_of!(vfio::vfio_pci_hot_reset_info, count)).unwrap_or(0);
    usize::try_from(count).unwrap_or(0).min(4096)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region(answer: &Message, page: u64) -> Option<Placed> {
        RegionInfo::read(answer).map(|info| info.placed(page))
    }

    const MMAP: u32 = vfio::VFIO_REGION_INFO_FLAG_MMAP | vfio::VFIO_REGION_INFO_FLAG_READ;
    const CAPS: u32 = vfio::VFIO_REGION_INFO_FLAG_CAPS;

    fn span<S>(start: u64, size: u64) -> Span<S> {
        Span::new(egm_address::Address::new(start), size).unwrap()
    }

    /// A region of 64 KiB with a chain from `first`: words after the structure's 32 bytes.
    fn answered(flags: u32, first: u32, words: &[u32]) -> Message {
        let message = Message::of::<vfio::vfio_region_info>(size_of_val(words))
            .with(4, flags)
            .with(12, first)
            .with_long(16, 0x1_0000)
            .with_long(24, 2 << 40);
        (32..).step_by(4).zip(words).fold(message, |message, (at, word)| message.with(at, *word))
    }

    #[test]
    fn a_region_without_sparse_areas_is_mappable_as_a_whole() {
        let placed = region(&answered(MMAP, 0, &[]), 0x1000).unwrap();
        assert_eq!((placed.region.size, placed.at), (0x1_0000, 2 << 40));
        assert_eq!(placed.region.mappable, [span(0, 0x1_0000)]);
        assert!(placed.region.readable && !placed.region.writable && !placed.region.msix_mappable);
        assert!(region(&answered(0, 0, &[]), 0x1000).unwrap().region.mappable.is_empty());
    }

    #[test]
    fn sparse_areas_are_cut_to_whole_pages_inside_the_region() {
        // Id and version, next; areas, reserved; offset and size as two words each.
        let sparse = [0x1_0001, 80, 2, 0, 0x800, 0, 0x2000, 0, 0xf000, 0, 0x9000, 0];
        // The second capability lies at 32 + 48 = 80.
        let words: Vec<u32> = sparse.into_iter().chain([0x1_0003, 0]).collect();
        let placed = region(&answered(MMAP | CAPS, 32, &words), 0x1000).unwrap();
        assert_eq!(placed.region.mappable, [span(0x1000, 0x1000), span(0xf000, 0x1000)]);
        assert!(placed.region.msix_mappable);
    }

    #[test]
    fn a_chain_that_loops_or_leaves_the_answer_ends() {
        for next in [32, 40, 33, 0xffff_fff0, 4096] {
            let looped = answered(MMAP | CAPS, 32, &[0x1_0003, next, 0x1_0003, 32]);
            assert!(capabilities(&looped, 32).len() <= 2, "{next:#x}");
        }
        assert!(capabilities(&answered(CAPS, 0, &[0x1_0001, 0]), 0).is_empty());
        assert!(capabilities(&answered(CAPS, u32::MAX, &[]), u32::MAX).is_empty());
    }

    #[test]
    fn areas_that_are_announced_and_not_there_are_none() {
        let message = answered(MMAP | CAPS, 32, &[0x1_0001, 0, u32::MAX, 0, 0x1000, 0]);
        assert!(region(&message, 0x1000).unwrap().region.mappable.is_empty());
    }

    #[test]
    fn interrupts_need_a_descriptor_and_grow_unless_the_kernel_states_no() {
        let message = |flags| Message::of::<vfio::vfio_irq_info>(0).with(4, flags).with(12, 9);
        let dynamic = vfio::VFIO_IRQ_INFO_EVENTFD;
        assert_eq!(interrupts(&message(dynamic)), Some(Interrupts { count: 9, dynamic: true }));
        let fixed = dynamic | vfio::VFIO_IRQ_INFO_NORESIZE;
        assert_eq!(interrupts(&message(fixed)), Some(Interrupts { count: 9, dynamic: false }));
        assert_eq!(interrupts(&message(0)).unwrap().count, 0);
    }

    #[test]
    fn limits_are_ranges_pages_and_maps() {
        let words = [[0x1_0001, 72, 2, 0], [0, 0, 0xfedf_ffff, 0], [0xfef0_0000, 0, u32::MAX, u32::MAX]];
        let message = Message::of::<vfio::vfio_iommu_type1_info>(0).resized(96);
        let message = message.with(4, 3).with_long(8, 0x4020_1000).with(16, 24);
        // From 24 on: ranges (48 bytes), then at 72 the maps that are left.
        let words = words.as_flattened().iter().copied().chain([0x1_0003, 0, 65535]);
        let message = (24..).step_by(4).zip(words).fold(message, |m, (at, word)| m.with(at, word));
        let limits = limits(&message).unwrap();
        assert_eq!((limits.page_size, limits.mappings), (0x1000, Some(65535)));
        assert_eq!(limits.ranges, [span(0, 0xfee0_0000), span(0xfef0_0000, u64::MAX - 0xfef0_0000)]);
    }

    #[test]
    fn dependents_are_all_there_or_the_answer_is_malformed() {
        let entry = |group: u32, bus: u8, devfn: u8| [group, u32::from_ne_bytes([0, 0, bus, devfn])];
        let words = [entry(7, 0x41, 0), entry(8, 0x41, 1)];
        let message = Message::of::<vfio::vfio_pci_hot_reset_info>(16).with(8, 2);
        let message =
            (12..).step_by(4).zip(words.as_flattened()).fold(message, |m, (at, word)| m.with(at, *word));
        let (found, by_device) = dependents(&message).unwrap();
        let found: Vec<_> = found.iter().map(|d| (d.address.to_string(), d.id)).collect();
        assert_eq!(found, [("0000:41:00.0".to_owned(), 7), ("0000:41:00.1".to_owned(), 8)]);
        assert!(!by_device);
        assert_eq!(dependents(&message.clone().with(8, 3)), None);
        assert_eq!(dependent_count(&message.with(8, u32::MAX)), 4096);
    }

    proptest! {
        #[test]
        fn no_answer_breaks_a_parser(words in prop::collection::vec(any::<u32>(), 0..64), first in 0_u32..300) {
            let message = words.iter().fold((Message::of::<[u32; 64]>(0), 0), |(m, at), w| (m.with(at, *w), at + 4)).0;
            prop_assert!(capabilities(&message, first).len() <= MOST_CAPABILITIES);
            if let Some(placed) = region(&message, 0x1000) {
                let inside = |span: &Span<InBar>| span.end().get() <= placed.region.size;
                prop_assert!(placed.region.mappable.iter().all(inside));
            }
            let _ = (limits(&message), interrupts(&message), dependents(&message));
        }
    }
}
