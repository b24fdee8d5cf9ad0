//! Order of maps. Pure.

use std::cmp::Reverse;
use std::sync::Arc;

use egm_address::{Io, Iova, Span};

use super::{Access, DmaError, Limits};
use crate::memory::{HostBacking, HostMemory};

/// A piece of memory that devices shall reach.
#[derive(Clone)]
pub struct Piece {
    /// I/O addresses of the piece.
    pub iova: Span<Io>,
    /// Memory that contains the piece.
    pub memory: Arc<dyn HostMemory>,
    /// Its first byte in `memory`.
    pub offset: u64,
    /// Access of devices to it.
    pub access: Access,
    /// Host NUMA node of its pages, where one is known.
    pub node: Option<u32>,
}

impl Piece {
    /// Whether `next` goes on where this ends, in both address spaces, so that one map can be both.
    fn continues(&self, next: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &next.memory)
            && self.iova.end() == next.iova.start()
            && self.offset.checked_add(self.iova.size()) == Some(next.offset)
            && (self.access, self.node) == (next.access, next.node)
    }
}

/// Merges `pieces` into as few and large ones as possible, the largest first: a lack of space then shows at once, and
/// the longest work is not the last.
///
/// # Errors
/// [`DmaError::Outside`] names the first bytes that no range has, [`DmaError::TooMany`] when there are more pieces than
/// maps.
pub fn order(mut pieces: Vec<Piece>, limits: &Limits) -> Result<Vec<Piece>, DmaError> {
    pieces.sort_by_key(|piece| piece.iova);
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let last = merged.last_mut().filter(|last| last.continues(&piece));
        let joined = last.as_ref().and_then(|last| Span::between(last.iova.start(), piece.iova.end()));
        match (last, joined) {
            (Some(last), Some(joined)) => last.iova = joined,
            _ => merged.push(piece),
        }
    }
    merged.iter().try_for_each(|piece| inside(piece.iova, &limits.ranges))?;
    if let Some(most) = limits.mappings.filter(|most| u32::try_from(merged.len()).is_ok_and(|n| n > *most)) {
        return Err(DmaError::TooMany { needed: merged.len(), most });
    }
    merged.sort_by_key(|piece| (Reverse(piece.iova.size()), piece.iova));
    Ok(merged)
}

/// Checks that `ranges` (ascending, disjoint, none touching another) contain `span`; without ranges any span may do.
fn inside(span: Span<Io>, ranges: &[Span<Io>]) -> Result<(), DmaError> {
    if ranges.is_empty() || ranges.iter().any(|range| range.covers(span)) {
        return Ok(());
    }
    let (first, end) = (span.start(), span.end());
    let missing: Iova = ranges.iter().find(|range| range.contains(first)).map_or(first, |range| range.end());
    let next = ranges.iter().map(|range| range.start()).find(|start| *start > missing);
    let end = next.map_or(end, |next| next.min(end));
    let words: Vec<String> = ranges.iter().map(Span::to_string).collect();
    Err(DmaError::Outside {
        iova: missing,
        size: end.offset_from(missing).unwrap_or(0),
        ranges: words.join(", "),
    })
}

