//! Address spaces of locks and records.
//!
//! A region's name and base come from files that people edit. Memory at a known address is therefore counted by that
//! address, in one space for the whole host: a region that is renamed, moved or enlarged within a boot takes along
//! neither claims nor cleanliness of other bytes. Other memory is counted from 0 in a space of its own.
#![forbid(unsafe_code)]

use egm_address::{Address, InRegion, Span, SpanSet};

use super::LedgerError;
use super::record::InRecordSpace;
use crate::region::{Region, is_name};

/// Name of the space of all memory with an address; no region can have this name.
const HOST: &str = "@host";

/// The record space of a region, and the part of it that the region has.
#[derive(Debug, Clone)]
pub(crate) struct RecordSpace {
    /// Its name: part of a file name.
    pub(crate) name: String,
    pub(crate) whole: Span<InRecordSpace>,
}

impl RecordSpace {
    /// The space of `region`; `None` for an invalid name, or a place that a lock cannot have.
    pub(crate) fn of(region: &Region) -> Option<Self> {
        let (name, base) = match region.base {
            Some(base) => (HOST, base.get()),
            None => (region.name.as_str(), 0),
        };
        let whole = Span::new(Address::new(base), region.size.get()).ok()?;
        let fits = i64::try_from(whole.last().get()).is_ok();
        (fits && is_name(&region.name)).then(|| Self { name: name.to_owned(), whole })
    }

    /// Bytes of the region, counted in the space; `None` for bytes outside it.
    pub(crate) fn place(&self, span: Span<InRegion>) -> Option<Span<InRecordSpace>> {
        let start = self.whole.start().checked_add(span.start().get())?;
        Span::new(start, span.size()).ok().filter(|span| self.whole.covers(*span))
    }

    /// [`RecordSpace::place`] of each span, without those outside.
    pub(crate) fn places(&self, set: &SpanSet<InRegion>) -> SpanSet<InRecordSpace> {
        set.iter().filter_map(|span| self.place(span)).collect()
    }

    /// The part of `span` in the region, counted in the region.
    pub(crate) fn offset(&self, span: Span<InRecordSpace>) -> Option<Span<InRegion>> {
        let span = span.intersection(self.whole)?;
        Span::new(Address::new(span.start().offset_from(self.whole.start())?), span.size()).ok()
    }

    /// [`RecordSpace::offset`] of each span.
    pub(crate) fn offsets(&self, set: &SpanSet<InRecordSpace>) -> SpanSet<InRegion> {
        set.iter().filter_map(|span| self.offset(span)).collect()
    }
}

/// The space of `region`, which must have one.
pub(super) fn space_of(region: &Region) -> Result<RecordSpace, LedgerError> {
    RecordSpace::of(region).ok_or_else(|| no_region(region))
}

pub(super) fn no_region(region: &Region) -> LedgerError {
    LedgerError::Region { region: region.name.clone() }
}
