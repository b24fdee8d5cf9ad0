//! A granted slice: its lock, its memory, and its return.
//!
//! Dropping a lease unlocks it and nothing else: its bytes are dirty and the next owner's grant scrubs them. That is
//! also what every kind of crash does.

mod log;
mod renew;

use std::fs::File;
use std::io;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use egm_address::{InRegion, Offset, SpanSet};

use crate::audit::{Action, Actor, Event, RegionBytes};
use crate::backing::{Backing, BackingError, RetiredListError, fsdax};
use crate::free;
use crate::ledger::record::{Entry, GrantState};
use crate::ledger::{
    self, GrantError, Ledger, LedgerError, LockedSlice, Memory, RecordSpace, Watch, slice_device,
};
use crate::owner::Owner;
use crate::region::{Region, Slice};
use crate::scrub::{self, Scrubbed};

/// Reason recorded for bytes that an EGM device lists as retired.
const LISTED: &str = "the device lists it as retired";

/// A slice, as long as this value or a duplicate of [`Lease::claim`] lives.
pub struct Lease {
    /// Dropped before the claim: the memory must not be in use when it is unlocked.
    backing: Box<dyn Backing>,
    memory: Arc<dyn Memory>,
    pub(crate) locked: LockedSlice,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("slice", &self.locked.slice).field("owner", &self.locked.owner).finish()
    }
}

impl Lease {
    pub(crate) fn begin(
        locked: LockedSlice,
        backing: Box<dyn Backing>,
        memory: Arc<dyn Memory>,
        watch: &Watch<'_>,
    ) -> Result<Self, GrantError> {
        let mut lease = Self { backing, memory, locked };
        let prepared = lease.prepare(watch);
        if prepared.is_err() {
            lease.release_own()?;
        }
        prepared.map(|()| lease)
    }

    /// Resumes the lease of `slice` that another process left, with its lock's descriptor `claim`; opens the memory.
    ///
    /// # Errors
    /// [`GrantError`]; the slice stays recorded as `owner`'s, and is dirty once `claim` is closed.
    pub fn resume(
        ledger: &Ledger,
        region: Region,
        slice: Slice,
        owner: Owner,
        claim: File,
    ) -> Result<Self, GrantError> {
        let memory = ledger.memory();
        let unknown = || LedgerError::Region { region: region.name.clone() };
        let space = RecordSpace::of(&region).ok_or_else(unknown)?;
        let place = slice.span().and_then(|bytes| space.place(bytes)).ok_or_else(unknown)?;
        let backing = memory.reopen(&region, &slice, &Watch::unobserved())?;
        let ledger = ledger.clone();
        let (by, dirty) = (Actor::of(&owner), SpanSet::default());
        let error = |source| LedgerError::Lock { path: "the claim".into(), source };
        let (lock, before) = (ledger::inode(&claim).map_err(error)?, Vec::new());
        let locked =
            LockedSlice { ledger, region, space, slice, place, owner, by, claim, lock, before, dirty };
        Ok(Self { backing, memory, locked })
    }

    /// Scrubs what is dirty and records retired pages, so that the owner can use the slice.
    fn prepare(&mut self, watch: &Watch<'_>) -> Result<(), GrantError> {
        let Self { backing, memory, locked } = self;
        let retired = locked.unknown_retired(memory.as_ref(), backing.as_ref())?;
        let dirty = std::mem::take(&mut locked.dirty).minus(&retired);
        if !retired.is_empty() {
            let usage = if dirty.is_empty() { GrantState::Granted } else { GrantState::Scrubbing };
            locked.record(usage, &retired)?;
            locked.log_retired(&retired, LISTED);
        }
        if !dirty.is_empty() {
            let begun = Instant::now();
            let scrubbed = scrub(memory.as_ref(), backing.as_ref(), &locked.slice, dirty, watch);
            locked.log_scrub(&scrubbed, begun.elapsed());
            if locked.region.kind.has_slice_files() && scrubbed.is_bad() {
                locked.settle_bad_file(memory.as_ref(), &scrubbed)?;
                return Err(BackingError::BadFile { region: locked.region.name.clone() }.into());
            }
            if scrubbed.end.is_err() {
                locked.settle(&scrubbed.done, locked.retires(&scrubbed))?;
            }
            if let Err(source) = scrubbed.end {
                return Err(GrantError::Scrub { region: locked.region.name.clone(), source });
            }
            locked.record(GrantState::Granted, &scrubbed.bad)?;
        }
        if locked.region.kind.has_slice_files() {
            // What a file system does not show is not known to be small.
            let small = fsdax::small_pages(backing.as_ref()).unwrap_or_default();
            locked.record_small_pages(small)?;
        }
        Ok(())
    }

    /// The region, with every page that is retired so far.
    #[must_use]
    pub const fn region(&self) -> &Region {
        &self.locked.region
    }

