//! Why a candidate region is refused.

use std::io;
use std::path::PathBuf;

use egm_address::{ByteSize, Host, Span};
use serde::{Serialize, Serializer};

use crate::region::iomem::Resource;

/// A candidate region that must not be used.
#[derive(Debug, Serialize)]
pub struct RefusedRegion {
    /// Its name; a hostile one is shortened and without control characters.
    pub name: String,
    /// The rule that the candidate breaks.
    pub reason: RegionRefusal,
}

impl RefusedRegion {
    pub(super) fn new(name: &str, reason: RegionRefusal) -> Self {
        Self { name: printable(name), reason }
    }
}

/// Printable form of `text`: its first 64 characters, with control characters replaced.
pub(super) fn printable(text: &str) -> String {
    text.chars().take(64).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Why a region is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum RegionRefusal {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} holds \"{text}\", which is not {expected}", path.display())]
    Content { path: PathBuf, text: String, expected: &'static str },
    #[error("a region's name has 1 to 32 of a-z, 0-9, \".\" and \"-\", and begins with a letter")]
    Name,
    #[error("another region has this name: rename one of the two in the host file")]
    NameTaken,
    #[error("{what} {value:#x} is not a multiple of the page size {page}")]
    Unaligned { what: &'static str, value: u64, page: ByteSize },
    #[error("page size {0} is not a power of two from 4KiB to 1GiB")]
    PageSize(ByteSize),
    /// Size 0, or past the end of the address space.
    #[error("{size:#x} bytes at {base:#x} are no memory")]
    NoSpan { base: u64, size: u64 },
    #[error("cannot check that {0} is unused, because /proc/iomem shows addresses to root only")]
    IomemHidden(Span<Host>),
    #[error("{span} is in use (/proc/iomem: \"{line}\"): name a span that the kernel does not use")]
    InUse { span: Span<Host>, line: Resource },
    #[error(
        "{0} is kept from the kernel by no mem= and no memmap= of /proc/cmdline, so the firmware has it for itself: \
         see egm-device carve advise"
    )]
    Unexplained(Span<Host>),
    #[error("not all of {0} is RAM in the firmware's memory map")]
    NotRam(Span<Host>),
    #[error(
        "cannot check that all of {0} is RAM, because the firmware's memory map cannot be read here: if it is RAM, \
         write \"trusted\": true beside it in the host file"
    )]
    Unconfirmed(Span<Host>),
    #[error("{span} shares bytes with region \"{other}\": a byte has one region")]
    Overlap { span: Span<Host>, other: String },
    #[error("its driver is {}, and programs map memory of device_dax: daxctl reconfigure-device --mode=devdax", driver.as_deref().unwrap_or("none"))]
    Driver { driver: Option<String> },
    /// A folder that users other than root can reach into.
    #[error("{0} belongs to user {uid} with mode {mode:#o}: chown root {0} && chmod 700 {0}", path.display())]
    NotRootOwned { path: PathBuf, uid: u32, mode: u32 },
    /// A folder of another region's file system: both would count the same free bytes.
    #[error("{} lies on the file system of region {other:?}: give each region its own", path.display())]
    SameFileSystem { path: PathBuf, other: String },
    /// A folder of a file system that does not keep slices as they are.
    #[error("{} lies on {found}: a region needs ext4 that is mounted with \"dax\" (mount -o dax)", path.display())]
    NotFsdax { path: PathBuf, found: String },
    /// A folder of an ext4 file system without a journal.
    #[error(
        "{} lies on ext4 without a journal, which can give two slices the same blocks after a loss of power: unmount it, \
         then tune2fs -j /dev/{device}", path.display()
    )]
    NoJournal { path: PathBuf, device: String },
}

/// Serializes the error's message.
impl Serialize for RegionRefusal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
