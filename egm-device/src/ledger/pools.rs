//! Memory of pools that clients of an earlier broker may still have: on its owner's account until it is in no process.
//!
//! A pool's slice is a file of its own. Only the broker that granted it has a descriptor that shows whether the file is in
//! use. So the record names the file before the slice leaves the broker. An entry without a lock was left behind by a
//! broker that has ended: it keeps its part of the pool until the kernel shows that the file is gone.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use egm_address::SpanSet;

use super::pool_slice::PoolSlice;
use super::record::{Entry, GrantState, InRecordSpace};
use super::{Ledger, LedgerError, RecordSpace, claim, space_of};
use crate::audit::{Actor, Event, Finding, RegionBytes};
use crate::free::{self, Evidence, MemoryFile, Verdict};
use crate::lease::Lease;
use crate::policy::{Charge, OrphanedSlice};
use crate::region::Region;

impl Entry {
    /// Whether this is a slice of a pool without a lock: its broker has ended, or its lock file was removed. `locked`
    /// bytes of its space have an owner.
    pub(super) fn is_orphaned(&self, locked: &SpanSet<InRecordSpace>) -> bool {
        let is_unlocked = || SpanSet::from_iter([self.span]).minus(locked).size() == self.span.size();
        self.pool.is_some() && (self.is_quarantined() || is_unlocked())
    }
}

impl Lease {
    /// Records the file of a pool's slice and its account, for the broker after this one.
    ///
    /// # Errors
    /// [`LedgerError`]; the slice must not leave this process.
    pub(crate) fn charge(&self, charge: &Charge) -> Result<(), LedgerError> {
        if self.region().kind.keeps_bytes() || egm_address::fault!("pool-account-forgotten") {
            return Ok(());
        }
        let error = |source| LedgerError::Record { step: "find the memory file for", source };
        let file = MemoryFile::of(crate::backing::Backing::file(self)).map_err(error)?;
        let pool = PoolSlice { file, charge: charge.clone() };
        self.locked.change_entry(|entry| entry.pool = Some(pool.clone()))
    }
}

/// Slices of pools that clients of ended brokers may still have.
pub(crate) struct OrphanedSlices {
    pub(crate) slices: Vec<OrphanedSlice>,
    /// Whether there may be others, because a record of this boot was lost.
    pub(crate) was_lost: bool,
}

impl Ledger {
    /// Slices of pools among `regions` that clients of ended brokers may still have.
    pub(crate) fn orphaned_slices(&self, regions: &[Region]) -> Result<OrphanedSlices, LedgerError> {
        let (record, _) = self.look()?;
        let mut slices = Vec::new();
        for region in regions.iter().filter(|region| region.kind.is_pool()) {
            for entry in self.orphaned(&record.grants, &space_of(region)?)? {
                let (region, uid, bytes) = (region.name.clone(), entry.owner.uid, entry.span.size());
                let charge = entry.pool.map(|pool| pool.charge);
                slices.extend(charge.map(|charge| OrphanedSlice { region, uid, charge, bytes }));
            }
        }
        Ok(OrphanedSlices { slices, was_lost: record.was_lost })
    }

    /// Entries of `space` that were left behind.
    fn orphaned(&self, grants: &[Entry], space: &RecordSpace) -> Result<Vec<Entry>, LedgerError> {
        let here = grants.iter().filter(|entry| entry.space == space.name && entry.pool.is_some());
        let (file, error) = (self.lock_file(space)?, |source| self.lock_error(space, source));
        let mut left = Vec::new();
        for entry in here {
            // Entry by entry: the region may be smaller than before.
            let locked = claim::held(&file, entry.span).map_err(error)?;
            left.extend(entry.is_orphaned(&locked).then(|| entry.clone()));
        }
        Ok(left)
    }

