//! Taking bad pages out of use.
#![forbid(unsafe_code)]

use egm_address::{InRegion, SpanSet};

use super::{Ledger, LedgerError, bytes_of, line_of};
use crate::audit::{Actor, Event, Finding, Place};
use crate::backing::base_page;
use crate::owner::Owner;
use crate::region::{Region, Slice};
use crate::retired::Retired;

impl Ledger {
    /// [`Ledger::retire`] for `bad` bytes that the owner `by` of `slice` of `region` found. Bytes outside the slice are left
    /// out: they are not its owner's to judge. A pool's bytes have no place that a later owner could get: its kernel keeps
    /// bad pages.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub(crate) fn retire_of(
        &self,
        region: &Region,
        slice: &Slice,
        bad: &SpanSet<InRegion>,
        by: &Actor,
    ) -> Result<(), LedgerError> {
        let outside = bytes_of(slice).map(|slice| bad.minus(&SpanSet::from_iter([slice])));
        let inside = outside.map(|outside| bad.minus(&outside)).unwrap_or_default();
        if inside.is_empty() || !region.kind.keeps_bytes() {
            return Ok(());
        }
        self.retire_for(region, &inside, by, "its owner's process got a memory error there")
    }

    /// Nobody gets `pages` of `region` any more, because `by` found them bad for this `reason`. Whole pages of the host are
    /// retired.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn retire(
        &self,
        region: &Region,
        pages: &SpanSet<InRegion>,
        by: &Owner,
        reason: &str,
    ) -> Result<(), LedgerError> {
        self.retire_for(region, pages, &Actor::of(by), reason)
    }

    fn retire_for(
        &self,
        region: &Region,
        pages: &SpanSet<InRegion>,
        by: &Actor,
        reason: &str,
    ) -> Result<(), LedgerError> {
        let line = line_of(region)?;
        let entries = pages.iter().map(|span| (span.start().get(), span.size()));
        let retired = Retired::new(entries, region.size.get(), base_page());
        let new = self.change(|record| {
            let places = line.places(retired.spans());
            let new = places.minus(&record.retired(&line.name));
            record.add_retired(&line.name, &places);
            Ok::<_, LedgerError>(line.offsets(&new))
        })?;
        self.log_retired(region, &new, by, reason);
        Ok(())
    }

    /// Logs that `bad` bytes of `region` are retired, if there are any.
    pub(crate) fn log_retired(&self, region: &Region, bad: &SpanSet<InRegion>, by: &Actor, reason: &str) {
        if let Some(place) = Place::of_set(&region.name, bad) {
            self.audit().write(&Event::Retire(Finding::new(by.clone(), place, reason)));
        }
    }
}
