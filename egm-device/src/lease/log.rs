//! Lines of the audit log about a lease.
#![forbid(unsafe_code)]

use std::time::Duration;

use egm_address::{InRegion, Span, SpanSet};

use super::Lease;
use crate::audit::{Action, Event, Finding, RegionBytes};
use crate::ledger::LockedSlice;
use crate::scrub::{Cause, ScrubError, Scrubbed};

impl Lease {
    /// Logs that `block` (bytes of the slice from 0 on) was not zero after a scrub that the owner requested.
    pub fn log_mismatch(&self, block: Span<InRegion>, cause: &Cause) {
        let start = block.start().checked_add(self.locked.slice.offset);
        if let Some(block) = start.and_then(|start| Span::new(start, block.size()).ok()) {
            self.locked.log_mismatch(block, cause);
        }
    }
}

impl LockedSlice {
    /// Logs that `bad` bytes are retired, if there are any.
    pub(super) fn log_retired(&self, bad: &SpanSet<InRegion>, reason: &str) {
        self.ledger.log_retired(&self.region, bad, &self.by, reason);
    }

    /// Logs the result of a scrub.
    pub(super) fn log_scrub(&self, scrubbed: &Scrubbed, duration: Duration) {
        if let Some(place) = RegionBytes::of_set(&self.region.name, &scrubbed.done) {
            self.ledger.audit().write(&Event::Scrub(Action::new(self.by.clone(), place, duration)));
        }
        if !self.region.kind.has_slice_files() {
            self.log_retired(&scrubbed.bad, "a scrub got a memory error there");
        }
        if let Err(ScrubError { cause: cause @ Cause::NotZero { block, .. }, .. }) = &scrubbed.end {
            self.log_mismatch(*block, cause);
        }
    }

    /// Logs that `block` (bytes of the region) was not zero after a scrub.
    fn log_mismatch(&self, block: Span<InRegion>, cause: &Cause) {
        let at = RegionBytes::of(&self.region.name, block);
        let finding = Finding::new(self.by.clone(), at, cause.to_string());
        self.ledger.audit().write(&Event::Mismatch(finding));
    }
}
