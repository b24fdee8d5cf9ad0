//! Bytes of a region as bytes of the slice that a function shows, and back. Pure.

use egm_address::{BarOffset, InBar, InRegion, Offset, Span, SpanSet};

use crate::region::Slice;

/// The part of `spans` that lies in `slice`, counted from its first byte.
#[must_use]
pub fn in_slice(slice: &Slice, spans: &SpanSet<InRegion>) -> SpanSet<InBar> {
    let start = Offset::new(slice.offset);
    let bytes = Span::new(start, slice.size.get()).ok();
    let moved = |span: Span<InRegion>| {
        let span = span.intersection(bytes?)?;
        Span::new(BarOffset::new(span.start().offset_from(start)?), span.size()).ok()
    };
    spans.iter().filter_map(moved).collect()
}

/// Bytes of `slice`, counted in its region.
#[must_use]
pub fn in_region(slice: &Slice, spans: &SpanSet<InBar>) -> SpanSet<InRegion> {
    let moved = |span: Span<InBar>| {
        Span::new(Offset::new(slice.offset.checked_add(span.start().get())?), span.size()).ok()
    };
    spans.iter().filter_map(moved).collect()
}

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;

    use super::*;

    #[test]
    fn bytes_are_counted_from_the_slice_and_those_beside_it_left_out() {
        let slice = Slice { region: "egm4".to_owned(), offset: 0x4000, size: ByteSize::new(0x4000) };
        let span = |start, end| Span::between(Offset::new(start), Offset::new(end)).unwrap();
        let region = SpanSet::from_iter([span(0x1000, 0x5000), span(0x6000, 0x7000), span(0x9000, 0xa000)]);
        let inside = in_slice(&slice, &region);
        let numbers: Vec<_> = inside.iter().map(|span| (span.start().get(), span.size())).collect();
        assert_eq!(numbers, [(0, 0x1000), (0x2000, 0x1000)]);
        let back: Vec<_> = in_region(&slice, &inside).iter().collect();
        assert_eq!(back, [span(0x4000, 0x5000), span(0x6000, 0x7000)]);
    }
}
