//! Grants: a place, its memory, and what a request passes over on the way to them.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use egm_address::{InRegion, Span, SpanSet};
use egm_report::{Chain, Report};

use super::{GrantError, HeldBytes, Ledger, LockedSlice, Memory, Watch, space_of};
use crate::audit::{Actor, Event, Refusal};
use crate::backing::BackingError;
use crate::carve::plan::{Request, place};
use crate::free::Verdict;
use crate::lease::Lease;
use crate::region::Region;

/// Places that a request passed over.
#[derive(Default)]
struct SkippedPlaces {
    in_use: Vec<Span<InRegion>>,
    /// Bytes of files that cannot be cleared.
    left: Vec<Span<InRegion>>,
    /// Why the first of them cannot be.
    why: Option<BackingError>,
}

impl SkippedPlaces {
    fn all(&self) -> SpanSet<InRegion> {
        self.in_use.iter().chain(&self.left).copied().collect()
    }

    /// `error` of a `request` that has no place: where nothing else could be in its way, the left file is the reason.
    fn explain(&mut self, error: GrantError, region: &Region, request: &Request) -> GrantError {
        let left = self.left.iter().copied().collect();
        match self.why.take_if(|_| place(region, &left, &SpanSet::default(), request).is_err()) {
            Some(why) if matches!(error, GrantError::Short { .. }) => why.into(),
            _ => error,
        }
    }
}

impl Ledger {
    /// A slice of `region` for `request`, scrubbed where it was dirty.
    ///
    /// # Errors
    /// [`GrantError`]: no place (with the owners in the way), no memory, no ledger, or the scrub ended early.
    pub fn grant(&self, region: &Region, request: &Request, watch: &Watch<'_>) -> Result<Lease, GrantError> {
        let granted = self.grant_from(&self.memory(), region, request, watch);
        granted.inspect_err(|error| {
            let refusal = Refusal {
                by: Actor::of(&request.owner),
                region: Some(region.name.clone()),
                bytes: Some(request.size),
                reason: Chain(error as &dyn Report).one_line(),
            };
            self.audit().write(&Event::Refusal(refusal));
        })
    }

    /// [`Ledger::grant`], with memory that is reached another way. The caller logs a refusal: the broker may wait and
    /// retry.
    pub fn grant_from(
        &self,
        memory: &Arc<dyn Memory>,
        region: &Region,
        request: &Request,
        watch: &Watch<'_>,
    ) -> Result<Lease, GrantError> {
        let begun = Instant::now();
        let lease = self.lease_from(memory, region, request, watch)?;
        lease.log(Event::Grant, begun.elapsed());
        Ok(lease)
    }

    /// [`Ledger::grant_from`] that is not logged, for the ledger's own scrubs.
    pub(super) fn lease_from(
        &self,
        memory: &Arc<dyn Memory>,
        region: &Region,
        request: &Request,
        watch: &Watch<'_>,
    ) -> Result<Lease, GrantError> {
        let space = space_of(region)?;
        self.review_gpus(region)?;
        let (mut skipped, mut reviewed) = (SkippedPlaces::default(), false);
        loop {
            let locked = match self.take(region, &space, request, &skipped.all()) {
                Err(GrantError::Short { holders, .. })
                    if !reviewed && holders.iter().any(HeldBytes::is_quarantined) =>
                {
                    reviewed = true;
                    self.review_within(region, watch)?;
                    continue;
                }
                locked => locked.map_err(|error| skipped.explain(error, region, request))?,
            };
            match memory.open(&locked.region, &locked.slice, watch) {
                Err(error) => self.pass(locked, error, &mut skipped)?,
                // Clean bytes were free when they were scrubbed, and this process has handed them to no other.
                Ok(backing) if locked.is_alone(backing.as_ref())? || locked.dirty.is_empty() => {
                    return Lease::begin(locked, backing, memory.clone(), watch);
                }
                Ok(backing) => match locked.verdict(memory.as_ref(), backing.as_ref(), locked.last())? {
                    Verdict::Free => return Lease::begin(locked, backing, memory.clone(), watch),
                    Verdict::InUse { evidence, bytes } => {
                        skipped.in_use.extend(locked.quarantine(&evidence, &bytes)?.iter());
                    }
                },
            }
            // Each such place costs a scan of all processes, or a wait for pages of a file.
            if watch.cancel.load(Ordering::Relaxed) {
                return Err(GrantError::Cancelled { region: region.name.clone() });
            }
        }
    }

    /// Gives `locked` up after the `error` of an attempt to open its memory, if another place may do.
    fn pass(
        &self,
        locked: LockedSlice,
        error: BackingError,
        skipped: &mut SkippedPlaces,
    ) -> Result<(), GrantError> {
        match error {
            BackingError::InUse { bytes, evidence, .. } => {
                locked.quarantine_device(bytes, &evidence)?;
                skipped.in_use.push(bytes);
            }
            BackingError::Leftover { bytes, .. }
                if locked.slice.span().is_some_and(|it| it.overlaps(bytes)) =>
            {
                locked.put_back()?;
                self.note_once(bytes, &error);
                skipped.left.push(bytes);
                skipped.why.get_or_insert(error);
            }
            error => return Err(error.into()),
        }
        Ok(())
    }

    /// Prints a note for operators that the file of `bytes` cannot be cleared, once for each file.
    fn note_once(&self, bytes: Span<InRegion>, error: &BackingError) {
        let mut noted = self.0.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.insert((error.to_string(), bytes.start())) {
            let reasons = std::iter::successors(error.source(), |reason: &&dyn Error| (*reason).source());
            let reasons: Vec<_> = reasons.map(|reason| format!(": {reason}")).collect();
            tracing::info!("{error}{}", reasons.concat());
        }
    }
}
