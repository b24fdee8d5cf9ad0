//! Why a candidate region is refused.

use std::io;
use std::path::PathBuf;

use egm_address::{ByteSize, Host, Span};
use serde::{Serialize, Serializer};

use crate::region::iomem::Resource;

/// A candidate region that must not be used.
#[derive(Debug, Serialize)]
pub struct Refused {
    /// Its name; a hostile one is shortened and without control characters.
    pub name: String,
    /// Why.
    pub reason: Reason,
}

impl Refused {
    pub(super) fn new(name: &str, reason: Reason) -> Self {
        Self { name: printable(name), reason }
    }
}

/// Printable form of `text`: its first 64 characters, with control characters replaced.
pub(super) fn printable(text: &str) -> String {
    text.chars().take(64).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Why a region is refused.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// A file has other content than the kernel documents.
    #[error("{} holds \"{text}\", which is not {expected}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Its content, shortened.
        text: String,
        /// The documented content.
        expected: &'static str,
    },
    /// An invalid name.
    #[error("a region's name has 1 to 32 of a-z, 0-9, \".\" and \"-\", and begins with a letter")]
    Name,
    /// Two regions of one name.
    #[error("another region has this name: rename one of the two in the host file")]
    NameTaken,
    /// A size or a base between pages.
    #[error("{what} {value:#x} is not a multiple of the page size {page}")]
    Unaligned {
        /// `size` or `base`.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The page size.
        page: ByteSize,
    },
    /// A page size that no processor has.
    #[error("page size {0} is not a power of two from 4KiB to 1GiB")]
    PageSize(ByteSize),
    /// Size 0, or past the end of the address space.
    #[error("{size:#x} bytes at {base:#x} are no memory")]
    NoSpan {
        /// First address.
        base: u64,
        /// Bytes.
        size: u64,
    },
    /// `/proc/iomem` shows nothing.
    #[error("/proc/iomem shows no addresses, so nothing tells that {0} is unused: read it as root")]
    IomemHidden(Span<Host>),
    /// The addresses are in use.
    #[error("{span} is in use, /proc/iomem says \"{line}\": name a span that the kernel does not use")]
    InUse {
        /// The region.
        span: Span<Host>,
        /// The line.
        line: Resource,
    },
    /// No command-line option keeps the kernel from the addresses.
    #[error(
        "{0} is kept from the kernel by no mem= and no memmap= of /proc/cmdline, so the firmware has it for itself: \
         see egm-device carve advise"
    )]
    Unexplained(Span<Host>),
    /// Some of the addresses are not RAM.
    #[error("not all of {0} is RAM in the firmware's memory map")]
    NotRam(Span<Host>),
    /// No map shows whether the addresses are RAM.
    #[error(
        "the firmware's memory map cannot be read here, so nothing tells that all of {0} is RAM: if you know that it is, \
         write \"trusted\": true beside it in the host file"
    )]
    Untold(Span<Host>),
    /// Another region has some of the bytes.
    #[error("{span} shares bytes with region \"{other}\": a byte has one region")]
    Overlap {
        /// The region.
        span: Span<Host>,
        /// The other's name.
        other: String,
    },
    /// A device-DAX device that programs cannot map.
    #[error("its driver is {}, and programs map memory of device_dax: daxctl reconfigure-device --mode=devdax", driver.as_deref().unwrap_or("none"))]
    Driver {
        /// The driver, where it has one.
        driver: Option<String>,
    },
    /// A folder that users other than root can reach into.
    #[error("{0} belongs to user {uid} with mode {mode:#o}: chown root {0} && chmod 700 {0}", path.display())]
    NotRoots {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// A folder of another region's file system: both would count the same free bytes.
    #[error("{} lies on the file system of region {other:?}: give each region its own", path.display())]
    SameFileSystem {
        /// The folder.
        path: PathBuf,
        /// The region that has it.
        other: String,
    },
    /// A folder of a file system that does not keep slices as they are.
    #[error("{} lies on {found}: a region needs ext4 that is mounted with \"dax\" (mount -o dax)", path.display())]
    NotFsdax {
        /// The folder.
        path: PathBuf,
        /// What its file system is.
        found: String,
    },
    /// A folder of an ext4 file system without a journal.
    #[error(
        "{} lies on ext4 without a journal, which can give two slices the same blocks after a loss of power: unmount it, \
         then tune2fs -j /dev/{device}", path.display()
    )]
    NoJournal {
        /// The folder.
        path: PathBuf,
        /// Name of its block device.
        device: String,
    },
}

/// Serializes the error's message.
impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
