//! Guest memory that is there before the machine begins: in a snapshot, or in files of the execution before this one.

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

/// Why a machine's memory cannot be another execution's.
pub(crate) enum Unkept {
    /// The backing of this id is a slice, or private.
    NotAFile(String),
    Descriptor(std::io::Error),
}

impl From<std::io::Error> for Unkept {
    fn from(error: std::io::Error) -> Self {
        Self::Descriptor(error)
    }
}

impl GuestRam {
    /// The files of its backings, for another execution of the program; `Err` has the id of one that has none of its own.
    ///
    /// # Errors
    /// See above; or descriptors run out.
    pub(crate) fn keep(&self, plan: &Plan, kept: &mut KeptFiles) -> Result<(), Unkept> {
        for (backing, source) in plan.backings.iter().zip(&self.backings) {
            let is_own = backing.region.is_none() && !backing.guest_memfd;
            let Some(Source::File(file)) = source.as_ref().filter(|_| is_own) else {
                return Err(Unkept::NotAFile(backing.id.clone()));
            };
            kept.add(KeptFiles::memory(&backing.id), KeptPart::of([file.file().as_fd()])?);
        }
        Ok(())
    }
}
