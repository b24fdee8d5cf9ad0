//! GPUs that reach a whole region: claims on them, and their effect on the region's slices.
//!
//! A claim lives while a byte of the file `gpus.lock` is locked for it, while its owner's process runs, and until no
//! process has the GPU (`left_gpus.rs`). Users that may open the GPU have it without a claim (`openers.rs`). Free bytes
//! of the region are scrubbed before a claim begins, because the GPU can read them, and nothing of the region is
//! recorded clean until it ends, because the GPU can write them.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use egm_address::{Address, InRegion, PciAddress, Span, SpanSet};

use super::held::{HeldBytes, HeldGpu, unknown};
use super::openers::open_gpus;
use super::record::{GpuClaim, InRecordSpace, Record};
use super::states::States;
use super::{
    GrantError, Ledger, LedgerError, Memory, Watch, claim, inode, now, space_of, store, with_retired,
};
use crate::backing::BackingError;
use crate::owner::Owner;
use crate::policy::Policy;
use crate::region::Region;
use crate::trust::{self, Conflict, Holding, Party};

/// Bytes of the lock file for the claims on one GPU.
const SLOTS: u64 = 1 << 20;

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

    /// Closes the lock: the claims last as long as their owner's process, which becomes user `uid`, and its children.
    pub fn leave(mut self, uid: u32) -> Result<(), LedgerError> {
        let left = std::mem::take(&mut self.claims);
        self.ledger.change(|record| {
            let same = record.gpus.iter_mut().filter(|claim| left.iter().any(|left| left.is_same(claim)));
            same.for_each(|claim| claim.owner.uid = uid);
            Ok(())
        })
    }
}

impl Drop for GpuLease {
    /// Removes the claims of GPUs that no process has from the record. The others, and all if that fails, stay for a
    /// review after the owner's process has ended.
    fn drop(&mut self) {
        if self.claims.is_empty() {
            return;
        }
        if let Err(error) = self.ledger.end_claims(&self.claims) {
            tracing::info!("GPU claims stay recorded: {error}");
        }
    }
}

/// Fails for a function of `functions` that the host of `ledger` does not have.
pub(crate) fn expect_functions(
    ledger: &Ledger,
    regions: &[Region],
    functions: &[PciAddress],
) -> Result<(), GrantError> {
    let devices = ledger.0.root.join("sys/bus/pci/devices");
    let is_known = |gpu: &PciAddress| {
        regions.iter().any(|region| region.functions.contains(gpu)) || devices.join(gpu.to_string()).exists()
    };
    match functions.iter().find(|gpu| !is_known(gpu)) {
        Some(gpu) => Err(GrantError::NoFunction { function: *gpu }),
        None => Ok(()),
    }
}

/// Claims the `functions` that an operator names for `owner`, with a note for each that reaches none of `regions`.
pub(crate) fn claim_named(
    ledger: &Ledger,
    regions: &[Region],
    functions: &[PciAddress],
    owner: &Owner,
    watch: &Watch<'_>,
) -> Result<Option<GpuLease>, GrantError> {
    for gpu in functions.iter().filter(|gpu| !regions.iter().any(|region| region.functions.contains(gpu))) {
        tracing::info!("GPU {gpu} reaches no region of this host and makes none exclusive");
    }
    ledger.claim_gpus(&ledger.memory(), regions, functions, owner, watch)
}

/// Outcome of one attempt to claim GPUs.
enum ClaimAttempt {
    Claimed(GpuLease),
    /// The GPUs would reach these free bytes of that region, which may hold an earlier owner's data.
    Dirty(Region, SpanSet<InRegion>),
}

