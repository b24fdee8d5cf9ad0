//! Requests that wait for a look at the regions: the ledger may be locked, and the event loop never waits for it.

use super::session::Key;
use super::wire::Request;

/// A request that needs the regions' supplies.
pub(super) enum PendingRequest {
    /// A request of a client.
    Request(Key, Request),
    /// A slice for which there was no place.
    Short(Key),
}

/// One look at a time, for all requests before it: frequent requests cause no extra work in the ledger.
#[derive(Default)]
pub(super) struct SupplyChecks {
    asked: Vec<PendingRequest>,
    /// The requests that the current look is for.
    begun: Option<Vec<PendingRequest>>,
    /// Whether a look is to follow.
    due: bool,
    /// Whether slices changed since the look began: its figures may be inconsistent.
    stale: bool,
}

impl SupplyChecks {
    /// Queues `ask` for the next look.
    pub(super) fn ask(&mut self, ask: PendingRequest) {
        self.asked.push(ask);
        self.due = true;
    }

    /// Requests a look for waiting clients, if there are `any`.
    pub(super) const fn serve(&mut self, any: bool) {
        self.due |= any;
    }

    /// Records that slices came or went.
    pub(super) const fn changed(&mut self) {
        self.stale = true;
    }

    /// Whether a look is to begin now.
    pub(super) fn begin(&mut self) -> bool {
        let begins = self.due && self.begun.is_none();
        if begins {
            self.begun = Some(std::mem::take(&mut self.asked));
            (self.due, self.stale) = (false, false);
        }
        begins
    }

    /// Ends a look: returns the requests that it decides, or `None` when another look is necessary.
    pub(super) fn over(&mut self) -> Option<Vec<PendingRequest>> {
        let asks = self.begun.take()?;
        if self.stale {
            self.asked.splice(0..0, asks);
            self.due = true;
            return None;
        }
        Some(asks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_decided_by_a_look_that_began_and_ended_between_two_changes() {
        let mut supply_checks = SupplyChecks::default();
        assert!(!supply_checks.begin());
        supply_checks.ask(PendingRequest::Short(1));
        assert!(supply_checks.begin());
        supply_checks.ask(PendingRequest::Short(2));
        assert!(!supply_checks.begin(), "one at a time");
        supply_checks.changed();
        assert!(supply_checks.over().is_none() && supply_checks.begin());
        let asks = supply_checks.over().unwrap();
        assert!(matches!(asks[..], [PendingRequest::Short(1), PendingRequest::Short(2)]));
        assert!(!supply_checks.begin());
    }
}
