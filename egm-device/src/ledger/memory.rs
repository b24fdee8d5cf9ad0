//! The memory behind claims, as the ledger needs it: opened and zeroed.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use egm_address::{CpuSet, InRegion, Offset, SpanSet};

use super::{slice_device, slice_file};
use crate::backing::{self, Backing, BackingError, Patience, RetiredListError};
use crate::free::{self, Question, Verdict};
use crate::region::{Region, RegionKind, Slice};
use crate::retired::Retired;
use crate::scrub::{self, ScrubError, Work};
use crate::trusted;

/// Progress of a slow step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Time since the kernel began to open a device, and to zero all of it.
    Opening(Duration),
    /// Bytes are scrubbed.
    Scrubbing {
        /// Bytes that are zero.
        done: u64,
        /// Bytes in all.
        of: u64,
    },
}

/// Observer of a request for a slice, and limits of the work for it.
pub struct Watch<'a> {
    /// Called now and then, by any thread.
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Set by any thread to cancel.
    pub cancel: &'a AtomicBool,
    /// The host processors near the memory, where known.
    pub near: Option<&'a CpuSet>,
    /// In the background: bytes a second at most.
    pub pace: Option<NonZeroU64>,
}

impl Watch<'static> {
    /// No observer, and no cancellation.
    #[must_use]
    pub const fn nobody() -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self { progress: &|_| {}, cancel: &NEVER, near: None, pace: None }
    }

    /// No observer, for a look that begins what takes long, and does not wait for it.
    pub(super) const fn at_once() -> Self {
        static ALWAYS: AtomicBool = AtomicBool::new(true);
        Self { cancel: &ALWAYS, ..Self::nobody() }
    }
}

/// Access to the bytes of a slice. [`HostMemory`] opens them on the host; a broker keeps descriptors that open once.
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

    /// The bytes of `slice`, which has an owner: by another description of the same file, where the memory has several.
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

    /// The bytes of `slice`, which its owner returns, for their scrub: no process has them.
    ///
    /// # Errors
    /// [`BackingError`].
    fn renew(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.open(region, slice, watch)
    }

    /// Removes the device or the file of `slice` alone, if any. A failed removal is repeated before the next grant of
    /// these bytes.
    fn release(&self, _region: &Region, _slice: &Slice) {}

    /// Sets the file of `slice` aside, which has a bad page.
    ///
    /// # Errors
    /// [`BackingError`].
    fn set_aside(&self, _region: &Region, _slice: &Slice) -> Result<(), BackingError> {
        Ok(())
    }

    /// Whether a process uses the device or the file that an earlier owner of `slice` had of its own, or the kernel may refer to
    /// a page of that file.
    fn is_device_used(&self, _region: &Region, _slice: &Slice, _watch: &Watch<'_>) -> bool {
        false
    }

    /// The retired pages of `region` that are listed only to a process with its memory open: an EGM device's list.
    ///
    /// # Errors
    /// [`RetiredListError`]; the memory must not be used then.
    fn retired(&self, region: &Region, backing: &dyn Backing) -> Result<Retired, RetiredListError> {
        match region.kind {
            RegionKind::Egm { .. } => backing::retired_pages(backing.file(), region),
            _ => Ok(Retired::default()),
        }
    }

    /// Whether the bytes of `question` are free, by the kernel's view.
    fn look(&self, question: &Question) -> Verdict {
        free::look(question)
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

/// The memory of a ledger, opened by this process. [`Ledger::memory`](super::Ledger::memory) is the only source of one,
/// so that a device is opened only under the ledger of the host that has it.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory {
    /// Whether the ledger is this host's. A copy of another host names devices that are other memory here.
    pub(super) opens_devices: bool,
}

impl HostMemory {
    /// The memory of the host with its `/etc`, `/proc` and `/sys` below `root`: with devices where that is `/`.
    pub(super) fn below(root: &Path) -> Self {
        Self { opens_devices: trusted::is_this_host(root) || egm_address::fault!("devices-of-a-copy-opened") }
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
        if region.kind.has_slice_files() {
            slice_file::clear(self, region, slice, watch)?;
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
        if region.kind.has_slice_files() {
            return slice_file::name(region, slice, watch);
        }
        let device =
            region.kind.has_slice_devices().then(|| slice_device::reopen(region, slice)).transpose()?;
        device.flatten().map_or_else(|| self.open(region, slice, watch), Ok)
    }

    fn renew(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.check(region)?;
        if region.kind.has_slice_files() {
            return slice_file::reclaim(region, slice, watch);
        }
        self.open(region, slice, watch)
    }

    fn release(&self, region: &Region, slice: &Slice) {
        match &region.kind {
            _ if !self.opens_devices => {}
            kind if kind.has_slice_files() => slice_file::release(region, slice),
            kind if kind.has_slice_devices() && !egm_address::fault!("slice-device-not-removed") => {
                slice_device::release(region, slice);
            }
            _ => {}
        }
    }

    fn set_aside(&self, region: &Region, slice: &Slice) -> Result<(), BackingError> {
        self.check(region)?;
        slice_file::set_aside(region, slice)
    }

    fn is_device_used(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> bool {
        match &region.kind {
            kind if !kind.has_slice_devices() && !kind.has_slice_files() => false,
            _ if !self.opens_devices => true,
            kind if kind.has_slice_files() => slice_file::is_in_use(region, slice, watch),
            _ => slice_device::is_in_use(region, slice),
        }
    }
}
