//! The owners of a region's bytes, and which bytes are clean.
//!
//! ```text
//!            grant: place, lock, record        scrub done             Lease::return_slice
//!  free ───────────────────────────► scrubbing ─────────► granted ─────────────────────► scrubbing ──► free, clean
//!  (clean or dirty)                   (if dirty)             │ the holder ends without it
//!                                                            └──────────────────────────────────────► free, dirty
//!
//!  before a scrub: in use by a process ──► quarantined ──► free, dirty      (quarantine.rs; looked at again and again)
//! ```
//! *In use* has two sources: a lock that the kernel holds for the ledger's own processes (`claim.rs`), and the kernel's
//! view of the memory itself ([`crate::free`]), because a lock proves nothing about memory that was handed out. *Clean*
//! comes from the record ([`record`]). A slice stops being clean there, durably, before it leaves, and is clean again
//! after its scrub while still locked. No order of crashes, and no loss of the record, hands out an unscrubbed byte.

mod claim;
mod error;
mod file_bytes;
pub(crate) mod gpus;
mod grant;
mod held;
mod host_memory;
mod left_gpus;
mod locked_slice;
mod memory;
pub mod openers;
mod owners;
mod pool_slice;
mod pools;
mod quarantine;
pub mod record;
mod record_space;
mod retire;
pub(crate) mod slice_device;
pub(crate) mod slice_file;
mod states;
mod store;
mod upkeep;

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use egm_address::{InRegion, Offset, Span, SpanSet};

pub use error::{GrantError, LedgerError};
pub use gpus::GpuLease;
pub use held::{HeldBytes, HeldGpu};
pub use host_memory::HostMemory;
pub use memory::{Memory, Progress, Watch};
pub use pool_slice::PoolSlice;
pub use record::Identity;
pub use retire::{UnretireError, Unretired};
pub use states::States;
pub use store::{Disk, LedgerFile, Paths};
pub use upkeep::Repair;

pub(crate) use claim::inode;
pub(crate) use locked_slice::LockedSlice;
pub(crate) use record_space::RecordSpace;
use record_space::{no_region, space_of};

use self::record::{Doubt, Entry, GrantState, Record};
use crate::audit::{self, Actor, Log};
use crate::carve::plan::{Request, place};
use crate::policy::Policy;
use crate::region::Region;

/// Timeout for the ledger's own lock. A process holds it for milliseconds, and longer only if it was stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// The ledger of a host: a handle, cheap to clone, for any number of threads and processes.
#[derive(Clone)]
pub struct Ledger(Arc<Inner>);

struct Inner {
    disk: Box<dyn Disk>,
    run: PathBuf,
    identity: Identity,
    memory: HostMemory,
    audit: Log,
    root: PathBuf,
    policy: OnceLock<Policy>,
    /// Notes about files that cannot be cleared.
    noted: Mutex<BTreeSet<(String, Offset)>>,
}

/// The records on the disk.
struct LoadedRecord {
    record: Record,
    doubt: Option<Doubt>,
    /// Retired pages in the second record; the first has all of them.
    retired: Record,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("run", &self.0.run).field("identity", &self.0.identity).finish()
    }
}

