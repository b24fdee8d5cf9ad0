//! Errors of opening a slice's memory.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::{InRegion, Span};

use super::AnonymousError;
use crate::evidence::Evidence;
use crate::region::Region;

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Process id in this process's namespace.
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
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum BackingError {
    #[error(
        "cannot use a slice of \"{named}\" at {offset:#x} with {bytes:#x} bytes: region \"{region}\" has \
         {size:#x} bytes, and slices are whole pages of {page:#x} bytes"
    )]
    Slice { region: String, size: u64, page: u64, named: String, offset: u64, bytes: u64 },
    #[error("cannot open {} of region \"{region}\"", device.display())]
    Open {
        region: String,
        device: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The device opens once, and another process has it open.
    #[error(
        "cannot open {} of region \"{region}\": it opens once, and it is open in {}", device.display(), holders(.by)
    )]
    Busy { region: String, device: PathBuf, by: Vec<Holder> },
    #[error("cannot open {} of region \"{region}\": a signal ended the kernel's zeroing of it", device.display())]
    Interrupted { region: String, device: PathBuf },
    #[error("cannot open {} of region \"{region}\": cancelled; the kernel may still be busy with it", device.display())]
    Cancelled { region: String, device: PathBuf },
    /// The region is of a host that is only a copy of its files.
    #[error("cannot open region \"{region}\": --root names a copy of another host")]
    OtherHost { region: String },
    /// The file is not the kind of device that the region is made of.
    #[error("cannot use the file of region \"{region}\": it is {found}, and must be {wanted}")]
    NotTheDevice { region: String, found: String, wanted: &'static str },
    #[error(
        "cannot open region \"{region}\": it is reserved RAM without a base address, which the host file must name"
    )]
    NoBase { region: String },
    /// The device of a slice cannot be created, opened or removed.
    #[error("cannot make a device of a slice of region \"{region}\"")]
    SliceDevice {
        region: String,
        #[source]
        source: DaxError,
    },
    /// The file of a slice cannot be created, opened or removed.
    #[error("cannot use the file of a slice of region \"{region}\"")]
    SliceFile {
        region: String,
        #[source]
        source: DaxError,
    },
    /// A file that an earlier owner left cannot be scrubbed or deleted, and stays.
    #[error(
        "cannot take {bytes} of region \"{region}\": the file of their earlier owner cannot be scrubbed and deleted"
    )]
    Leftover {
        region: String,
        bytes: Span<InRegion>,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    #[error(
        "cannot use the file of a slice of region \"{region}\": a page of it is bad, and it is set aside"
    )]
    BadFile { region: String },
    /// Another process keeps the device or the file of earlier owners' bytes.
    #[error(
        "cannot take {bytes} of region \"{region}\": a process still uses their device or file, or pins their memory"
    )]
    InUse { evidence: Vec<Evidence>, region: String, bytes: Span<InRegion> },
    #[error(
        "cannot open region \"{region}\": its pages have {page:#x} bytes, and hugetlb pages 2 MiB or 1 GiB"
    )]
    PageSize { region: String, page: u64 },
    #[error(
        "cannot open region \"{region}\": guest_memfd belongs to a VM, so a monitor opens it with its VM's descriptor"
    )]
    NeedsVm { region: String },
    #[error(transparent)]
    Anonymous(#[from] AnonymousError),
}

impl BackingError {
    /// The error of an open of `device`, which `region` is made of.
    pub(crate) fn open(region: &Region, device: &Path, source: io::Error) -> Self {
        Self::Open { region: region.name.clone(), device: device.to_owned(), source }
    }
}

fn holders(by: &[Holder]) -> String {
    match by {
        [] => "a process that this user cannot see".to_owned(),
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
