//! Errors of opening a slice's memory.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::{InRegion, Span};

use super::AnonymousError;
use crate::free::Evidence;

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// Its name as the kernel has it, made printable.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.pid)
    }
}

/// A failure to open a slice's memory.
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    /// The slice is not one of the region's.
    #[error(
        "slice of \"{named}\" at {offset:#x} with {bytes:#x} bytes is none of region \"{region}\": it has {size:#x} \
         bytes, and slices are whole pages of {page:#x} bytes"
    )]
    Slice {
        /// The region.
        region: String,
        /// Its bytes.
        size: u64,
        /// Bytes in its pages.
        page: u64,
        /// The region that the slice names.
        named: String,
        /// Offset of the slice.
        offset: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// The device cannot be opened.
    #[error("region \"{region}\": cannot open {}", device.display())]
    Open {
        /// The region.
        region: String,
        /// Its device.
        device: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The device opens once, and another process has it open.
    #[error(
        "region \"{region}\": {} is open in {}: it opens once, so ask the broker for a slice (egm-device broker) or \
         end that process", device.display(), holders(.by)
    )]
    Busy {
        /// The region.
        region: String,
        /// Its device.
        device: PathBuf,
        /// Its holders, as far as this process may see.
        by: Vec<Holder>,
    },
    /// A signal ended the kernel's zeroing of a device.
    #[error("region \"{region}\": {} was being zeroed by the kernel when a signal came: open it again", device.display())]
    Interrupted {
        /// The region.
        region: String,
        /// Its device.
        device: PathBuf,
    },
    /// The caller cancelled the wait.
    #[error("region \"{region}\": gave up waiting for {}, which the kernel may still be busy with", device.display())]
    Cancelled {
        /// The region.
        region: String,
        /// Its device.
        device: PathBuf,
    },
    /// The region is of a host that is only a copy of its files.
    #[error("cannot open region \"{region}\": --root names a copy of another host")]
    OtherHost {
        /// The region.
        region: String,
    },
    /// The file is not the kind of device that the region is made of.
    #[error("region \"{region}\": its file is {found}, and must be {wanted}")]
    NotTheDevice {
        /// The region.
        region: String,
        /// Type of the file.
        found: String,
        /// Required type.
        wanted: &'static str,
    },
    /// Reserved RAM without an address.
    #[error(
        "region \"{region}\" is reserved RAM without a base address: name it in the host file (configs/host)"
    )]
    NoBase {
        /// The region.
        region: String,
    },
    /// The device of a slice cannot be created, opened or removed.
    #[error("cannot make a device of a slice of region \"{region}\"")]
    SliceDevice {
        /// The region.
        region: String,
        /// The step that failed.
        #[source]
        source: DaxError,
    },
    /// The file of a slice cannot be created, opened or removed.
    #[error("cannot use the file of a slice of region \"{region}\"")]
    SliceFile {
        /// The region.
        region: String,
        /// The step that failed.
        #[source]
        source: DaxError,
    },
    /// A file that an earlier owner left cannot be scrubbed or deleted, and stays.
    #[error(
        "cannot take {bytes} of region \"{region}\": the file of their earlier owner cannot be scrubbed and deleted"
    )]
    Leftover {
        /// The region.
        region: String,
        /// Bytes of the region that the file is.
        bytes: Span<InRegion>,
        /// The reason.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A page of a slice's new file is bad.
    #[error(
        "cannot use the file of a slice of region \"{region}\": a page of it is bad, and it is set aside"
    )]
    BadFile {
        /// The region.
        region: String,
    },
    /// Another process keeps the device or the file of earlier owners' bytes.
    #[error(
        "cannot take {bytes} of region \"{region}\": a process still uses their device or file, or pins their memory"
    )]
    InUse {
        /// Evidence of the use.
        evidence: Vec<Evidence>,
        /// The region.
        region: String,
        /// Bytes of the region that the device has.
        bytes: Span<InRegion>,
    },
    /// No hugetlb page has that size.
    #[error(
        "region \"{region}\" has pages of {page:#x} bytes: hugetlb memory is made in pages of 2 MiB or 1 GiB"
    )]
    PageSize {
        /// The region.
        region: String,
        /// Its page size in bytes.
        page: u64,
    },
    /// guest_memfd belongs to a VM, and none was named.
    #[error(
        "region \"{region}\" is guest_memfd, which belongs to a VM: a monitor opens it with its VM's descriptor"
    )]
    NeedsVm {
        /// The region.
        region: String,
    },
    /// Memory of a pool could not be made.
    #[error(transparent)]
    Anonymous(#[from] AnonymousError),
}

fn holders(by: &[Holder]) -> String {
    match by {
        [] => "a process that this user may not see".to_owned(),
        by => by.iter().map(Holder::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// A step in the life of a slice's device or file that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {}", path.display())]
pub struct DaxError {
    step: &'static str,
    path: PathBuf,
    #[source]
    pub(super) source: io::Error,
}

impl DaxError {
    pub(crate) fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { step, path, source }
    }

    /// Whether the kernel still waits for pins of the memory.
    pub(crate) fn is_timeout(&self) -> bool {
        self.source.kind() == io::ErrorKind::TimedOut
    }
}