impl Ledger {
    /// The ledger in `paths`, as seen by `identity`; folders are made where they are missing.
    ///
    /// # Errors
    /// [`LedgerError`] when a folder cannot be made.
    pub fn open(paths: Paths, identity: Identity) -> Result<Self, LedgerError> {
        let (run, root) = (paths.run.clone(), paths.root.clone());
        let audit = Log::new(audit::Paths::below(&root));
        for folder in [&paths.state, &paths.run] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .map_err(|source| LedgerError::Record { step: "make a folder for", source })?;
        }
        let (memory, disk) = (HostMemory::below(&root), Box::new(store::LedgerFolder(paths)));
        let policy = OnceLock::new();
        let noted = Mutex::default();
        Ok(Self(Arc::new(Inner { disk, run, identity, memory, audit, root, policy, noted })))
    }

    /// The ledger of the host with its files below `root`, in the current boot.
    ///
    /// # Errors
    /// [`LedgerError`] when the boot cannot be identified, or a folder cannot be made.
    pub fn of_host(root: &Path) -> Result<Self, LedgerError> {
        let error = |source| LedgerError::Record { step: "read the id of this boot for", source };
        Self::open(Paths::below(root), Identity::read(root).map_err(error)?)
    }

    /// A ledger with its record on `disk` and its locks in folder `run`. It opens no devices and has no audit log.
    #[must_use]
    pub fn with_disk(disk: Box<dyn Disk>, run: PathBuf, identity: Identity) -> Self {
        let memory = HostMemory::without_devices();
        let (audit, root, policy) = (Log::none(), PathBuf::from("/"), OnceLock::new());
        let noted = Mutex::default();
        Self(Arc::new(Inner { disk, run, identity, memory, audit, root, policy, noted }))
    }

    /// The memory that this ledger records, opened by this process: devices only where the ledger's root is `/`.
    #[must_use]
    pub fn memory(&self) -> Arc<dyn Memory> {
        Arc::new(self.0.memory)
    }

    /// The audit log of the host's slices.
    #[must_use]
    pub fn audit(&self) -> &Log {
        &self.0.audit
    }

    /// The state of every byte of `region`.
    pub fn states(&self, region: &Region) -> Result<States, LedgerError> {
        let space = space_of(region)?;
        self.review_gpus(region)?;
        let _only = self.exclusive()?;
        let LoadedRecord { record, doubt, .. } = self.read()?;
        let region = with_retired(region, &space, &record);
        let held = self.held(&record.grants, &space, &self.lock_file(&space)?)?;
        let clean = space.offsets(&record.clean(&space.name));
        let gpus = self.gpus(&record, &region)?;
        Ok(States::new(&region, held, gpus, &clean, doubt))
    }

    /// Places, locks and records a slice.
    fn take(
        &self,
        region: &Region,
        space: &RecordSpace,
        request: &Request,
        in_use: &SpanSet<InRegion>,
    ) -> Result<LockedSlice, GrantError> {
        self.change(|record| {
            let region = with_retired(region, space, record);
            let file = self.lock_file(space)?;
            let held = self.held(&record.grants, space, &file)?;
            let gpus = self.gpus(record, &region)?;
            gpus::check(&region, &request.owner, &[], &held, &gpus)?;
            let clean = record.clean(&space.name);
            let busy = held.iter().map(|held| held.span).chain(in_use.iter()).collect();
            let slice = place(&region, &busy, &space.offsets(&clean), request)
                .map_err(|short| error::in_the_way(short, request, held.clone(), in_use))?;
            let bytes = slice.span().ok_or_else(|| no_region(&region))?;
            let place = space.place(bytes).ok_or_else(|| no_region(&region))?;
            if !claim::lock(&file, place).map_err(|source| self.lock_error(space, source))? {
                // Only a process outside the ledger locks this file without the ledger's own lock.
                return Err(self.lock_error(space, io::ErrorKind::WouldBlock.into()).into());
            }
            let usable = SpanSet::from_iter([place]).minus(&space.places(region.retired.spans()));
            let keeps = region.kind.keeps_bytes() && !egm_address::fault!("dirty-recorded-clean");
            let dirty = if keeps { usable.minus(&clean) } else { SpanSet::default() };
            record.remove_clean(&space.name, &SpanSet::from_iter([place]));
            let is_held = |span: Span<InRegion>| held.iter().any(|held| held.span == span);
            let here = |entry: &Entry| space.offset(entry.span).filter(|_| entry.space == space.name);
            let before = record.cut_grants(place, |entry| !here(entry).is_none_or(is_held));
            let lock = inode(&file).map_err(|source| self.lock_error(space, source))?;
            // This process may end before it has checked whether these owners still use the bytes.
            let left: &[Entry] = if dirty.is_empty() { &[] } else { &before };
            let (earlier, devices) = (record.owners_of(left, &dirty), record::devices_of(left));
            record.grants.push(Entry {
                region: region.name.clone(),
                space: space.name.clone(),
                span: place,
                owner: request.owner.clone(),
                usage: if dirty.is_empty() { GrantState::Granted } else { GrantState::Scrubbing },
                since: now(),
                lock,
                exposed: !gpus.is_empty(),
                evidence: Vec::new(),
                earlier,
                devices,
                small_pages: 0,
                pool: None,
            });
            let (owner, by) = (request.owner.clone(), Actor::of(&request.owner));
            Ok(LockedSlice {
                ledger: self.clone(),
                region,
                space: space.clone(),
                slice,
                place,
                owner,
                by,
                claim: file,
                lock,
                before,
                dirty: space.offsets(&dirty),
            })
        })
    }

    /// Lets `step` change the record, one process at a time, and replaces the file.
    pub(crate) fn change<T, E: From<LedgerError>>(
        &self,
        step: impl FnOnce(&mut Record) -> Result<T, E>,
    ) -> Result<T, E> {
        let _only = self.exclusive()?;
        let LoadedRecord { mut record, doubt, retired } = self.read()?;
        let before = record.clone();
        let outcome = step(&mut record)?;
        let error = |source| LedgerError::Record { step: "replace", source };
        let is_new = record != before || doubt.is_some();
        if is_new {
            record.sequence = record.sequence.saturating_add(1);
        }
        // Both are encoded before either is replaced: a record that could not be read back is not written.
        let bytes = record.encode_or_forget_clean().map_err(error)?;
        if let Some(retired) = record.retired_beside(&retired) {
            let bytes = retired.encode().map_err(error)?;
            store::put(self.0.disk.as_ref(), LedgerFile::Retired, &bytes).map_err(error)?;
        }
        if is_new {
            let keep = doubt.is_some_and(|doubt| doubt != Doubt::Missing);
            store::replace(self.0.disk.as_ref(), &bytes, record.sequence, keep).map_err(error)?;
        }
        Ok(outcome)
    }

    /// The current record, as far as it is trusted.
    pub fn look(&self) -> Result<(Record, Option<Doubt>), LedgerError> {
        let _only = self.exclusive()?;
        self.read().map(|found| (found.record, found.doubt))
    }

    fn read(&self) -> Result<LoadedRecord, LedgerError> {
        let disk = self.0.disk.as_ref();
        let error = |source| LedgerError::Record { step: "read", source };
        let newest = store::newest(disk).map_err(error)?;
        let bytes = disk.read(LedgerFile::Record).map_err(error)?;
        let (mut record, doubt) = Record::judge(bytes.as_deref(), &self.0.identity, newest);
        // Only the retired pages of the second record count: they are trusted across boots.
        let bytes = disk.read(LedgerFile::Retired).map_err(error)?;
        let retired = Record::judge(bytes.as_deref(), &self.0.identity, None).0;
        record.add_retired_of(&retired);
        Ok(LoadedRecord { record, doubt, retired })
    }

    /// Waits for the ledger's own lock, which lasts as long as the file.
    fn exclusive(&self) -> Result<File, LedgerError> {
        let path = self.0.run.join("ledger.lock");
        let error = |source| LedgerError::Lock { path: path.clone(), source };
        loop {
            let file = store::open(&path).map_err(error)?;
            claim::wait(&file, LOCK_TIMEOUT).map_err(error)?;
            // Another process may have removed the file during the wait: a lock counts only under the file's name.
            if std::fs::metadata(&path).is_ok_and(|named| inode(&file).is_ok_and(|mine| mine == named.ino()))
            {
                return Ok(file);
            }
        }
    }

    /// A separate open file description of the lock file of `space`.
    fn lock_file(&self, space: &RecordSpace) -> Result<File, LedgerError> {
        store::open(&self.lock_path(space)).map_err(|source| self.lock_error(space, source))
    }

    fn lock_path(&self, space: &RecordSpace) -> PathBuf {
        self.0.run.join(format!("{}.lock", space.name))
    }

    fn lock_error(&self, space: &RecordSpace, source: io::Error) -> LedgerError {
        LedgerError::Lock { path: self.lock_path(space), source }
    }
}

fn with_retired(region: &Region, space: &RecordSpace, record: &Record) -> Region {
    let found = space.offsets(&record.retired(&space.name));
    Region { retired: region.retired.and(&found), ..region.clone() }
}

/// Seconds of 1970, for display.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
