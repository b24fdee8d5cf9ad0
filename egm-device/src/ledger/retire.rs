//! Taking bad pages out of use, and back.
#![forbid(unsafe_code)]

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet, align_down, align_up};
use egm_report::{Blame, Remedy, Report};
use serde::Serialize;

use super::{Ledger, LedgerError, Memory, Watch, space_of};
use crate::audit::{Actor, Event, Finding, RegionBytes};
use crate::backing::{Backing, BackingError, RetiredListError};
use crate::claims;
use crate::mapping::base_page;
use crate::owner::Owner;
use crate::region::{Region, Slice};
use crate::retired::Retired;

impl Ledger {
    /// [`Ledger::retire`] for `bad` bytes that the owner `by` of `slice` of `region` found. Bytes outside the slice are
    /// left out: its owner has no right to report them. A pool's bytes have no fixed place that a later owner could
    /// get: the kernel keeps its bad pages. A file of its own has none either: its scrub finds the page, and sets it aside.
    pub(crate) fn retire_of(
        &self,
        region: &Region,
        slice: &Slice,
        bad: &SpanSet<InRegion>,
        by: &Actor,
    ) -> Result<(), LedgerError> {
        let outside = slice.span().map(|slice| bad.minus(&SpanSet::from_iter([slice])));
        let inside = outside.map(|outside| bad.minus(&outside)).unwrap_or_default();
        if inside.is_empty() || !region.kind.has_places() {
            return Ok(());
        }
        self.retire_for(region, &inside, by, "its owner's process got a memory error there")
    }

    /// Takes `pages` of `region` out of use for every owner, because `by` found them bad for this `reason`. Whole pages
    /// of the host are retired.
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
        let space = space_of(region)?;
        let entries = pages.iter().map(|span| (span.start().get(), span.size()));
        let retired = Retired::new(entries, region.size.get(), base_page());
        let new = self.change(|record| {
            let places = space.places(retired.spans());
            let new = places.minus(&record.retired(&space.name));
            record.add_retired(&space.name, &places);
            Ok::<_, LedgerError>(space.offsets(&new))
        })?;
        self.log_retired(region, &new, by, reason);
        Ok(())
    }

    /// Reads the bytes of `slice`, which has those of `backing`, that its owner `by` claims to be bad. Unreadable bytes
    /// are retired; readable ones are logged and stay in use.
    pub(crate) fn check_claims(
        &self,
        region: &Region,
        slice: &Slice,
        backing: &dyn Backing,
        claimed: &SpanSet<InRegion>,
        by: &Actor,
    ) -> Result<(), LedgerError> {
        let claimed = claimed.minus(region.retired.spans());
        if claimed.is_empty() || !region.kind.has_places() {
            return Ok(());
        }
        let refused = |bytes: &SpanSet<InRegion>, reason: String| {
            if let Some(place) = RegionBytes::of_set(&region.name, bytes) {
                self.audit().write(&Event::ClaimRefused(Finding::new(by.clone(), place, reason)));
            }
        };
        match claims::check(backing, Offset::new(slice.offset), &claimed) {
            Ok(verdict) => {
                refused(&verdict.sound, "its owner reported it as bad, and it can be read".to_owned());
                self.retire_for(
                    region,
                    &verdict.bad,
                    by,
                    "its owner reported it as bad, and it cannot be read",
                )
            }
            Err(error) => {
                refused(&claimed, format!("its owner reported it as bad: {error}"));
                Ok(())
            }
        }
    }

    /// Whether the retired `pages` of `region` can be put back into use, and, with `commit`, does it. They are scrubbed
    /// before the next grant.
    ///
    /// # Errors
    /// [`UnretireError`]: nothing is changed.
    pub fn unretire(
        &self,
        memory: &dyn Memory,
        region: &Region,
        pages: Span<InRegion>,
        by: &Owner,
        commit: bool,
    ) -> Result<Unretired, UnretireError> {
        let name = || region.name.clone();
        if region.kind.has_slice_files() {
            return Err(UnretireError::SliceFiles { region: name() });
        }
        let space = space_of(region)?;
        let only_pages = |set: &SpanSet<InRegion>| set.minus(&set.minus(&SpanSet::from_iter([pages])));
        let recorded = self.look()?.0.retired(&space.name);
        let recorded = only_pages(&space.offsets(&recorded));
        let hull = recorded.iter().next().zip(recorded.iter().last());
        let hull = hull.and_then(|(first, last)| whole_pages(region, first.start().get(), last.end().get()));
        let slice = hull.ok_or_else(|| UnretireError::NotRetired { region: name() })?;
        let backing = memory.open(region, &slice, &Watch::unobserved())?;
        let named = memory.retired(region, backing.as_ref())?.and(region.retired.spans());
        if let Some(span) = only_pages(named.spans()).iter().next() {
            return Err(UnretireError::Named { region: name(), span });
        }
        let verdict = claims::check(backing.as_ref(), Offset::new(slice.offset), &recorded)
            .map_err(|error| UnretireError::Unknown { region: name(), reason: error.to_string() })?;
        if let Some(span) = verdict.bad.iter().next() {
            return Err(UnretireError::Bad { region: name(), span });
        }
        if commit && !egm_address::fault!("unretire-ignored") {
            self.change(|record| {
                record.remove_retired(&space.name, &space.places(&recorded));
                Ok::<_, LedgerError>(())
            })?;
            if let Some(place) = RegionBytes::of_set(&region.name, &recorded) {
                let finding =
                    Finding::new(Actor::of(by), place, "an operator asked for it, and it can be read");
                self.audit().write(&Event::Unretire(finding));
            }
        }
        Ok(Unretired { bytes: recorded.size(), changed: commit })
    }

    /// Logs that `bad` bytes of `region` are retired, if there are any.
    pub(crate) fn log_retired(&self, region: &Region, bad: &SpanSet<InRegion>, by: &Actor, reason: &str) {
        if let Some(place) = RegionBytes::of_set(&region.name, bad) {
            self.audit().write(&Event::Retire(Finding::new(by.clone(), place, reason)));
        }
    }
}

