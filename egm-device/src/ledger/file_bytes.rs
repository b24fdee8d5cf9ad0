//! Bytes of a slice in the file of its region.
#![forbid(unsafe_code)]

use std::ops::Range;

use egm_address::{Address, ByteSize, Span, align_down, align_up};

use super::RecordSpace;
use super::record::InRecordSpace;
use crate::region::{Region, RegionKind, Slice};

/// Bytes of a region's file.
pub(super) struct FileBytes<'a> {
    pub(super) region: &'a Region,
    pub(super) space: &'a RecordSpace,
    pub(super) span: Span<InRecordSpace>,
}

impl FileBytes<'_> {
    /// Offset in the file of `address` in the space; `None` below the region.
    fn in_file(&self, address: Address<InRecordSpace>) -> Option<u64> {
        address.offset_from(self.space.whole.start())?.checked_add(self.origin())
    }

    /// Offset of the region in its file.
    fn origin(&self) -> u64 {
        match self.region.kind {
            RegionKind::Reserved { .. } => self.region.base.map_or(0, |base| base.get()),
            _ => 0,
        }
    }

    pub(super) fn file_bytes(&self, span: Span<InRecordSpace>) -> Option<Range<u64>> {
        let start = self.in_file(span.start())?;
        Some(start..start.checked_add(span.size())?)
    }

    pub(super) fn slice(&self) -> Option<Slice> {
        let span = self.space.offset(self.span)?;
        let (region, size) = (self.region.name.clone(), ByteSize::new(span.size()));
        Some(Slice { region, offset: span.start().get(), size })
    }

    /// The part of this place that lies in whole pages around `bytes` of the file.
    pub(super) fn around(&self, bytes: &Range<u64>) -> Option<Span<InRecordSpace>> {
        let page = self.region.page_size.get().max(1);
        let offset = |at: u64| at.checked_sub(self.origin());
        let (start, end) = (align_down(offset(bytes.start)?, page), align_up(offset(bytes.end)?, page)?);
        let base = self.space.whole.start();
        Span::between(base.checked_add(start)?, base.checked_add(end)?)?.intersection(self.span)
    }
}
