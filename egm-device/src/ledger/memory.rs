//! The memory behind claims, as the ledger needs it: opened and zeroed.

use std::num::NonZeroU64;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use egm_address::{CpuSet, InRegion, Offset, SpanSet};

use crate::backing::{self, Backing, BackingError, Patience, RetiredListError};
use crate::region::{Region, RegionKind, Slice};
use crate::retired::Retired;
use crate::scrub::{self, ScrubError, Work};

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

    /// Whether each [`Memory::open`] has a description of its own of a file that all share. A lock on it then lasts as
    /// long as anybody maps the memory, whoever got it from the owner.
    fn is_separate(&self, region: &Region) -> bool;

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

/// The host's memory, opened by this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostMemory;

impl Memory for HostMemory {
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        let progress = |waited| (watch.progress)(Progress::Opening(waited));
        backing::open_patiently(region, slice, &Patience { progress: &progress, cancel: watch.cancel })
    }

    fn is_separate(&self, region: &Region) -> bool {
        matches!(region.kind, RegionKind::Reserved { .. } | RegionKind::Devdax { .. })
    }
}
