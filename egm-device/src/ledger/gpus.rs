//! GPUs that reach a whole region: claims on them, and what a claim means for the region's slices.
//!
//! A claim lives while a byte of the file `gpus.lock` is locked for it, or while its owner's process runs. Free bytes of the
//! region are scrubbed before a claim begins, because the GPU can read them, and nothing of the region is recorded clean
//! until it ends, because the GPU can write them.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use egm_address::{Address, InRegion, PciAddress, Span, SpanSet};
use serde::Serialize;

use super::record::{GpuClaim, OnLine, Record};
use super::states::{Held, States};
use super::{
    GrantError, Ledger, LedgerError, Memory, Watch, claim, inode, line_of, now, store, with_retired,
};
use crate::backing::BackingError;
use crate::owner::Owner;
use crate::region::Region;
use crate::show::note;
use crate::trust::{self, Conflict, Hold, Party};

/// Bytes of the lock file for the claims on one GPU.
const SLOTS: u64 = 1 << 20;

/// A GPU that reaches a region and has a live owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeldGpu {
    /// The GPU.
    pub function: PciAddress,
    /// Its owner; `None` when the record has none for the lock.
    pub owner: Option<Owner>,
    /// Start of the claim, in seconds of 1970 by the wall clock; 0 when unknown.
    pub since: u64,
}

/// Claims on GPUs, as long as this value or a duplicate of [`GpuLease::lock`] lives.
#[derive(Debug)]
pub struct GpuLease {
    ledger: Ledger,
    claims: Vec<GpuClaim>,
    lock: File,
}

impl GpuLease {
    /// Descriptor of the lock: a process that inherits it keeps the claims.
    #[must_use]
    pub const fn lock(&self) -> &File {
        &self.lock
    }

    /// Closes the lock: the claims last as long as their owner's process, which need not have privileges any more.
    pub fn leave(mut self) {
        self.claims.clear();
    }
}

impl Drop for GpuLease {
    /// Removes the claims from the record. When that fails, they end with the owner's process.
    fn drop(&mut self) {
        if self.claims.is_empty() {
            return;
        }
        let removed = self.ledger.change(|record| {
            record.gpus.retain(|claim| !self.claims.contains(claim));
            Ok::<_, LedgerError>(())
        });
        if let Err(error) = removed {
            note(format_args!("GPU claims stay recorded until this process ends: {error}"));
        }
    }
}

/// Claims the `functions` that an operator names for `owner`, with a note for each that reaches none of `regions`.
///
/// # Errors
/// As [`Ledger::claim_gpus`].
pub(crate) fn claim_named(
    ledger: &Ledger,
    regions: &[Region],
    functions: &[PciAddress],
    owner: &Owner,
    watch: &Watch<'_>,
) -> Result<Option<GpuLease>, GrantError> {
    for gpu in functions.iter().filter(|gpu| !regions.iter().any(|region| region.functions.contains(gpu))) {
        note(format_args!("GPU {gpu} reaches no region of this host and makes none exclusive"));
    }
    ledger.claim_gpus(&ledger.memory(), regions, functions, owner, watch)
}

/// Outcome of one attempt to claim GPUs.
enum Attempt {
    Claimed(GpuLease),
    /// The GPUs would reach these free bytes of that region, which may hold an earlier owner's data.
    Dirty(Region, SpanSet<InRegion>),
}

