//! Division of a BAR into parts that the guest reaches directly and parts that the VMM answers.
//!
//! ```text
//!  region of the host   |======== mappable ========|--|===== mappable =====|
//!  MSI-X table, PBA               ▒▒ (whole host pages)
//!  BAR of the guest     |=mapped=|tr|===mapped=====|tr|=====mapped=====|--- trapped ---|
//!                                                                      real size       power of two
//! ```

use std::collections::BTreeMap;

use egm_address::{BarOffset, InBar, Span, SpanSet, align_down, align_up};

use crate::backend::Region;

/// A piece of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// A KVM slot over memory of [`Backend::map`](crate::backend::Backend::map): aligned to host pages, inside one of
    /// the region's mappable spans. Other functions may reach it too.
    Mapped(Span<InBar>),
    /// Accesses leave the guest: the MSI-X structures are ours, the rest is read and written through the backend, and
    /// what lies behind the region's real size reads as all ones.
    Trapped(Span<InBar>),
}

impl Piece {
    /// Offsets in the BAR.
    pub fn span(self) -> Span<InBar> {
        match self {
            Self::Mapped(span) | Self::Trapped(span) => span,
        }
    }
}

/// Cuts a BAR of `size` bytes over `region` into pieces, ascending, without gaps and as few as possible. `own` is what
/// the VMM answers itself: whole host pages of `page` bytes (a power of two) are trapped around it, also where the
/// kernel would let them be mapped, because a guest's store to its MSI-X table must not reach the device.
pub fn cut(size: u64, region: &Region, own: &[Span<InBar>], page: u64) -> Vec<Piece> {
    let Ok(bar) = Span::new(BarOffset::new(0), size) else { return Vec::new() };
    let real = Span::new(BarOffset::new(0), region.size.min(size)).ok();
    let mut taken = Taken::default();
    for span in own.iter().filter_map(|span| pages_around(*span, page)) {
        taken.take(span);
    }
    let mut mapped = Vec::new();
    for area in &region.mappable {
        let area = real.and_then(|real| pages_within(area.intersection(real)?, page));
        mapped.extend(area.into_iter().flat_map(|area| taken.take(area)));
    }
    mapped.sort_unstable();
    let trapped = SpanSet::from_iter([bar]).minus(&mapped.iter().copied().collect());
    let mut pieces: Vec<Piece> = mapped.into_iter().map(Piece::Mapped).collect();
    pieces.extend(trapped.iter().map(Piece::Trapped));
    pieces.sort_unstable_by_key(|piece| piece.span());
    pieces
}

/// Taken parts: first bytes and ends of disjoint spans. A server may name thousands.
#[derive(Default)]
struct Taken(BTreeMap<BarOffset, BarOffset>);

impl Taken {
    /// Takes all of `span`; returns the parts that were free.
    fn take(&mut self, span: Span<InBar>) -> Vec<Span<InBar>> {
        let before = self.0.range(..=span.start()).next_back();
        let start = span.start();
        let mut from = before.map_or(start, |(_, end)| start.max(*end));
        let mut free = Vec::new();
        for (&start, &end) in self.0.range(span.start()..span.end()) {
            free.extend(Span::between(from, start));
            from = from.max(end);
        }
        free.extend(Span::between(from, span.end()));
        self.0.extend(free.iter().map(|free| (free.start(), free.end())));
        free
    }
}

/// The smallest whole pages that cover `span`; up to the last page when there is no next.
fn pages_around(span: Span<InBar>, page: u64) -> Option<Span<InBar>> {
    let end = align_up(span.end().get(), page).unwrap_or(u64::MAX);
    Span::between(BarOffset::new(align_down(span.start().get(), page)), BarOffset::new(end))
}

/// The largest whole pages inside `span`.
fn pages_within(span: Span<InBar>, page: u64) -> Option<Span<InBar>> {
    let start = align_up(span.start().get(), page)?;
    Span::between(BarOffset::new(start), BarOffset::new(align_down(span.end().get(), page)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(start: u64, size: u64) -> Span<InBar> {
        Span::new(BarOffset::new(start), size).unwrap()
    }

    fn region(size: u64, mappable: &[(u64, u64)]) -> Region {
        let mappable = mappable.iter().map(|(start, size)| span(*start, *size)).collect();
        Region { size, readable: true, writable: true, mappable, msix_mappable: true }
    }

    #[test]
    fn the_page_of_an_msix_table_is_trapped_and_nothing_else() {
        // BAR 0 of an H200: 16 MiB, 9 vectors at 0xb90000, pending bits at 0xba0000.
        let region = region(0x100_0000, &[(0, 0x100_0000)]);
        let pieces = cut(0x100_0000, &region, &[span(0xb9_0000, 144), span(0xba_0000, 8)], 0x1000);
        assert_eq!(
            pieces,
            [
                Piece::Mapped(span(0, 0xb9_0000)),
                Piece::Trapped(span(0xb9_0000, 0x1000)),
                Piece::Mapped(span(0xb9_1000, 0xf000)),
                Piece::Trapped(span(0xba_0000, 0x1000)),
                Piece::Mapped(span(0xba_1000, 0x45_f000)),
            ]
        );
    }

    /// nvgrace-gpu: gpu-mem-size 0x68000000 makes a usemem of 0x20000000 in a BAR 4 of 1 GiB (measured, facts of EGM).
    #[test]
    fn what_lies_behind_the_real_size_is_trapped() {
        let region = region(0x4000_0000, &[(0, 0x2000_0000)]);
        let pieces = cut(0x4000_0000, &region, &[], 0x1_0000);
        assert_eq!(
            pieces,
            [Piece::Mapped(span(0, 0x2000_0000)), Piece::Trapped(span(0x2000_0000, 0x2000_0000))]
        );
    }

    #[test]
    fn a_bar_below_a_page_is_trapped_whole() {
        assert_eq!(cut(0x800, &region(0x800, &[(0, 0x800)]), &[], 0x1000), [Piece::Trapped(span(0, 0x800))]);
    }

    fn any_spans() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0u64..96, 1u64..40), 0..5)
    }

    proptest! {
        /// Byte by byte, with pages of 4 bytes: a piece is mapped only where a mappable span, the real size, and the
        /// absence of a structure of ours anywhere in the page allow it, and pieces cover the BAR once.
        #[test]
        fn pieces_agree_with_the_bytes(
            bits in 0u32..7, real in 0u64..128, areas in any_spans(), own in any_spans(),
        ) {
            const PAGE: u64 = 4;
            let size = 1u64 << bits;
            let own: Vec<_> = own.iter().map(|(start, size)| span(*start, *size)).collect();
            let region = region(real, &areas);
            let pieces = cut(size, &region, &own, PAGE);
            let mut next = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.span().start().get(), next);
                next = piece.span().end().get();
                if let Piece::Mapped(span) = piece {
                    prop_assert!(span.start().is_aligned(PAGE) && span.end().is_aligned(PAGE));
                    prop_assert!(region.mappable.iter().any(|area| area.covers(*span)), "inside one span");
                }
            }
            prop_assert_eq!(next, size);
            for at in 0..size {
                let page = span(at - at % PAGE, PAGE);
                let inside = page.end().get() <= size.min(real);
                let may = inside
                    && region.mappable.iter().any(|area| area.covers(page))
                    && !own.iter().any(|own| own.overlaps(page));
                let piece = pieces.iter().find(|piece| piece.span().contains(BarOffset::new(at))).unwrap();
                prop_assert_eq!(matches!(piece, Piece::Mapped(_)), may, "byte {}", at);
            }
        }
    }
}
