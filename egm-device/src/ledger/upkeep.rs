//! Background upkeep: scrubbing idle memory, and clearing up after grants that lost their owners.

use std::sync::Arc;

use egm_address::{InRegion, SpanSet, align_down, align_up};
use serde::Serialize;

use super::record::{Doubt, Entry, GpuClaim};
use super::{GrantError, Ledger, LedgerError, Memory, Progress, RecordSpace, Watch, slice_file, space_of};
use crate::backing::BackingError;
use crate::carve::plan::Request;
use crate::owner::Owner;
use crate::region::{Region, RegionKind};

/// Bytes locked at a time while idle memory is scrubbed: a requester of them waits for one such scrub at most.
const PIECE: u64 = 1 << 30;

/// Changes that [`Ledger::repair`] made to the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Repair {
    /// Why the record was not trusted: it was put aside, and a new one begun.
    pub doubt: Option<Doubt>,
    /// Grants that lost their owners.
    pub forgotten: Vec<Entry>,
    /// GPU claims that lost their owners.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuClaim>,
    /// Quarantined bytes that are free now, and dirty.
    pub freed: Vec<Entry>,
    /// Files of slices without an owner: dirty, whatever the record said.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<LeftoverFiles>,
}

/// Files of slices that earlier owners left in a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftoverFiles {
    /// Name of the region.
    pub region: String,
    /// Number of bytes in those files.
    pub bytes: u64,
}

impl Ledger {
    /// Cleans free, dirty bytes of `region`, or of the pages `within`, piece by piece; returns the number of bytes.
    /// Pieces that another process takes in the meantime are skipped.
    ///
    /// # Errors
    /// [`GrantError`]; what is done stays done. A left file that cannot be cleared ends nothing: it is the error at the end.
    pub fn scrub(
        &self,
        memory: &Arc<dyn Memory>,
        region: &Region,
        within: Option<&SpanSet<InRegion>>,
        watch: &Watch<'_>,
    ) -> Result<u64, GrantError> {
        self.scrub_as(&Owner::scrub(), memory, region, within, watch)
    }

    /// [`Ledger::scrub`] for `owner`, before its GPU reads those bytes.
    pub(super) fn scrub_as(
        &self,
        owner: &Owner,
        memory: &Arc<dyn Memory>,
        region: &Region,
        within: Option<&SpanSet<InRegion>>,
        watch: &Watch<'_>,
    ) -> Result<u64, GrantError> {
        let (mut from, mut scrubbed, mut of) = (0, 0u64, 0);
        let (mut skipped, mut failed) = (SpanSet::default(), None);
        self.review_within(region, watch)?;
        loop {
            let dirty = self.states(region)?.dirty.minus(&skipped);
            let dirty = within.map_or_else(|| dirty.clone(), |within| dirty.minus(&dirty.minus(within)));
            let Some((at, size)) =
                next_piece(region, &dirty, from, !matches!(region.kind, RegionKind::Egm { .. }))
            else {
                return failed.map_or(Ok(scrubbed), |error: BackingError| Err(error.into()));
            };
            let before = from;
            from = at.saturating_add(size);
            // Progress is reported against all bytes that were dirty at first, and not for each piece.
            of = dirty.size().saturating_add(scrubbed).max(of);
            let whole = |step| match step {
                Progress::Scrubbing { done, .. } => {
                    Progress::Scrubbing { done: scrubbed.saturating_add(done).min(of), of }
                }
                opening @ Progress::Opening(_) => opening,
            };
            let watch = Watch { progress: &|step| (watch.progress)(whole(step)), ..*watch };
            let request = Request { at: Some(at), ..Request::new(size, owner.clone()) };
            match self.lease_from(memory, region, &request, &watch) {
                Ok(lease) => scrubbed = scrubbed.saturating_add(lease.settle_untouched()?),
                Err(GrantError::Short { .. }) => {}
                // The rest of the piece has another attempt.
                Err(GrantError::Backing(error @ BackingError::Leftover { bytes, .. })) => {
                    (skipped, from) = (skipped.iter().chain([bytes]).collect(), before);
                    failed.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Begins a new record where the old one cannot be trusted, and reviews all memory of `regions` that is quarantined
    /// or lost its owner: free memory is forgotten, and the rest quarantined. Grants of other regions are forgotten if
    /// their owners are gone, and any user counts as an earlier owner of dirty bytes from then on.
    pub fn repair(&self, regions: &[Region]) -> Result<Repair, LedgerError> {
        let doubt = self.look()?.1;
        let looked = regions.iter().map(|region| self.look_again(region, &|_| true, &Watch::unobserved()));
        let looked = looked.collect::<Result<Vec<_>, _>>()?.concat();
        let (freed, mut forgotten): (Vec<_>, Vec<_>) = looked.into_iter().partition(Entry::is_quarantined);
        let unseen = self.change(|record| {
            let mut unseen = Vec::new();
            for entry in std::mem::take(&mut record.grants) {
                let space = RecordSpace { name: entry.space.clone(), whole: entry.span };
                let held = self.held(std::slice::from_ref(&entry), &space, &self.lock_file(&space)?)?;
                let lives = entry.is_quarantined()
                    || held.iter().any(|held| held.owner.as_ref() == Some(&entry.owner));
                if lives { &mut record.grants } else { &mut unseen }.push(entry);
            }
            let is_pools = |entry: &Entry| {
                regions.iter().any(|region| region.name == entry.region && region.kind.is_pool())
            };
            record.was_lost |= !unseen.iter().all(is_pools);
            Ok::<_, LedgerError>(unseen)
        })?;
        let gpus = self.review_claims(|_| true)?;
        forgotten.extend(unseen);
        let is_here = self.0.memory.opens_devices;
        let files = regions.iter().filter(|region| region.kind.has_slice_files() && is_here);
        let files = files.map(|region| self.leftover_files(region)).collect::<Result<Vec<_>, _>>()?;
        let files = files.into_iter().filter(|left| left.bytes > 0).collect();
        Ok(Repair { doubt, forgotten, gpus, freed, files })
    }

    /// Records that files of `region` without an owner are dirty. A folder that cannot be listed has none that is known.
    fn leftover_files(&self, region: &Region) -> Result<LeftoverFiles, LedgerError> {
        let (space, named) = (space_of(region)?, slice_file::named(region).unwrap_or_default());
        self.change(|record| {
            let held = self.held(&record.grants, &space, &self.lock_file(&space)?)?;
            let left = named.minus(&held.iter().map(|held| held.span).collect());
            record.remove_clean(&space.name, &space.places(&left));
            Ok(LeftoverFiles { region: region.name.clone(), bytes: left.size() })
        })
    }
}

/// The first piece (offset, bytes) from offset `from` on that has dirty bytes, in whole pages.
fn next_piece(region: &Region, dirty: &SpanSet<InRegion>, from: u64, may_cut: bool) -> Option<(u64, u64)> {
    let page = region.page_size.get().max(1);
    let span = dirty.iter().find(|span| span.end().get() > from)?;
    let start = align_down(span.start().get().max(from), page);
    let end = align_up(span.end().get(), page)?.min(region.size.get());
    let size = end.checked_sub(start)?;
    // A device that opens once is zeroed by the kernel at each open: it is opened for all of it.
    let size = if may_cut { size.min(align_up(PIECE, page)?) } else { size };
    (size > 0).then_some((start, size))
}
