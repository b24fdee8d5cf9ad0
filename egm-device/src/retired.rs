//! Retired pages: memory that the firmware or the kernel found bad.

use egm_address::{InRegion, Offset, Span, SpanSet};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The retired bytes of a region: merged, in order, within the region.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retired(SpanSet<InRegion>);

impl Retired {
    /// Bytes that `entries` (offset, size) retire of a region of `size` bytes, widened to whole pages of `page` bytes.
    /// Entries in any order, twice, overlapping, empty, partly or wholly outside are tolerated: what lies outside
    /// cannot be used anyway.
    #[must_use]
    pub fn new(entries: impl IntoIterator<Item = (u64, u64)>, size: u64, page: u64) -> Self {
        let page = page.max(1);
        let spans = entries.into_iter().filter_map(|(offset, bytes)| {
            let start = offset / page * page;
            let end = offset.saturating_add(bytes).min(size);
            let end = egm_address::align_up(end, page).unwrap_or(size).min(size);
            (bytes > 0).then(|| Span::between(Offset::new(start), Offset::new(end))).flatten()
        });
        Self(spans.collect())
    }

    /// The union of both sets.
    #[must_use]
    pub fn and(&self, more: &SpanSet<InRegion>) -> Self {
        Self(self.0.iter().chain(more.iter()).collect())
    }

    /// The holes that a slice over `span` has.
    #[must_use]
    pub fn within(&self, span: Span<InRegion>) -> SpanSet<InRegion> {
        let whole = SpanSet::from_iter([span]);
        whole.minus(&whole.minus(&self.0))
    }

    /// The retired spans, merged and in order.
    #[must_use]
    pub const fn spans(&self) -> &SpanSet<InRegion> {
        &self.0
    }
}

impl Serialize for Retired {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter())
    }
}

impl<'de> Deserialize<'de> for Retired {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<Span<InRegion>>::deserialize(deserializer).map(|spans| Self(spans.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_merged_clipped_and_widened_to_pages() {
        let entries =
            [(0x1_0000, 0x1000), (0x5000, 1), (0x1_1000, 0x1000), (0x1_0000, 0x1000), (u64::MAX, 9), (0, 0)];
        let retired = Retired::new(entries, 0x1_2000, 0x1000);
        let spans: Vec<_> = retired.spans().iter().map(|s| (s.start().get(), s.size())).collect();
        assert_eq!(spans, [(0x5000, 0x1000), (0x1_0000, 0x2000)]);
    }

    /// The bytes of `set` as a bit mask.
    fn mask(set: &SpanSet<InRegion>) -> u32 {
        set.iter().flat_map(|s| s.start().get()..s.end().get()).fold(0, |mask, byte| mask | (1_u32 << byte))
    }

    /// The set with the bytes of `mask`, all below 8.
    fn set(mask: u32) -> SpanSet<InRegion> {
        let bytes = (0..8_u64).filter(|&byte| (mask >> byte) & 1 == 1);
        bytes.map(|byte| Span::new(Offset::new(byte), 1).unwrap()).collect()
    }

    /// 66 entries, so 4,356 pairs, for each of four page sizes.
    #[test]
    fn every_pair_of_small_entries_retires_whole_pages_and_no_other_byte() {
        let size = 8;
        let entries: Vec<_> =
            (0..11_u64).flat_map(|offset| (0..6_u64).map(move |bytes| (offset, bytes))).collect();
        for page in [1, 2, 4, 8] {
            // The page of each byte of the entry that is in the region, byte by byte.
            let model = |(offset, bytes): (u64, u64)| {
                let hit = (offset..offset + bytes).filter(|&byte| byte < size);
                hit.flat_map(|byte| byte / page * page..(byte / page + 1) * page)
                    .fold(0, |mask, byte| mask | (1_u32 << byte))
            };
            for &a in &entries {
                for &b in &entries {
                    let retired = Retired::new([a, b], size, page);
                    assert_eq!(mask(retired.spans()), model(a) | model(b), "page {page}: {a:?} and {b:?}");
                }
            }
        }
    }

    /// 256 sets of retired bytes; 36 spans for each, and one more set for each.
    #[test]
    fn holes_of_every_small_slice_are_its_retired_bytes() {
        for bad in 0..256_u32 {
            let retired = Retired::default().and(&set(bad));
            assert_eq!(mask(retired.spans()), bad);
            let more = bad.rotate_left(3) & 0xff;
            assert_eq!(retired.and(&set(more)).spans(), &set(bad | more));
            for (start, end) in (0..8_u64).flat_map(|start| (start + 1..=8).map(move |end| (start, end))) {
                let span = Span::new(Offset::new(start), end - start).unwrap();
                let inside = (start..end).fold(0, |mask, byte| mask | (1_u32 << byte));
                assert_eq!(retired.within(span), set(bad & inside), "retired {bad:#b}, slice {start}..{end}");
            }
        }
    }
}
