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
}