impl Ledger {
    /// Claims those of `functions` that reach one of `regions` for `owner`, and scrubs what is free there first; `None` when
    /// none of them does.
    ///
    /// # Errors
    /// [`GrantError::Exclusive`] when an owner of another trust domain has a slice or a GPU there, and those of a scrub.
    pub fn claim_gpus(
        &self,
        memory: &Arc<dyn Memory>,
        regions: &[Region],
        functions: &[PciAddress],
        owner: &Owner,
        watch: &Watch<'_>,
    ) -> Result<Option<GpuLease>, GrantError> {
        let reached = |region: &Region| -> Vec<PciAddress> {
            functions.iter().filter(|function| region.functions.contains(function)).copied().collect()
        };
        let wanted: Vec<(&Region, Vec<PciAddress>)> = regions
            .iter()
            .map(|region| (region, reached(region)))
            .filter(|(_, gpus)| !gpus.is_empty())
            .collect();
        if wanted.is_empty() {
            return Ok(None);
        }
        let mut zeroed: Vec<String> = Vec::new();
        loop {
            let (region, dirty) = match self.try_claim(&wanted, owner, &zeroed)? {
                Attempt::Claimed(lease) => return Ok(Some(lease)),
                Attempt::Dirty(region, dirty) => (region, dirty),
            };
            match self.scrub(memory, &region, Some(&dirty), watch) {
                // Another owner came first: the next attempt decides again.
                Ok(_) | Err(GrantError::Exclusive(_)) => {}
                // The device opens once, this owner has it open, and the kernel zeroed all of it at that open.
                Err(GrantError::Backing(BackingError::Busy { .. })) if self.has_slice(&region, owner)? => {
                    zeroed.push(region.name.clone());
                }
                Err(error) => return Err(error),
            }
            if watch.cancel.load(Ordering::Relaxed) {
                return Err(GrantError::Cancelled { region: region.name });
            }
        }
    }

    fn try_claim(
        &self,
        wanted: &[(&Region, Vec<PciAddress>)],
        owner: &Owner,
        zeroed: &[String],
    ) -> Result<Attempt, GrantError> {
        self.change(|record| {
            for (region, gpus) in wanted {
                let line = line_of(region)?;
                let region = with_retired(region, &line, record);
                let held = self.held(&record.grants, &line, &self.line_file(&line)?)?;
                let live = self.live_gpus(record, &region)?;
                check(&region, owner, gpus, &held, &live)?;
                // What a GPU of the same trust domain reaches already is not news to that domain.
                if live.is_empty() && !zeroed.contains(&region.name) {
                    let clean = line.offsets(&record.clean(&line.name));
                    let dirty = States::new(&region, held, live, &clean, None).dirty;
                    if !dirty.is_empty() {
                        return Ok(Attempt::Dirty(region, dirty));
                    }
                }
            }
            let lock = self.gpu_file()?;
            let mut claims = Vec::new();
            for (region, gpus) in wanted {
                let line = line_of(region)?;
                record.remove_clean(&line.name, &SpanSet::from_iter([line.whole]));
                let here =
                    record.grants.iter_mut().filter(|e| e.line == line.name && e.span.overlaps(line.whole));
                here.for_each(|entry| entry.exposed = true);
                for function in gpus {
                    self.lock_slot(&lock, *function)?;
                    claims.push(GpuClaim {
                        function: *function,
                        region: region.name.clone(),
                        owner: owner.clone(),
                        since: now(),
                        lock: inode(&lock).map_err(|source| self.gpu_lock_error(source))?,
                    });
                }
            }
            record.gpus.extend(claims.iter().cloned());
            Ok(Attempt::Claimed(GpuLease { ledger: self.clone(), claims, lock }))
        })
    }

    /// Whether `owner` has a live slice of `region`.
    fn has_slice(&self, region: &Region, owner: &Owner) -> Result<bool, LedgerError> {
        let is_own = |held: &Held| {
            held.owner.as_ref().is_some_and(|other| (other.pid, other.started) == (owner.pid, owner.started))
        };
        Ok(self.states(region)?.held.iter().any(is_own))
    }

    /// Live GPUs that reach `region`; the claims on others of its GPUs leave the record.
    pub(crate) fn live_gpus(
        &self,
        record: &mut Record,
        region: &Region,
    ) -> Result<Vec<HeldGpu>, LedgerError> {
        if record.gpus.is_empty() && region.functions.is_empty() {
            return Ok(Vec::new());
        }
        let live = self.gpus(record, region)?;
        let lives = |claim: &GpuClaim| live.iter().any(|gpu| gpu.owner.as_ref() == Some(&claim.owner));
        record.gpus.retain(|claim| !reaches(claim, region) || lives(claim));
        Ok(live)
    }