    /// Offset and size in the region.
    #[must_use]
    pub const fn slice(&self) -> &Slice {
        &self.locked.slice
    }

    /// The owner of the slice.
    #[must_use]
    pub const fn owner(&self) -> &Owner {
        &self.locked.owner
    }

    /// The retired bytes of the slice, counted in the region: they must not be touched.
    #[must_use]
    pub fn holes(&self) -> SpanSet<InRegion> {
        self.locked.slice.span().map(|bytes| self.locked.region.retired.within(bytes)).unwrap_or_default()
    }

    /// Records that `bad` (bytes of the region) went bad while this lease lasts: `Ledger::retire_of`.
    pub fn retire(&self, bad: &SpanSet<InRegion>) -> Result<(), LedgerError> {
        if egm_address::fault!("bad-page-not-retired") {
            return Ok(());
        }
        self.locked.ledger.retire_of(&self.locked.region, &self.locked.slice, bad, &self.locked.by)
    }

    /// Checks the `claimed` bytes of the region that the owner calls bad: [`Ledger::check_claims`].
    pub(crate) fn check_claims(&self, claimed: &SpanSet<InRegion>) -> Result<(), LedgerError> {
        let LockedSlice { ledger, region, slice, by, .. } = &self.locked;
        ledger.check_claims(region, slice, self.backing.as_ref(), claimed, by)
    }

    /// Logs an action on the whole slice.
    pub(crate) fn log(&self, event: fn(Action) -> Event, duration: Duration) {
        let LockedSlice { ledger, region, slice, by, .. } = &self.locked;
        if let Some(bytes) = slice.span() {
            ledger.audit().write(&event(Action::new(
                by.clone(),
                RegionBytes::of(&region.name, bytes),
                duration,
            )));
        }
    }

    /// The lock's descriptor: any process with a duplicate keeps the slice in use, even when this process ends.
    #[must_use]
    pub const fn claim(&self) -> &File {
        &self.locked.claim
    }

    /// Unlocks a slice that was not written to since its grant: its clean bytes stay clean. Returns their number.
    pub(crate) fn settle_untouched(self) -> Result<u64, LedgerError> {
        let clean = self.locked.usable();
        self.locked.settle(&clean, &SpanSet::default())?;
        self.release_own()?;
        Ok(clean.size())
    }

    /// Scrubs the slice and records it clean, then unlocks it. Every mapping of it must be gone, in every process.
    /// A scrub that ends early keeps its progress; the slice is free then, and the rest of it dirty.
    ///
    /// # Errors
    /// [`GrantError`]; the slice is unlocked all the same, and quarantined where its memory is in use. A pool's memory
    /// in use is no error: it is a file of its own, and the kernel frees it with the last descriptor or mapping.
    pub fn return_slice(mut self, watch: &Watch<'_>) -> Result<(), GrantError> {
        match self.release(watch) {
            Err(GrantError::StillUsed { .. }) if self.locked.region.kind.is_pool() => Ok(()),
            released => released,
        }
    }

    /// [`Lease::return_slice`] that keeps the slice locked where its memory is in use ([`GrantError::StillUsed`]).
    pub(crate) fn release(&mut self, watch: &Watch<'_>) -> Result<(), GrantError> {
        let begun = Instant::now();
        let Self { backing, memory, locked } = self;
        if locked.region.kind.has_slice_devices() {
            locked.renew(memory.as_ref(), backing, watch)?;
        } else if locked.region.kind.has_slice_files() {
            locked.reclaim(memory.as_ref(), backing, watch)?;
        } else {
            locked.open_again(memory.as_ref(), backing, watch)?;
            locked.expect_free(memory.as_ref(), backing.as_ref())?;
        }
        if !locked.region.kind.keeps_bytes() {
            locked.settle(&SpanSet::default(), &SpanSet::default())?;
            self.log(Event::Return, begun.elapsed());
            return Ok(());
        }
        let retired = locked.unknown_retired(memory.as_ref(), backing.as_ref())?;
        locked.record(GrantState::Scrubbing, &retired)?;
        locked.log_retired(&retired, LISTED);
        let scrub_begun = Instant::now();
        let scrubbed = scrub(memory.as_ref(), backing.as_ref(), &locked.slice, locked.usable(), watch);
        locked.log_scrub(&scrubbed, scrub_begun.elapsed());
        if locked.region.kind.has_slice_files() && scrubbed.is_bad() {
            locked.settle_bad_file(memory.as_ref(), &scrubbed)?;
        } else {
            let settled = locked.settle(&scrubbed.done, locked.retires(&scrubbed));
            // The name of a file shows that its bytes are dirty.
            if scrubbed.end.is_ok() || !self.locked.region.kind.has_slice_files() {
                self.release_own()?;
            }
            settled?;
        }
        self.log(Event::Return, begun.elapsed());
        let region = self.locked.region.name.clone();
        scrubbed.end.map_err(|source| GrantError::Scrub { region, source })
    }