    /// Looks at the slices of the pool `region` that were left behind; returns the entries of memory that is in no process now.
    pub(super) fn review_orphaned(&self, region: &Region) -> Result<Vec<Entry>, LedgerError> {
        let space = space_of(region)?;
        let left = self.orphaned(&self.look()?.0.grants, &space)?;
        let file = |entry: &Entry| Some((entry.pool.as_ref()?.file.clone(), entry.owner.clone()));
        let files: Vec<_> = left.iter().filter_map(file).collect();
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let verdicts = free::look_at_nameless(&files);
        let start = |entry: &Entry| entry.span.start();
        let answers = left.iter().zip(&verdicts);
        let answers: BTreeMap<_, _> = answers.map(|answer| (start(answer.0), answer)).collect();
        self.change(|record| {
            // Another process may have looked at the same time.
            let still: BTreeSet<_> = self.orphaned(&record.grants, &space)?.iter().map(start).collect();
            let verdict = |entry: &Entry| {
                let (was, verdict) = answers.get(&start(entry))?;
                (*was == entry && still.contains(&start(entry))).then_some(*verdict)
            };
            record.grants.retain(|entry| verdict(entry) != Some(&Verdict::Free));
            for entry in &mut record.grants {
                if let Some(Verdict::InUse { evidence, .. }) = verdict(entry) {
                    entry.quarantine(evidence);
                }
            }
            Ok::<_, LedgerError>(())
        })?;
        let mut freed = Vec::new();
        for (entry, verdict) in left.into_iter().zip(verdicts) {
            match verdict {
                Verdict::InUse { evidence, .. } if entry.usage != GrantState::Quarantined => {
                    self.log_orphaned(region, &space, &entry, &evidence);
                }
                Verdict::InUse { .. } => {}
                Verdict::Free => {
                    if entry.usage == GrantState::Quarantined {
                        self.log_release(region, &space, &entry);
                    }
                    freed.push(entry);
                }
            }
        }
        Ok(freed)
    }

    /// Logs that a slice is in use although its broker has ended.
    fn log_orphaned(&self, region: &Region, space: &RecordSpace, entry: &Entry, evidence: &[Evidence]) {
        if let Some(bytes) = space.offset(entry.span) {
            let reason = Evidence::list(evidence);
            let place = RegionBytes::of(&region.name, bytes);
            let finding = Finding::new(Actor::of(&entry.owner), place, &reason);
            self.audit().write(&Event::Quarantine(finding));
        }
    }
}

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;

    use super::*;
    use crate::backing::tests::region;
    use crate::carve::plan::Request;
    use crate::ledger::{Identity, Paths, Watch};
    use crate::owner::Owner;
    use crate::region::RegionKind;

    const PAGE: u64 = 4096;

    /// The memory of a slice that was charged and handed out by a broker that has ended.
    fn leave(ledger: &Ledger, region: &Region, pages: u64) -> std::fs::File {
        // The owner is no user of this host: whatever other tests keep in flight is not its own.
        let owner = Owner { uid: 4_000_000, pid: 0, started: 0, ..Owner::this("vm") };
        let request = Request::new(pages * PAGE, owner);
        let lease = ledger.grant_from(&ledger.memory(), region, &request, &Watch::unobserved()).unwrap();
        let charge = Charge { gid: Some(7), class: Some("train".to_owned()) };
        assert!(orphaned(ledger, region).is_empty());
        lease.charge(&charge).unwrap();
        assert!(orphaned(ledger, region).is_empty(), "this process has it locked");
        lease.hand_out().unwrap()
    }

    fn orphaned(ledger: &Ledger, region: &Region) -> Vec<OrphanedSlice> {
        ledger.orphaned_slices(std::slice::from_ref(region)).unwrap().slices
    }

    #[test]
    fn a_slice_of_an_ended_broker_is_left_as_long_as_its_memory_exists() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root opens files by their handles");
        }
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
        let ledger = Ledger::open(Paths::below(folder.path()), identity.clone()).unwrap();
        let pool = region(RegionKind::Memfd, 4 * PAGE, PAGE);
        let memory = leave(&ledger, &pool, 3);
        let charge = Charge { gid: Some(7), class: Some("train".to_owned()) };
        let expected = [OrphanedSlice { region: "r".into(), uid: 4_000_000, charge, bytes: 3 * PAGE }];
        assert_eq!(orphaned(&ledger, &pool), expected);
        assert_eq!(ledger.states(&pool).unwrap().held[0].usage, GrantState::Quarantined, "kept from others");
        // It counts in a smaller pool, too, and where the folder of locks was removed.
        let smaller = Region { size: ByteSize::new(PAGE), ..pool.clone() };
        assert_eq!(orphaned(&ledger, &smaller), expected);
        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
        assert_eq!(orphaned(&ledger, &pool), expected);
        for _ in 0..2 {
            assert!(ledger.review(&pool).unwrap().is_empty());
            assert_eq!(orphaned(&ledger, &pool), expected);
        }
        drop(memory);
        assert_eq!(ledger.review(&pool).unwrap().len(), 1);
        assert!(orphaned(&ledger, &pool).is_empty() && ledger.states(&pool).unwrap().held.is_empty());
        let request = Request::new(4 * PAGE, Owner::this("next"));
        assert!(ledger.grant_from(&ledger.memory(), &pool, &request, &Watch::unobserved()).is_ok());
    }
}
