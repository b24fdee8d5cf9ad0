//! Errors of guest memory.

use std::io;

use egm_address::Gpa;
use egm_device::{AnonymousError, GuestMemfdError, HugeFilesError, MappingError, PrefaultError};

use crate::error::{Blame, Remedy, Report};
use crate::snapshot::Mismatch;

/// Why guest memory is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A backing could not be made.
    #[error("cannot get guest memory")]
    Backing(#[from] AnonymousError),
    /// The machine has no memory of its own.
    #[error("cannot get memory that is the machine's own")]
    GuestMemfd(#[from] GuestMemfdError),
    /// No tmpfs with huge pages.
    #[error("cannot get guest memory in huge pages")]
    HugeFiles(#[from] HugeFilesError),
    /// A backing could not be mapped.
    #[error("cannot map guest memory \"{id}\"")]
    Mapping {
        id: String,
        #[source]
        source: MappingError,
    },
    /// Not all memory could be touched.
    #[error("cannot make guest memory \"{id}\" present")]
    Prefault {
        id: String,
        #[source]
        source: PrefaultError,
    },
    /// No descriptor for a piece of memory.
    #[error("cannot open guest memory at {at:#x} once more")]
    Descriptor {
        at: Gpa,
        #[source]
        source: io::Error,
    },
    /// The file of a snapshot.
    #[error("cannot read guest memory from the snapshot")]
    Image {
        #[source]
        source: io::Error,
    },
    /// The snapshot of another machine.
    #[error("the snapshot does not fit the machine: {0}")]
    Mismatch(#[from] Mismatch),
    /// The plan contradicts itself.
    #[error("guest memory at {at:#x} contradicts itself: {what}")]
    Plan { at: Gpa, what: String },
}

impl Report for MemoryError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Backing(AnonymousError::Pool { missing, page, .. }) => Blame::Host.help(format!(
                "raise /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages by {missing}, or set \
                 \"memory\": {{ \"page_size\": \"auto\" }}",
                page >> 10
            )),
            Self::Backing(_) => Blame::Host.into(),
            Self::HugeFiles(_) => Blame::Host.help("set \"memory\": { \"page_size\": \"4K\" }"),
            Self::GuestMemfd(_) => Blame::Host.help("give \"region\" a list that ends in \"local\""),
            Self::Mapping { .. } | Self::Prefault { .. } => {
                Blame::Host.help("lower \"memory\".\"size\", or free memory on the host (free -h)")
            }
            Self::Descriptor { .. } => Blame::Host.help("raise the limit of open files: ulimit -n 65536"),
            Self::Image { .. } => Blame::Host.help("look for what is wrong with the storage below it: dmesg"),
            Self::Mismatch(_) => Blame::Host.help("restore it on the host where it was written"),
            Self::Plan { .. } => Blame::Internal.into(),
        }
    }
}
