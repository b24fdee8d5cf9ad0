//! Memory that may be in use although its owner has returned it or ended: kept from every owner until it is free.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use egm_address::{Address, InRegion, Span, SpanSet};

use super::file_bytes::FileBytes;
use super::owners::{LastOwners, unknown};
use super::record::{self, Entry, GrantState, InRecordSpace, Record};
use super::{
    GrantError, Ledger, LedgerError, LockedSlice, Memory, RecordSpace, Watch, claim, inode, now, space_of,
};
use crate::audit::{self, Action, Actor, Event, Finding};
use crate::backing::Backing;
use crate::free::{self, Evidence, FileName, Hold, OtherGrant, Question, Verdict};
use crate::lease::Lease;
use crate::region::{Region, RegionKind};

impl Ledger {
    /// The question whether `place` of the region's `file` is free, after `last`.
    fn question(
        &self,
        place: &FileBytes<'_>,
        file: FileName,
        last: LastOwners,
    ) -> Result<Question, LedgerError> {
        let record = self.look()?.0;
        let others = self.others(&record, place)?;
        let bytes = place.file_bytes(place.span).ok_or_else(|| super::no_region(place.region))?;
        let was_lost = record.was_lost && !last.are_all;
        let is_here = |entry: &&Entry| entry.space == place.space.name && entry.span.overlaps(place.span);
        let here: Vec<Entry> = record.grants.iter().filter(is_here).cloned().collect();
        let devices = record::devices_of(&here);
        Ok(Question { file, bytes, last: last.owners, devices, was_lost, others })
    }

    /// Live grants beside `place` in its space.
    fn others(&self, record: &Record, place: &FileBytes<'_>) -> Result<Vec<OtherGrant>, LedgerError> {
        // Regions of one space share a file where it is `/dev/mem`.
        let whole = Span::between(Address::new(0), Address::new(i64::MAX.unsigned_abs()));
        let Some(whole) = whole else { return Ok(Vec::new()) };
        let space = RecordSpace { name: place.space.name.clone(), whole };
        let held = self.held(&record.grants, &space, &self.lock_file(&space)?)?;
        let mut others = Vec::new();
        for held in held.iter().filter(|held| !held.is_quarantined()) {
            if let Some(span) = space.place(held.span).filter(|span| !span.overlaps(place.span)) {
                let pid = held.owner.as_ref().map_or(0, |owner| owner.pid);
                others.push(OtherGrant { pid, bytes: place.file_bytes(span).unwrap_or_default() });
            }
        }
        Ok(others)
    }

    /// Reviews quarantined bytes of `region` that no lock keeps; returns the entries that are now free, and dirty.
    pub fn review(&self, region: &Region) -> Result<Vec<Entry>, LedgerError> {
        self.review_within(region, &Watch::without_waiting())
    }

    /// [`Ledger::review`] that waits for references to pages as long as `watch` allows.
    pub(super) fn review_within(
        &self,
        region: &Region,
        watch: &Watch<'_>,
    ) -> Result<Vec<Entry>, LedgerError> {
        self.look_again(region, &Entry::is_quarantined, watch)
    }

    /// Reviews bytes of `region` in entries that are `due` and that no lock keeps. Free bytes become dirty, and their
    /// entries are returned; the others are quarantined.
    pub(super) fn look_again(
        &self,
        region: &Region,
        due: &dyn Fn(&Entry) -> bool,
        watch: &Watch<'_>,
    ) -> Result<Vec<Entry>, LedgerError> {
        if region.kind.is_pool() {
            return self.review_orphaned(region);
        }
        let space = space_of(region)?;
        let (record, _) = self.look()?;
        let is_due =
            |entry: &Entry| entry.space == space.name && due(entry) && space.whole.overlaps(entry.span);
        let Some(device) = device(region).filter(|_| record.grants.iter().any(is_due)) else {
            return Ok(Vec::new());
        };
        let claims = self.lock_file(&space)?;
        // A broker that keeps the slice for its client reviews it itself.
        let lock = inode(&claims).map_err(|source| self.lock_error(&space, source))?;
        let is_left = |entry: &Entry| is_due(entry) && entry.is_unlocked(&claims, lock);
        let mut freed = Vec::new();
        for entry in record.grants.into_iter().filter(is_left) {
            let Ok(file) = FileName::at(device) else { continue };
            let place = FileBytes { region, space: &space, span: entry.span };
            let Some(verdict) = self.verdict_on(&entry, &place, file, watch)? else { continue };
            self.change(|record| {
                record.settle(&entry, &verdict, is_left);
                Ok::<_, LedgerError>(())
            })?;
            if verdict == Verdict::Free {
                if entry.is_quarantined() {
                    self.log_release(region, &space, &entry);
                }
                freed.push(entry);
            }
        }
        Ok(freed)
    }
}