    /// Live GPUs that reach `region`.
    pub(super) fn gpus(&self, record: &Record, region: &Region) -> Result<Vec<HeldGpu>, LedgerError> {
        let claims: Vec<&GpuClaim> = record.gpus.iter().filter(|claim| reaches(claim, region)).collect();
        if claims.is_empty() && region.functions.is_empty() {
            return Ok(Vec::new());
        }
        let file = self.gpu_file()?;
        let error = |source| self.gpu_lock_error(source);
        let mut live = Vec::new();
        let of_region = region.functions.iter().copied();
        let mut functions: Vec<PciAddress> =
            of_region.chain(claims.iter().map(|claim| claim.function)).collect();
        functions.sort_unstable();
        functions.dedup();
        for function in functions {
            let locked = !claim::held(&file, slots(function).map_err(error)?).map_err(error)?.is_empty();
            let known = claims.iter().filter(|claim| claim.function == function);
            let known: Vec<HeldGpu> = known
                .filter(|claim| locked || claim.owner.is_alive())
                .map(|claim| HeldGpu { function, owner: Some(claim.owner.clone()), since: claim.since })
                .collect();
            if locked && known.is_empty() {
                live.push(HeldGpu { function, owner: None, since: 0 });
            }
            live.extend(known);
        }
        Ok(live)
    }

    /// Forgets claims that have neither a lock nor a live owner.
    pub(super) fn forget_gpus(&self, record: &mut Record) -> Result<Vec<GpuClaim>, LedgerError> {
        let file = self.gpu_file()?;
        let error = |source| self.gpu_lock_error(source);
        let (mut live, mut forgotten) = (Vec::new(), Vec::new());
        for claim in std::mem::take(&mut record.gpus) {
            let slots = slots(claim.function).map_err(error)?;
            let lives = claim.owner.is_alive() || !claim::held(&file, slots).map_err(error)?.is_empty();
            if lives { &mut live } else { &mut forgotten }.push(claim);
        }
        record.gpus = live;
        Ok(forgotten)
    }

    fn lock_slot(&self, file: &File, function: PciAddress) -> Result<(), LedgerError> {
        let error = |source| self.gpu_lock_error(source);
        let all = slots(function).map_err(error)?;
        for slot in all.start().get()..all.end().get() {
            let byte = Span::<OnLine>::new(Address::new(slot), 1).map_err(|e| error(io::Error::other(e)))?;
            if claim::lock(file, byte).map_err(error)? {
                return Ok(());
            }
        }
        Err(error(io::ErrorKind::WouldBlock.into()))
    }

    fn gpu_file(&self) -> Result<File, LedgerError> {
        store::open(&self.gpu_path()).map_err(|source| self.gpu_lock_error(source))
    }

    fn gpu_path(&self) -> PathBuf {
        self.0.run.join("gpus.lock")
    }

    fn gpu_lock_error(&self, source: io::Error) -> LedgerError {
        LedgerError::Lock { path: self.gpu_path(), source }
    }
}

/// Decides whether `owner` may have `gpus` of `region`, or a slice when `gpus` is empty, beside what is live there.
pub(super) fn check(
    region: &Region,
    owner: &Owner,
    gpus: &[PciAddress],
    held: &[Held],
    live: &[HeldGpu],
) -> Result<(), Box<Conflict>> {
    let hold = |other: Option<&Owner>, gpu| Hold {
        party: other.map_or_else(unknown, Party::from),
        is_trusted: other.is_some_and(|other| owner.trusts(other)),
        gpu,
    };
    let gpu_holds = live.iter().map(|gpu| hold(gpu.owner.as_ref(), Some(gpu.function)));
    let slices = held.iter().map(|held| hold(held.owner.as_ref(), None));
    trust::check(&region.name, &Party::from(owner), gpus, gpu_holds.chain(slices))
}

fn unknown() -> Party {
    Party { owner: "an unknown process".to_owned(), domain: None }
}

fn reaches(claim: &GpuClaim, region: &Region) -> bool {
    claim.region == region.name || region.functions.contains(&claim.function)
}

/// The bytes of the lock file for claims on `function`.
fn slots(function: PciAddress) -> io::Result<Span<OnLine>> {
    let number =
        u64::from(function.segment()) << 16 | u64::from(function.bus()) << 8 | u64::from(function.devfn());
    Span::new(Address::new(number.saturating_mul(SLOTS)), SLOTS).map_err(io::Error::other)
}
