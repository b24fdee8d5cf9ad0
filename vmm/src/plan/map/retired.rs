//! Slices without the pages of their regions that are retired: those are holes of the guest's memory map, and offset in the
//! guest's span and offset in the slice stay the same.
//!
//! A guest with large pages rounds the edges of its memory outwards, so holes are multiples of the largest page. A kernel
//! keeps a limited number of pieces of memory; where there are more, holes grow until near ones are one.

use egm_address::{Gpa, Guest, InRegion, Span, SpanSet, align_down, align_up};
use egm_report::show;

use crate::arch::Layout;
use crate::plan::demand::regions::Source;
use crate::plan::{MemoryKind, MemoryPlan};

/// Holes do not grow beyond this.
const LARGEST_UNIT: u64 = 1 << 40;

/// A slice that is memory of the guest.
pub(super) struct Slice<'a> {
    pub(super) span: Span<Guest>,
    /// Offset in its region, and the holes there.
    pub(super) source: &'a Source,
    pub(super) node: u32,
    pub(super) backing: usize,
}

/// Slices without their retired pages.
pub(super) struct Rest {
    pub(super) pieces: Vec<MemoryPlan>,
    /// A note for each slice that loses good memory.
    pub(super) notes: Vec<String>,
}

/// The rest of `slices`; there are `others` pieces of memory beside.
pub(super) fn without_retired(slices: &[Slice<'_>], others: usize, layout: &Layout) -> Rest {
    let mut unit = layout.page;
    loop {
        let pieces: Vec<MemoryPlan> = slices.iter().flat_map(|slice| slice.pieces(unit)).collect();
        if pieces.len().saturating_add(others) <= layout.most_regions || unit >= LARGEST_UNIT {
            let notes = slices.iter().filter_map(|slice| slice.note(unit, layout)).collect();
            return Rest { pieces, notes };
        }
        unit = unit.saturating_mul(2);
    }
}

impl Slice<'_> {
    /// The slice in its region.
    fn whole(&self) -> SpanSet<InRegion> {
        let start = egm_address::Offset::new(self.source.offset);
        Span::new(start, self.span.size()).into_iter().collect()
    }

    /// The pieces left in the guest, with holes of whole `unit`s.
    fn pieces(&self, unit: u64) -> Vec<MemoryPlan> {
        let retired = self.whole().minus(&self.whole().minus(&self.source.holes));
        let hole = |span: Span<InRegion>| {
            let start = align_down(self.offset(span.start().get()), unit);
            let end = align_up(self.offset(span.end().get()), unit).unwrap_or(u64::MAX).min(self.span.size());
            Span::between(self.guest(start), self.guest(end))
        };
        let is_hole = |_: &Span<InRegion>| !egm_address::fault!("retired-page-not-a-hole");
        let holes: SpanSet<Guest> = retired.iter().filter(is_hole).filter_map(hole).collect();
        let piece = |span: Span<Guest>| MemoryPlan {
            span,
            kind: MemoryKind::Egm,
            node: self.node,
            backing: self.backing,
            offset: span.start().offset_from(self.span.start()).unwrap_or(0),
        };
        SpanSet::from_iter([self.span]).minus(&holes).iter().map(piece).collect()
    }

    /// Where in its region a retired page is that lies in `within` of the guest.
    pub(super) fn retired(&self, within: Span<Guest>) -> Option<u64> {
        let offset = |at: Gpa| at.offset_from(self.span.start()).unwrap_or(0);
        let from = egm_address::Offset::new(self.source.offset.saturating_add(offset(within.start())));
        let asked: SpanSet<InRegion> = Span::new(from, within.size()).into_iter().collect();
        let good = asked.minus(&self.source.holes);
        asked.minus(&good).iter().next().map(|span| span.start().get())
    }

    /// Note for the operator when good memory is left out beside bad.
    fn note(&self, unit: u64, layout: &Layout) -> Option<String> {
        let kept: u64 = self.pieces(unit).iter().map(|piece| piece.span.size()).sum();
        let good: u64 = self.whole().minus(&self.source.holes).iter().map(|span| span.size()).sum();
        let lost = good.checked_sub(kept).filter(|lost| *lost > 0)?;
        let why = if unit == layout.page {
            "a guest may have pages of that size".to_owned()
        } else {
            format!("a guest's kernel keeps about {} pieces of memory", layout.most_regions)
        };
        let region = self.source.region.as_deref().unwrap_or("its memory");
        Some(format!(
            "node {} lacks {} of {region} that are good but near retired pages: holes are of {} each, since {why}",
            self.node,
            show::size(lost),
            show::size(unit),
        ))
    }

    /// Offset in the slice of an offset in the region.
    const fn offset(&self, in_region: u64) -> u64 {
        in_region.saturating_sub(self.source.offset)
    }

    fn guest(&self, offset: u64) -> Gpa {
        Gpa::new(self.span.start().get().saturating_add(offset))
    }
}
