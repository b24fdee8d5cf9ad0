//! The memory behind claims, as the ledger needs it: opened and zeroed.

use std::num::NonZeroU64;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use egm_address::{CpuSet, InRegion, Offset, SpanSet};

use crate::backing::{self, Backing, BackingError, OpenResult, RetiredListError};
use crate::free::{self, Question, Verdict};
use crate::region::{Region, RegionKind, Slice};
use crate::retired::Retired;
use crate::scrub::{self, ScrubError, ScrubOptions};

/// Progress of a slow step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Time since the kernel began to open a device, and to zero all of it.
    Opening(Duration),
    /// Bytes that a scrub made zero so far.
    Scrubbing {
        /// Number of bytes that are zero.
        done: u64,
        /// Number of bytes to scrub.
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
    pub const fn unobserved() -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self { progress: &|_| {}, cancel: &NEVER, near: None, pace: None }
    }

    /// No observer, for a look that begins what takes long, and does not wait for it.
    pub(super) const fn without_waiting() -> Self {
        static ALWAYS: AtomicBool = AtomicBool::new(true);
        Self { cancel: &ALWAYS, ..Self::unobserved() }
    }
}

/// Access to the bytes of a slice. [`HostMemory`](super::HostMemory) opens them on the host; a broker keeps descriptors that open once.
pub trait Memory: Send + Sync {
    /// The bytes of `slice`.
    fn open(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult;

    /// The bytes of `slice`, which has an owner: by another description of the same file, where the memory has several.
    fn reopen(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        self.open(region, slice, watch)
    }

    /// The bytes of `slice`, which its owner returns, for their scrub: no process has them.
    fn renew(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        self.open(region, slice, watch)
    }

    /// Removes the device or the file of `slice` alone, if any. A failed removal is repeated before the next grant of
    /// these bytes.
    fn release(&self, _region: &Region, _slice: &Slice) {}

    /// Sets the file of `slice` aside, which has a bad page.
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
        let work = ScrubOptions {
            near: watch.near,
            workers: None,
            pace: watch.pace,
            progress: &|done| (watch.progress)(Progress::Scrubbing { done, of }),
            cancel: watch.cancel,
        };
        scrub::zero(backing, at, spans, &work)
    }
}