/// A slice of `region` in whole pages that has the bytes from `start` to `end`.
fn whole_pages(region: &Region, start: u64, end: u64) -> Option<Slice> {
    let page = region.page_size.get().max(1);
    let offset = align_down(start, page);
    let size = align_up(end, page)?.min(region.size.get()).checked_sub(offset)?;
    Some(Slice { region: region.name.clone(), offset, size: ByteSize::new(size) })
}

/// Retired bytes that can be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Unretired {
    /// Number of retired bytes that can be read.
    pub bytes: u64,
    /// Whether they are back in use.
    pub changed: bool,
}

/// Why retired bytes stay out of use.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum UnretireError {
    #[error("cannot unretire bytes of region \"{region}\": the ledger has none of them as retired")]
    NotRetired { region: String },
    #[error(
        "cannot unretire bytes of region \"{region}\": a file with a bad page is set aside whole, at no offset"
    )]
    SliceFiles { region: String },
    #[error(
        "cannot unretire {:#x} bytes at {:#x} of region \"{region}\": the kernel or the device lists them as retired",
        span.size(), span.start()
    )]
    Named { region: String, span: Span<InRegion> },
    #[error(
        "cannot unretire {:#x} bytes at {:#x} of region \"{region}\": reading them gives a memory error",
        span.size(), span.start()
    )]
    Bad { region: String, span: Span<InRegion> },
    #[error("cannot unretire bytes of region \"{region}\": {reason}")]
    Unknown { region: String, reason: String },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Backing(#[from] BackingError),
    #[error(transparent)]
    List(#[from] RetiredListError),
}

impl Report for UnretireError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::NotRetired { .. } => {
                Blame::Configuration.help("see what is retired: egm-device ledger show --json")
            }
            Self::SliceFiles { .. } => Blame::Configuration
                .help("once the memory is repaired, delete the bad-… files of the region's folder"),
            Self::Named { .. } => Blame::Host.help("have the memory repaired: the list is the hardware's"),
            Self::Bad { .. } => Blame::Host.help("have the memory repaired"),
            Self::Ledger(error) => error.remedy(),
            _ => Blame::Host.into(),
        }
    }
}
