//! The memory behind claims, as the ledger needs it: opened and zeroed.

use std::io;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use egm_address::{Address, CpuSet, InRegion, Offset, Span, SpanSet};

use super::record::OnLine;
use super::{GrantError, LedgerError, claim, slice_device};
use crate::backing::{self, Backing, BackingError, Patience, RetiredListError};
use crate::mapped;
use crate::owner::Owner;
use crate::region::{Region, RegionKind, Slice};
use crate::retired::Retired;
use crate::scrub::{self, ScrubError, Work};
use crate::trusted;

/// What takes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The kernel opens a device, and zeroes all of it, since then.
    Opening(Duration),
    /// Bytes are scrubbed.
    Scrubbing {
        /// Bytes that are zero.
        done: u64,
        /// Bytes in all.
        of: u64,
    },
}

/// Who waits for a slice, and how hard the host works for it.
pub struct Watch<'a> {
    /// Called now and then, by any thread.
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Set by anybody to give up.
    pub cancel: &'a AtomicBool,
    /// The host processors near the memory, where known.
    pub near: Option<&'a CpuSet>,
    /// In the background: bytes a second at most.
    pub pace: Option<NonZeroU64>,
}

impl Watch<'static> {
    /// Nobody watches, and nobody gives up.
    #[must_use]
    pub const fn nobody() -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self { progress: &|_| {}, cancel: &NEVER, near: None, pace: None }
    }
}

/// How bytes of a slice are reached. The host's way is [`HostMemory`]; a broker has descriptors that open once.
pub trait Memory: Send + Sync {
    /// The bytes of `slice`.
    ///
    /// # Errors
    /// [`BackingError`].
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError>;

    /// The bytes of `slice`, which an owner has: by another description of the same file, where the memory has several.
    ///
    /// # Errors
    /// [`BackingError`].
    fn reopen(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.open(region, slice, watch)
    }

    /// Removes the device that `slice` has of its own, if it has one. What fails is repeated before the next grant of these bytes.
    fn release(&self, _region: &Region, _slice: &Slice) {}

    /// The retired pages of `region`, as far as they are told only to who has its memory open: an EGM device's list.
    ///
    /// # Errors
    /// [`RetiredListError`]; the memory must not be used then.
    fn retired(&self, region: &Region, backing: &dyn Backing) -> Result<Retired, RetiredListError> {
        match region.kind {
            RegionKind::Egm { .. } => backing::retired_pages(backing.file(), region),
            _ => Ok(Retired::default()),
        }
    }

    /// Whether any process maps `backing`, bytes of `region`, so far as no lock can tell that: an EGM device that opens once is
    /// one description to all who got it. What cannot be found out counts as mapped; of processes that may not be looked at, only
    /// `holder`, who was given the bytes, does.
    fn is_mapped(&self, region: &Region, backing: &dyn Backing, holder: Option<&Owner>) -> bool {
        let bytes = backing.offset()..backing.offset().saturating_add(backing.size());
        let is_egm = matches!(region.kind, RegionKind::Egm { .. });
        let holder = holder.filter(|owner| owner.is_alive()).map(|owner| owner.pid);
        is_egm && mapped::is_mapped(backing.file(), &bytes, holder)
    }

    /// Makes `spans` (offsets in the region) of a slice that begins at `at` zero.
    ///
    /// # Errors
    /// [`ScrubError`], with what is done.
    fn zero(
        &self,
        backing: &dyn Backing,
        at: Offset,
        spans: &SpanSet<InRegion>,
        watch: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        let of = spans.size();
        let work = Work {
            near: watch.near,
            workers: None,
            pace: watch.pace,
            progress: &|done| (watch.progress)(Progress::Scrubbing { done, of }),
            cancel: watch.cancel,
        };
        scrub::zero(backing, at, spans, &work)
    }
}

