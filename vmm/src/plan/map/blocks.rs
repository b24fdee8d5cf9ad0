//! BARs of a device, and devices of a switch, as one block of addresses: what a bridge forwards is one range.
//!
//! Sizes are powers of two, so largest first wastes nothing. Where an address is fixed, the rest goes near it.

use egm_address::{Gpa, Guest, Placer, Request, Span, SpanSet, align_down, align_up};

/// Least window of a bridge and its unit (PCI-to-PCI Bridge 1.2, 3.2.5.8).
pub(super) const BRIDGE_UNIT: u64 = 1 << 20;

/// Something that takes addresses.
pub(super) struct Item {
    /// The caller's number for it.
    pub(super) tag: usize,
    /// Bytes, at least 1.
    pub(super) size: u64,
    /// A power of two.
    pub(super) align: u64,
    /// Where it must be.
    pub(super) at: Option<u64>,
}

/// Several items in one span.
pub(super) struct Block {
    /// Tag of each item and its offset in the block.
    pub(super) parts: Vec<(usize, u64)>,
    /// A multiple of the unit.
    pub(super) size: u64,
    /// The largest of the parts' and the unit.
    pub(super) align: u64,
    /// Where it must be, when one of its parts must be somewhere.
    pub(super) at: Option<u64>,
}

/// Why there is no block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PackError {
    /// Together they exceed 64 bits, this one first.
    TooLarge(usize),
    /// Two are fixed at the same addresses.
    Overlap(usize, usize),
}

impl Block {
    pub(super) fn item(&self, tag: usize) -> Item {
        Item { tag, size: self.size, align: self.align, at: self.at }
    }
}

/// Packs `items` into a block of whole `unit`s, itself a power of two; `None` without items.
pub(super) fn pack(items: &[Item], unit: u64) -> Result<Option<Block>, PackError> {
    let Some(largest) = items.iter().max_by_key(|item| item.size) else { return Ok(None) };
    let too_large = || PackError::TooLarge(largest.tag);
    let span = |start: u64, size| Span::<Guest>::new(Gpa::new(start), size).map_err(|_| too_large());
    let mut fixed: Vec<(Span<Guest>, usize)> = Vec::new();
    for item in items {
        if let Some(at) = item.at {
            fixed.push((span(at, item.size)?, item.tag));
        }
    }
    fixed.sort_unstable();
    if let Some([a, b]) = fixed.array_windows().find(|[a, b]| a.0.overlaps(b.0)) {
        return Err(PackError::Overlap(a.1, b.1));
    }
    let at = fixed.first().map(|(span, _)| align_down(span.start().get(), unit));
    let base = at.unwrap_or(0);
    let taken: SpanSet<Guest> = fixed.iter().map(|(span, _)| *span).collect();
    let free = SpanSet::from_iter([span(base, u64::MAX - base)?]);
    let rest = items.iter().filter(|item| item.at.is_none());
    let rest = rest.map(|item| Request { tag: item.tag, size: item.size, align: item.align }).collect();
    let placed =
        Placer::new(&free, &taken).place_all(rest).map_err(|error| PackError::TooLarge(error.tag))?;
    fixed.extend(placed.into_iter().map(|placement| (placement.span, placement.tag)));
    let end = fixed.iter().map(|(span, _)| span.end().get()).max().unwrap_or(base);
    let size = align_up(end, unit).and_then(|end| end.checked_sub(base)).ok_or_else(too_large)?;
    let align = items.iter().map(|item| item.align).max().unwrap_or(unit).max(unit);
    let offset = |(span, tag): (Span<Guest>, usize)| (tag, span.start().get().saturating_sub(base));
    Ok(Some(Block { parts: fixed.into_iter().map(offset).collect(), size, align, at }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = 1 << 20;

    fn item(tag: usize, size: u64, at: Option<u64>) -> Item {
        Item { tag, size, align: size, at }
    }

    #[test]
    fn largest_first_wastes_nothing_and_the_block_is_whole_units() {
        let block = pack(&[item(0, 0x1000, None), item(1, 4 * UNIT, None)], UNIT).unwrap().unwrap();
        let mut parts = block.parts;
        parts.sort_unstable();
        assert_eq!((parts, block.size, block.align), (vec![(0, 4 * UNIT), (1, 0)], 5 * UNIT, 4 * UNIT));
    }

    #[test]
    fn what_is_free_goes_near_what_is_fixed() {
        let at = 0x2000_0000_0000;
        let items = [item(0, 16 * UNIT, None), item(1, UNIT, Some(at)), item(2, UNIT, Some(at + 2 * UNIT))];
        let block = pack(&items, UNIT).unwrap().unwrap();
        assert_eq!((block.at, block.size), (Some(at), 32 * UNIT));
        assert_eq!(block.parts, [(1, 0), (2, 2 * UNIT), (0, 16 * UNIT)]);
    }

    #[test]
    fn two_at_one_place_are_named() {
        let error = pack(&[item(3, UNIT, Some(UNIT)), item(5, 2 * UNIT, Some(0))], UNIT).err();
        assert_eq!(error, Some(PackError::Overlap(5, 3)));
        assert_eq!(
            pack(&[item(7, 1 << 63, None), item(8, 1 << 63, None)], UNIT).err(),
            Some(PackError::TooLarge(8))
        );
    }

    proptest! {
        #[test]
        fn parts_are_aligned_disjoint_and_inside(
            shifts in prop::collection::vec((4u32..36, prop::option::of(0u64..64)), 1..8)
        ) {
            let items: Vec<Item> = (0..).zip(&shifts)
                .map(|(tag, &(shift, at))| item(tag, 1 << shift, at.map(|at| at << shift)))
                .collect();
            if let Ok(Some(block)) = pack(&items, UNIT) {
                let base = block.at.unwrap_or(0);
                let mut spans = Vec::new();
                for &(tag, offset) in &block.parts {
                    let start = base + offset;
                    prop_assert_eq!(start % items[tag].size, 0);
                    prop_assert!(items[tag].at.is_none_or(|at| at == start));
                    prop_assert!(offset + items[tag].size <= block.size);
                    spans.push((start, start + items[tag].size));
                }
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                prop_assert_eq!((spans.len(), block.size % UNIT), (items.len(), 0));
            }
        }
    }
}