/// Bytes of `pieces` that count as locked memory: those with struct pages. BARs and invisible memory are not pinned.
pub fn locked_bytes(pieces: &[Piece]) -> u64 {
    let pinned = |piece: &&Piece| {
        matches!(
            piece.memory.backing(),
            HostBacking::File { .. } | HostBacking::GuestMemfd { .. } | HostBacking::Pages
        )
    };
    pieces.iter().filter(pinned).fold(0, |sum, piece| sum.saturating_add(piece.iova.size()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mapping::Mapping;

    fn span(start: u64, size: u64) -> Span<Io> {
        Span::new(Iova::new(start), size).unwrap()
    }

    fn memory() -> Arc<dyn HostMemory> {
        Arc::new(Mapping::pages(0x10_0000, 0).unwrap())
    }

    fn piece(memory: &Arc<dyn HostMemory>, start: u64, size: u64, offset: u64) -> Piece {
        let memory = Arc::clone(memory);
        Piece { iova: span(start, size), memory, offset, access: Access::ReadWrite, node: None }
    }

    fn spans(pieces: &[Piece]) -> Vec<(Span<Io>, u64)> {
        pieces.iter().map(|piece| (piece.iova, piece.offset)).collect()
    }

    #[test]
    fn neighbours_in_both_spaces_are_one_map_and_the_largest_comes_first() {
        let (a, b) = (memory(), memory());
        let pieces = vec![
            piece(&b, 0x9000, 0x1000, 0),
            piece(&a, 0x3000, 0x2000, 0x3000),
            piece(&a, 0x1000, 0x2000, 0x1000),
            piece(&a, 0x5000, 0x1000, 0x8000),
        ];
        let ordered = order(pieces, &Limits::default()).unwrap();
        assert_eq!(
            spans(&ordered),
            [(span(0x1000, 0x4000), 0x1000), (span(0x5000, 0x1000), 0x8000), (span(0x9000, 0x1000), 0)]
        );
        assert_eq!(locked_bytes(&ordered), 0x6000);
    }

    #[test]
    fn nodes_and_access_keep_neighbours_apart() {
        let memory = memory();
        let mut pieces = vec![piece(&memory, 0, 0x1000, 0), piece(&memory, 0x1000, 0x1000, 0x1000)];
        pieces[1].node = Some(1);
        assert_eq!(order(pieces.clone(), &Limits::default()).unwrap().len(), 2);
        pieces[1] = Piece { access: Access::Read, node: None, ..pieces[1].clone() };
        assert_eq!(order(pieces, &Limits::default()).unwrap().len(), 2);
    }

    #[test]
    fn what_the_iommu_does_not_translate_is_named_with_what_it_does() {
        let memory = memory();
        let ranges = vec![span(0, 0xfee0_0000), span(0xfef0_0000, 1 << 40)];
        let limits = Limits { ranges, ..Limits::default() };
        let error = order(vec![piece(&memory, 0xfed0_0000, 0x40_0000, 0)], &limits).err().unwrap();
        let text = error.to_string();
        assert!(text.starts_with("devices cannot reach 0x100000 bytes at I/O address 0xfee00000"), "{text}");
        assert!(text.contains("0x0..0xfee00000, 0xfef00000.."), "{text}");
        let above = order(vec![piece(&memory, 1 << 42, 0x1000, 0)], &limits);
        assert!(matches!(above, Err(DmaError::Outside { size: 0x1000, .. })));
        order(vec![piece(&memory, 0x1000, 0x1000, 0)], &limits).unwrap();
    }

    #[test]
    fn more_pieces_than_maps_are_refused_beforehand() {
        let memory = memory();
        let pieces = vec![piece(&memory, 0, 0x1000, 0), piece(&memory, 0x2000, 0x1000, 0)];
        let limits = Limits { mappings: Some(1), ..Limits::default() };
        assert!(matches!(order(pieces, &limits), Err(DmaError::TooMany { needed: 2, most: 1 })));
    }

    proptest! {
        #[test]
        fn parts_of_a_piece_are_one_map_again(cuts in proptest::collection::btree_set(1_u64..0x8_0000, 0..20)) {
            let memory = memory();
            let (ends, starts) = (cuts.iter().chain([&0x8_0000]), [&0].into_iter().chain(&cuts));
            let parts = starts.zip(ends).map(|(from, to)| piece(&memory, 0x10_0000 + from, to - from, 0x40 + from));
            let whole = piece(&memory, 0x10_0000, 0x8_0000, 0x40);
            prop_assert_eq!(spans(&order(parts.collect(), &Limits::default()).unwrap()), spans(&[whole]));
        }
    }
}
