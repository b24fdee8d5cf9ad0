//! Guest memory that is there before the machine begins: in a snapshot, or in files of the execution before this one.

use std::io;
use std::os::fd::AsFd;

use super::saved::MemoryImage;
use super::{GuestRam, Source};
use crate::kept::{KeptFiles, KeptPart};
use crate::plan::Plan;

/// What a machine begins with.
#[derive(Clone, Copy)]
pub(crate) enum Beginning<'a> {
    /// Its kernel, in memory that is zero.
    Kernel,
    /// The memory of a snapshot.
    Snapshot(MemoryImage<'a>),
    /// Memory and open files of the execution before this one.
    Kept(&'a KeptFiles),
}

impl<'a> Beginning<'a> {
    /// Memory to copy or to map.
    pub(crate) const fn image(self) -> Option<MemoryImage<'a>> {
        match self {
            Self::Snapshot(image) => Some(image),
            Self::Kernel | Self::Kept(_) => None,
        }
    }

    /// Files that are open already.
    pub(crate) const fn kept(self) -> Option<&'a KeptFiles> {
        match self {
            Self::Kept(kept) => Some(kept),
            Self::Kernel | Self::Snapshot(_) => None,
        }
    }
}

impl GuestRam {
    /// Adds the files of its backings to `kept`, for another execution of the program. Returns the id of one that is a slice or
    /// private, if there is one.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn keep<'p>(&self, plan: &'p Plan, kept: &mut KeptFiles) -> io::Result<Option<&'p str>> {
        for (backing, source) in plan.backings.iter().zip(&self.backings) {
            let is_own = backing.region.is_none() && !backing.guest_memfd;
            let Some(Source::File(file)) = source.as_ref().filter(|_| is_own) else {
                return Ok(Some(&backing.id));
            };
            kept.add(KeptFiles::memory(&backing.id), KeptPart::of([file.file().as_fd()])?);
        }
        Ok(None)
    }
}
