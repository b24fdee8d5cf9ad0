//! Address spaces of locks and records.
//!
//! A region's name and base come from files that people edit. Memory at a known address is therefore counted by that
//! address, on one line for the whole host: a region that is renamed, moved or made larger within a boot takes along
//! neither claims nor cleanliness of other bytes. Other memory is counted from 0 on a line of its own.
#![forbid(unsafe_code)]

use egm_address::{Address, InRegion, Span, SpanSet};

use super::LedgerError;
use super::record::OnLine;
use crate::region::{Region, is_name};

/// The line of all memory with an address; no region can have this name.
const HOST: &str = "@host";

/// The line of a region, and its place there.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// Its name: part of a file name.
    pub(crate) name: String,
    /// The region's bytes.
    pub(crate) whole: Span<OnLine>,
}

impl Line {
    /// The line of `region`; `None` for an invalid name, or a place that a lock cannot have.
    pub(crate) fn of(region: &Region) -> Option<Self> {
        let (name, base) = match region.base {
            Some(base) => (HOST, base.get()),
            None => (region.name.as_str(), 0),
        };
        let whole = Span::new(Address::new(base), region.size.get()).ok()?;
        let fits = i64::try_from(whole.last().get()).is_ok();
        (fits && is_name(&region.name)).then(|| Self { name: name.to_owned(), whole })
    }

    /// Bytes of the region, counted on the line; `None` for bytes outside it.
    pub(crate) fn place(&self, span: Span<InRegion>) -> Option<Span<OnLine>> {
        let start = self.whole.start().checked_add(span.start().get())?;
        Span::new(start, span.size()).ok().filter(|span| self.whole.covers(*span))
    }

    /// [`Line::place`] of each span, without those outside.
    pub(crate) fn places(&self, set: &SpanSet<InRegion>) -> SpanSet<OnLine> {
        set.iter().filter_map(|span| self.place(span)).collect()
    }

    /// The part of `span` in the region, counted in the region.
    pub(crate) fn offset(&self, span: Span<OnLine>) -> Option<Span<InRegion>> {
        let span = span.intersection(self.whole)?;
        Span::new(Address::new(span.start().offset_from(self.whole.start())?), span.size()).ok()
    }

    /// [`Line::offset`] of each span.
    pub(crate) fn offsets(&self, set: &SpanSet<OnLine>) -> SpanSet<InRegion> {
        set.iter().filter_map(|span| self.offset(span)).collect()
    }
}

/// The line of `region`, which must have one.
///
/// # Errors
/// [`LedgerError::Region`].
pub(super) fn line_of(region: &Region) -> Result<Line, LedgerError> {
    Line::of(region).ok_or_else(|| no_region(region))
}

pub(super) fn no_region(region: &Region) -> LedgerError {
    LedgerError::Region { region: region.name.clone() }
}