/// Locks the bytes of `slice` on the very description of the memory, where all slices have one file: the kernel keeps
/// that lock as long as anybody maps the memory, whoever got it from the owner. Returns `None` when it is had, else what
/// other descriptions have of the slice.
pub(crate) fn lock(
    region: &Region,
    backing: &dyn Backing,
    slice: &Slice,
) -> Result<Option<SpanSet<InRegion>>, LedgerError> {
    let Some(bytes) = file_bytes(region, backing, slice) else { return Ok(None) };
    if claim::lock(backing.file(), bytes).map_err(lock_error)? {
        return Ok(None);
    }
    let held = claim::held(backing.file(), bytes).map_err(lock_error)?;
    let offset = |span: Span<OnLine>| {
        let start = span.start().get().checked_sub(backing.offset())?;
        Span::new(Offset::new(start.checked_add(slice.offset)?), span.size()).ok()
    };
    Ok(Some(held.iter().filter_map(offset).collect()))
}

/// The bytes of `slice`, locked on their own description, or what other descriptions have of the region there.
pub(super) fn open_locked(
    memory: &dyn Memory,
    region: &Region,
    slice: &Slice,
    watch: &Watch<'_>,
) -> Result<Result<Box<dyn Backing>, SpanSet<InRegion>>, GrantError> {
    let backing = match memory.open(region, slice, watch) {
        Err(BackingError::InUse { bytes, .. }) => return Ok(Err([bytes].into_iter().collect())),
        opened => opened?,
    };
    let others = lock(region, backing.as_ref(), slice)?;
    Ok(others.map_or(Ok(backing), Err))
}

/// Ends what [`lock`] began, of a description that may go on: a broker has one for all slices of an EGM device.
pub(crate) fn unlock(region: &Region, backing: &dyn Backing, slice: &Slice) -> Result<(), LedgerError> {
    let bytes = file_bytes(region, backing, slice);
    bytes.map_or(Ok(()), |bytes| claim::unlock(backing.file(), bytes)).map_err(lock_error)
}

/// The slice's bytes, counted in the file that all slices of the memory share; `None` for a pool, which has none.
fn file_bytes(region: &Region, backing: &dyn Backing, slice: &Slice) -> Option<Span<OnLine>> {
    let bytes = Span::new(Address::new(backing.offset()), slice.size.get()).ok();
    bytes.filter(|_| region.kind.keeps_bytes())
}

fn lock_error(source: io::Error) -> LedgerError {
    LedgerError::Lock { path: "the memory".into(), source }
}

/// The memory of a ledger, opened by this process. [`Ledger::memory`](super::Ledger::memory) is the only source of one, so that
/// a device is opened only under the ledger of the host that has it.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory {
    /// Whether the ledger is this host's. A copy of another host names devices that are other memory here.
    opens_devices: bool,
}

impl HostMemory {
    /// The memory of the host whose `/etc`, `/proc` and `/sys` are below `root`: with devices where that is `/`.
    pub(super) fn below(root: &Path) -> Self {
        Self { opens_devices: trusted::is_this_host(root) }
    }

    /// Pools only.
    pub(crate) const fn without_devices() -> Self {
        Self { opens_devices: false }
    }
}

impl HostMemory {
    fn check(self, region: &Region) -> Result<(), BackingError> {
        if region.kind.keeps_bytes() && !self.opens_devices {
            return Err(BackingError::OtherHost { region: region.name.clone() });
        }
        Ok(())
    }
}

impl Memory for HostMemory {
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.check(region)?;
        if region.kind.has_slice_devices() {
            slice_device::revoke(region, slice)?;
        }
        let progress = |waited| (watch.progress)(Progress::Opening(waited));
        backing::open(region, slice, &Patience { progress: &progress, cancel: watch.cancel })
    }

    fn reopen(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.check(region)?;
        let device =
            region.kind.has_slice_devices().then(|| slice_device::reopen(region, slice)).transpose()?;
        device.flatten().map_or_else(|| self.open(region, slice, watch), Ok)
    }

    fn release(&self, region: &Region, slice: &Slice) {
        if region.kind.has_slice_devices() && self.opens_devices {
            slice_device::release(region, slice);
        }
    }
}