    /// Ends the slice's own device or file, where it has one. No other process may have it.
    fn release_own(&self) -> Result<(), LedgerError> {
        let LockedSlice { region, slice, .. } = &self.locked;
        if region.kind.has_slice_devices() {
            slice_device::unlock(self.backing.as_ref())?;
        }
        self.memory.release(region, slice);
        Ok(())
    }

    /// A description of the memory for another process.
    pub(crate) fn hand_out(&self) -> io::Result<File> {
        let file = self.backing.file();
        // The kernel counts no description that memfd_create made: that one stays here.
        if self.locked.region.kind.keeps_bytes() { file.try_clone() } else { free::reopen(file) }
    }
}

/// A lease is memory: code that takes a backing can take a lease, and keeps it as long.
impl Backing for Lease {
    fn file(&self) -> &File {
        self.backing.file()
    }
    fn offset(&self) -> u64 {
        self.backing.offset()
    }
    fn size(&self) -> u64 {
        self.backing.size()
    }
    fn page_size(&self) -> u64 {
        self.backing.page_size()
    }
    fn is_invisible(&self) -> bool {
        self.backing.is_invisible()
    }
    fn outlives_power(&self) -> bool {
        self.backing.outlives_power()
    }
}

impl LockedSlice {
    /// Bytes of the slice that are not retired.
    fn usable(&self) -> SpanSet<InRegion> {
        let whole: SpanSet<InRegion> = self.slice.span().into_iter().collect();
        whole.minus(self.region.retired.spans())
    }

    /// Pages that the open memory lists as retired by now and that are not known yet: such a list grows at run time.
    fn unknown_retired(
        &self,
        memory: &dyn Memory,
        backing: &dyn Backing,
    ) -> Result<SpanSet<InRegion>, RetiredListError> {
        Ok(memory.retired(&self.region, backing)?.spans().minus(self.region.retired.spans()))
    }

    /// Records the state of the slice, and pages that were found bad. From here on, this process leaves alone all pages
    /// that are recorded as retired, whatever found them.
    fn record(&mut self, usage: GrantState, bad: &SpanSet<InRegion>) -> Result<(), LedgerError> {
        let (space, place) = (&self.space, self.place);
        let retired = self.ledger.change(|record| {
            let is_exposed = !self.ledger.gpus(record, &self.region)?.is_empty();
            for entry in record.grants.iter_mut().filter(|e| e.space == space.name && e.span == place) {
                (entry.usage, entry.lock) = (usage, self.lock);
                entry.evidence.clear();
                if usage == GrantState::Granted {
                    entry.earlier.clear();
                    entry.devices.clear();
                }
                // A scrub begins: earlier writes of a GPU no longer count.
                entry.exposed = is_exposed || (entry.exposed && usage != GrantState::Scrubbing);
            }
            record.add_retired(&space.name, &space.places(bad));
            Ok::<_, LedgerError>(space.offsets(&record.retired(&space.name)))
        })?;
        self.region.retired = self.region.retired.and(&retired).and(bad);
        Ok(())
    }

    /// Bytes that a scrub takes out of use. A file's bad page is no place of the region.
    fn retires<'a>(&self, scrubbed: &'a Scrubbed) -> &'a SpanSet<InRegion> {
        static NONE: LazyLock<SpanSet<InRegion>> = LazyLock::new(SpanSet::default);
        if self.region.kind.has_slice_files() { &NONE } else { &scrubbed.bad }
    }

    /// Records the end of the grant, while it is still locked: the `clean` bytes are zero, and out of reach.
    fn settle(&self, clean: &SpanSet<InRegion>, bad: &SpanSet<InRegion>) -> Result<(), LedgerError> {
        let (space, place) = (&self.space, self.place);
        self.ledger.change(|record| {
            let is_here = |entry: &Entry| entry.space == space.name && entry.span == place;
            let is_exposed = record.grants.iter().any(|entry| is_here(entry) && entry.exposed);
            record.grants.retain(|entry| !is_here(entry));
            if !is_exposed {
                record.add_clean(&space.name, &space.places(clean));
            }
            record.add_retired(&space.name, &space.places(bad));
            Ok(())
        })
    }
}

/// Makes `todo` zero; bad pages in it are left out and reported.
fn scrub(
    memory: &dyn Memory,
    backing: &dyn Backing,
    slice: &Slice,
    todo: SpanSet<InRegion>,
    watch: &Watch<'_>,
) -> Scrubbed {
    scrub::around_bad(todo, |todo| memory.zero(backing, Offset::new(slice.offset), todo, watch))
}