impl Ledger {
    /// Claims those of `functions` that reach one of `regions` for `owner`, and scrubs the free bytes there first;
    /// `None` when none of them does.
    ///
    /// # Errors
    /// [`GrantError::Exclusive`] if an owner of another trust domain has a slice or a GPU there, and those of a scrub.
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
        for (region, _) in &wanted {
            self.review_gpus(region)?;
        }
        let mut zeroed: Vec<String> = Vec::new();
        loop {
            let (region, dirty) = match self.try_claim(&wanted, owner, &zeroed)? {
                ClaimAttempt::Claimed(lease) => return Ok(Some(lease)),
                ClaimAttempt::Dirty(region, dirty) => (region, dirty),
            };
            match self.scrub_as(owner, memory, &region, Some(&dirty), watch) {
                // Users write there by the GPU at any time: nothing is recorded clean.
                Ok(_) if !self.open_gpus(&region).is_empty() => zeroed.push(region.name.clone()),
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
    ) -> Result<ClaimAttempt, GrantError> {
        self.change(|record| {
            for (region, gpus) in wanted {
                let space = space_of(region)?;
                let region = with_retired(region, &space, record);
                let held = self.held(&record.grants, &space, &self.lock_file(&space)?)?;
                let live = self.gpus(record, &region)?;
                check(&region, owner, gpus, &held, &live)?;
                // Memory that a GPU of the same trust domain already reaches needs no scrub for that domain.
                if live.iter().all(|gpu| gpu.open_to.is_some()) && !zeroed.contains(&region.name) {
                    let clean = space.offsets(&record.clean(&space.name));
                    let dirty = States::new(&region, held, live, &clean, None).dirty;
                    if !dirty.is_empty() {
                        return Ok(ClaimAttempt::Dirty(region, dirty));
                    }
                }
            }
            let lock = self.gpu_file()?;
            let mut claims = Vec::new();
            for (region, gpus) in wanted {
                let space = space_of(region)?;
                record.remove_clean(&space.name, &SpanSet::from_iter([space.whole]));
                let here = record
                    .grants
                    .iter_mut()
                    .filter(|e| e.space == space.name && e.span.overlaps(space.whole));
                here.for_each(|entry| entry.exposed = true);
                for function in gpus {
                    self.lock_slot(&lock, *function)?;
                    claims.push(GpuClaim {
                        function: *function,
                        region: region.name.clone(),
                        owner: owner.clone(),
                        since: now(),
                        lock: inode(&lock).map_err(|source| self.gpu_lock_error(source))?,
                        evidence: Vec::new(),
                    });
                }
            }
            record.gpus.extend(claims.iter().cloned());
            Ok(ClaimAttempt::Claimed(GpuLease { ledger: self.clone(), claims, lock }))
        })
    }

    /// Whether `owner` has a live slice of `region`.
    fn has_slice(&self, region: &Region, owner: &Owner) -> Result<bool, LedgerError> {
        let is_own = |held: &HeldBytes| {
            held.owner.as_ref().is_some_and(|other| (other.pid, other.started) == (owner.pid, owner.started))
        };
        Ok(self.states(region)?.held.iter().any(is_own))
    }

    /// GPUs of `region` that users other than root may open.
    pub(crate) fn open_gpus(&self, region: &Region) -> Vec<HeldGpu> {
        if region.functions.is_empty() {
            return Vec::new();
        }
        let root = &self.0.root;
        let policy = self.0.policy.get_or_init(|| Policy::of_host(root));
        let of = |function: &PciAddress| {
            let function = *function;
            open_gpus(root, function, policy).into_iter().map(move |open| HeldGpu::open(function, open))
        };
        region.functions.iter().flat_map(of).collect()
    }

    /// Uses `policy` instead of the host's for users that may open GPUs. No effect after the first such decision.
    #[must_use]
    pub(crate) fn trusting(self, policy: Policy) -> Self {
        let _ = self.0.policy.set(policy);
        self
    }

    /// Live GPUs that reach `region`: claims, and GPUs that users may open.
    pub(crate) fn gpus(&self, record: &Record, region: &Region) -> Result<Vec<HeldGpu>, LedgerError> {
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
            let known: Vec<HeldGpu> = known.map(|claim| HeldGpu::claimed(function, Some(claim))).collect();
            if locked && known.is_empty() {
                live.push(HeldGpu::claimed(function, None));
            }
            live.extend(known);
        }
        live.extend(self.open_gpus(region));
        Ok(live)
    }

    /// Whether a claim has no lock, and its owner has ended or left it.
    pub(super) fn is_left(&self, claim: &GpuClaim) -> Result<bool, LedgerError> {
        if claim.evidence.is_empty() && claim.owner.is_alive() {
            return Ok(false);
        }
        let error = |source| self.gpu_lock_error(source);
        let slots = slots(claim.function).map_err(error)?;
        Ok(claim::held(&self.gpu_file()?, slots).map_err(error)?.is_empty())
    }

    fn lock_slot(&self, file: &File, function: PciAddress) -> Result<(), LedgerError> {
        let error = |source| self.gpu_lock_error(source);
        let all = slots(function).map_err(error)?;
        for slot in all.start().get()..all.end().get() {
            let byte =
                Span::<InRecordSpace>::new(Address::new(slot), 1).map_err(|e| error(io::Error::other(e)))?;
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

/// Decides whether `owner` may have `gpus` of `region` (or a slice, if `gpus` is empty) beside live claims and slices.
pub(super) fn check(
    region: &Region,
    owner: &Owner,
    gpus: &[PciAddress],
    held: &[HeldBytes],
    live: &[HeldGpu],
) -> Result<(), Box<Conflict>> {
    let hold = |other: Option<&Owner>| Holding {
        party: other.map_or_else(unknown, Party::from),
        is_trusted: other.is_some_and(|other| owner.trusts(other)),
        gpu: None,
    };
    let gpu_holds = live.iter().map(|gpu| Holding {
        party: gpu.party(),
        is_trusted: gpu.is_trusted_by(owner),
        gpu: Some(gpu.function),
    });
    let slices = held.iter().map(|held| hold(held.owner.as_ref()));
    trust::check(&region.name, &Party::from(owner), gpus, gpu_holds.chain(slices))
}

fn reaches(claim: &GpuClaim, region: &Region) -> bool {
    claim.region == region.name || region.functions.contains(&claim.function)
}

/// The bytes of the lock file for claims on `function`.
fn slots(function: PciAddress) -> io::Result<Span<InRecordSpace>> {
    let number =
        u64::from(function.segment()) << 16 | u64::from(function.bus()) << 8 | u64::from(function.devfn());
    Span::new(Address::new(number.saturating_mul(SLOTS)), SLOTS).map_err(io::Error::other)
}