impl Entry {
    /// Quarantines the bytes, because of `evidence` that they are in use.
    pub(super) fn quarantine(&mut self, evidence: &[Evidence]) {
        (self.usage, self.lock) = (GrantState::Quarantined, 0);
        self.evidence = evidence.to_vec();
    }

    /// Whether no process has a lock of these bytes in the file `claims`, which has inode `lock`. As in
    /// [`Ledger::held`], an owner has its slice without its lock file as long as it lives.
    fn is_unlocked(&self, claims: &File, lock: u64) -> bool {
        (self.is_quarantined() || self.lock == lock || !self.owner.is_alive())
            && claim::held(claims, self.span).is_ok_and(|locked| locked.is_empty())
    }
}

impl Record {
    /// Removes what is still recorded of `entry` if it is free, and quarantines it otherwise.
    fn settle(&mut self, entry: &Entry, verdict: &Verdict, is_left: impl Fn(&Entry) -> bool) {
        let is_it = |other: &Entry| other.span == entry.span && other.owner == entry.owner && is_left(other);
        match verdict {
            Verdict::Free => self.grants.retain(|other| !is_it(other)),
            Verdict::InUse { evidence, .. } => {
                for other in self.grants.iter_mut().filter(|other| is_it(other)) {
                    other.quarantine(evidence);
                }
            }
        }
    }
}

impl Ledger {
    /// Whether the bytes of `entry` at `place` of `file` are free; `None` while the device or the file that the slice had of
    /// its own is in use.
    fn verdict_on(
        &self,
        entry: &Entry,
        place: &FileBytes<'_>,
        file: FileName,
        watch: &Watch<'_>,
    ) -> Result<Option<Verdict>, LedgerError> {
        let kind = &place.region.kind;
        if let Some(slice) = place.slice().filter(|_| kind.has_slice_devices() || kind.has_slice_files()) {
            let is_used = self.memory().is_device_used(place.region, &slice, watch);
            return Ok((!is_used).then_some(Verdict::Free));
        }
        if egm_address::fault!("quarantine-forgotten") {
            return Ok(Some(Verdict::Free));
        }
        Ok(Some(free::look(&self.question(place, file, LastOwners::of(entry))?)))
    }

    /// Logs the end of a quarantine.
    pub(super) fn log_release(&self, region: &Region, space: &RecordSpace, entry: &Entry) {
        if let Some(bytes) = space.offset(entry.span) {
            let since = Duration::from_secs(now().saturating_sub(entry.since));
            let action =
                Action::new(Actor::of(&entry.owner), audit::RegionBytes::of(&region.name, bytes), since);
            self.audit().write(&Event::Release(action));
        }
    }
}

impl Lease {
    /// Records that this process, the owner, goes on as user `uid` with the VFIO groups and devices that it has.
    pub fn record_process(&self, uid: u32) -> Result<(), LedgerError> {
        let error = |source| LedgerError::Record { step: "find this process's VFIO devices for", source };
        if egm_address::fault!("vfio-devices-not-recorded") {
            return Ok(());
        }
        let devices = free::own_devices().map_err(error)?;
        if !self.region().kind.keeps_bytes() || (uid == self.owner().uid && devices.is_empty()) {
            return Ok(());
        }
        self.locked.change_entry(|entry| {
            entry.owner.uid = uid;
            entry.devices.extend(devices.iter().cloned());
        })
    }
}

impl LockedSlice {
    const fn place(&self) -> FileBytes<'_> {
        FileBytes { region: &self.region, space: &self.space, span: self.place }
    }

    /// Whether the slice of `backing`, a region that keeps bytes, is free of uses that the owners `last` left behind.
    pub(crate) fn verdict(
        &self,
        memory: &dyn Memory,
        backing: &dyn Backing,
        last: LastOwners,
    ) -> Result<Verdict, LedgerError> {
        let bytes = backing.offset()..backing.offset().saturating_add(backing.size());
        let Ok(file) = FileName::of(backing.file()) else { return Ok(Verdict::unknown(&bytes)) };
        Ok(memory.look(&self.ledger.question(&self.place(), file, last)?))
    }

    /// Fails if a process uses the slice that its owner returns: it is quarantined, durably where it keeps bytes.
    pub(crate) fn expect_free(&self, memory: &dyn Memory, backing: &dyn Backing) -> Result<(), GrantError> {
        let kind = &self.region.kind;
        let verdict = if kind.has_slice_files() {
            // The kernel counts descriptions and waits for references to pages, so no process is suspect for what it
            // may have.
            let is_suspect = egm_address::fault!("owner-suspect-of-any-file");
            let suspects = is_suspect.then(|| self.owner.clone()).into_iter().collect();
            free::look_at_file(backing.file(), 0..backing.size(), suspects)
        } else if kind.keeps_bytes() {
            self.verdict(memory, backing, LastOwners::only(self.owner.clone()))?
        } else if egm_address::fault!("pool-in-use-overlooked") {
            Verdict::Free
        } else {
            free::look_at_own_file(backing, &self.owner)
        };
        match verdict {
            Verdict::Free => Ok(()),
            Verdict::InUse { evidence, .. } => Err(self.quarantined(&evidence)),
        }
    }

    /// Records that the slice is quarantined because of `evidence`; returns the error that reports so.
    pub(crate) fn quarantined(&self, evidence: &[Evidence]) -> GrantError {
        // The lock ends with this process; so does a pool's account.
        let lock = if self.region.kind.keeps_bytes() { 0 } else { self.lock };
        let is_new = Cell::new(false);
        let recorded = self.change_entry(|entry| {
            is_new.set(entry.usage != GrantState::Quarantined);
            (entry.usage, entry.lock) = (GrantState::Quarantined, lock);
            entry.evidence = evidence.to_vec();
        });
        if let Err(error) = recorded {
            return error.into();
        }
        // A broker repeats this each second.
        if is_new.get() {
            self.log_quarantine(&self.slice.span().into_iter().collect(), evidence);
        }
        let (region, owner) = (self.region.name.clone(), self.owner.name.clone());
        GrantError::StillUsed { region, offset: self.slice.offset, owner, evidence: evidence.to_vec() }
    }

    /// Logs that `bytes` of the region are quarantined.
    fn log_quarantine(&self, bytes: &SpanSet<InRegion>, evidence: &[Evidence]) {
        if let Some(place) = audit::RegionBytes::of_set(&self.region.name, bytes) {
            let reason = Evidence::list(evidence);
            let finding = Finding::new(self.by.clone(), place, &reason);
            self.ledger.audit().write(&Event::Quarantine(finding));
        }
    }

    /// Records that no page of 2 MiB can map `bytes` of the slice.
    pub(crate) fn record_small_pages(&self, bytes: u64) -> Result<(), LedgerError> {
        if bytes == 0 { Ok(()) } else { self.change_entry(|entry| entry.small_pages = bytes) }
    }

    pub(super) fn change_entry(&self, step: impl Fn(&mut Entry)) -> Result<(), LedgerError> {
        self.ledger.change(|record| {
            let is_it = |entry: &&mut Entry| entry.space == self.space.name && entry.span == self.place;
            record.grants.iter_mut().filter(is_it).for_each(step);
            Ok(())
        })
    }

    /// Owners that left the dirty bytes of the slice.
    pub(crate) fn last(&self) -> LastOwners {
        let known: SpanSet<InRecordSpace> =
            self.before.iter().filter(|entry| entry.has_all_owners()).map(|entry| entry.span).collect();
        let are_all = self.space.places(&self.dirty).minus(&known).is_empty();
        LastOwners { owners: self.before.iter().flat_map(Entry::owners).collect(), are_all }
    }

    /// Gives up the slice, because `bytes` of its file are in use: they are quarantined, and the rest is as it was.
    /// Returns the bytes that need no further attempt for this request.
    pub(crate) fn quarantine(
        self,
        evidence: &[Evidence],
        bytes: &[Range<u64>],
    ) -> Result<SpanSet<InRegion>, LedgerError> {
        let place = self.place();
        let used: SpanSet<InRecordSpace> = bytes.iter().filter_map(|bytes| place.around(bytes)).collect();
        let rest = self.quarantine_places(evidence, &used)?;
        // A descriptor reaches the whole file: every other dirty slice of it would have the same answer.
        let is_mapped_only = evidence.iter().all(|evidence| evidence.hold == Hold::Mapping);
        Ok(if is_mapped_only { self.space.offsets(&used) } else { rest })
    }

    /// Gives up the slice, because of `evidence` that something uses a device or a file with `bytes` that an earlier owner had.
    pub(crate) fn quarantine_device(
        self,
        bytes: Span<InRegion>,
        evidence: &[Evidence],
    ) -> Result<(), LedgerError> {
        let used = self.space.place(bytes).and_then(|span| span.intersection(self.place));
        self.quarantine_places(evidence, &used.into_iter().collect()).map(drop)
    }

    /// Gives up the slice, of which nothing was opened: all of it is as it was.
    pub(crate) fn put_back(self) -> Result<(), LedgerError> {
        self.quarantine_places(&[], &SpanSet::default()).map(drop)
    }

    /// Quarantines `used` bytes of the slice; returns the region's dirty bytes.
    fn quarantine_places(
        &self,
        evidence: &[Evidence],
        used: &SpanSet<InRecordSpace>,
    ) -> Result<SpanSet<InRegion>, LedgerError> {
        let space = &self.space;
        let clean = SpanSet::from_iter([self.place]).minus(&space.places(&self.dirty));
        let owner = self.before.iter().find_map(Entry::owner).unwrap_or_else(unknown);
        let rest = self.ledger.change(|record| {
            let (earlier, devices) = (record.owners_of(&self.before, used), record::devices_of(&self.before));
            let is_it = |entry: &Entry| entry.space == space.name && entry.span == self.place;
            // Bytes that a GPU could reach meanwhile are not clean any more.
            if !record.grants.iter().any(|entry| is_it(entry) && entry.exposed) {
                let retired = space.places(self.region.retired.spans());
                record.add_clean(&space.name, &clean.minus(used).minus(&retired));
            }
            record.grants.retain(|entry| !is_it(entry));
            record.grants.extend(used.iter().map(|span| Entry {
                region: self.region.name.clone(),
                space: space.name.clone(),
                span,
                owner: owner.clone(),
                usage: GrantState::Quarantined,
                since: now(),
                lock: 0,
                exposed: false,
                evidence: evidence.to_vec(),
                earlier: earlier.clone(),
                devices: devices.clone(),
                small_pages: 0,
                pool: None,
            }));
            for entry in &self.before {
                let left = SpanSet::from_iter([entry.span]).minus(used);
                record.grants.extend(left.iter().map(|span| Entry { span, ..entry.clone() }));
            }
            let rest = SpanSet::from_iter([space.whole]).minus(&record.clean(&space.name));
            Ok::<_, LedgerError>(space.offsets(&rest))
        })?;
        self.log_quarantine(&space.offsets(used), evidence);
        Ok(rest)
    }
}

/// The file that all slices of `region` share, or the folder of their files.
fn device(region: &Region) -> Option<&Path> {
    match &region.kind {
        RegionKind::Fsdax { folder, .. } => Some(folder),
        RegionKind::Egm { device } | RegionKind::Reserved { device } | RegionKind::Devdax { device, .. } => {
            Some(device)
        }
        _ => None,
    }
}
