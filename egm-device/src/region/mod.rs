//! Regions of host memory: their sources and their properties.
//!
//! ```text
//!  /proc, /sys ──HostFacts::read──┐
//!  /sys/class/egm, /sys/bus/dax ──┼──Survey::of─► regions, and what was refused and why
//!  configs/host/*.json ──HostFile─┘
//! ```
//! Everything below the root directory may be wrong: files are read up to a limit, and a region that cannot be trusted
//! is refused by name while the others still come.

mod dax;
mod discover;
mod egm;
mod facts;
mod fsdax;
mod host_file;
pub mod iomem;
mod read;
pub(crate) use read::{number, parse_number};
mod refused;
mod reserved;
mod slice_file;
mod srat;
pub mod usage;
pub mod words;

pub use discover::Survey;
pub use facts::{HostFacts, MemoryMap, Node, Pool};
pub(crate) use facts::{meminfo, near_node};
pub(crate) use host_file::remedy;
pub use host_file::{FsdaxFolder, HostFile, HostFileError, ReservedSpan, schema as host_file_schema};
pub use refused::{RefusedRegion, RegionRefusal};
pub(crate) use slice_file::SliceFile;
pub use srat::Affinity;

use std::path::PathBuf;

use egm_address::{ByteSize, Host, Hpa, InRegion, Offset, PciAddress, Span};
use serde::{Deserialize, Serialize};

use crate::retired::Retired;

/// Source of a region's bytes. Every kind but the pools is a fixed line of host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type", deny_unknown_fields)]
pub enum RegionKind {
    /// `/dev/egmN` of the nvgrace-egm driver: invisible, opens once on some kernels, scrubbed by the first open.
    Egm {
        /// The driver's character device, `/dev/egmN`.
        device: PathBuf,
    },
    /// RAM that `mem=` or `memmap=` keeps from the kernel, reached through `/dev/mem`: invisible.
    Reserved {
        /// The file with host physical addresses as offsets: `/dev/mem`.
        device: PathBuf,
    },
    /// A device-DAX character device: struct pages, but outside the kernel's allocator.
    Devdax {
        /// The character device, `/dev/dax0.0`; the first of the region, without memory, where each slice has a device.
        device: PathBuf,
        /// The files that slices are.
        #[serde(default, skip_serializing_if = "DaxFiles::is_default")]
        files: DaxFiles,
    },
    /// A folder of a file system that maps its medium directly (fsdax): struct pages, a file per slice.
    Fsdax {
        /// The folder, which is the ledger's alone.
        folder: PathBuf,
        /// Number of its file system, major and minor, by which a later opening knows it again.
        #[serde(default)]
        device: (u32, u32),
    },
    /// The hugetlb pool of one node: a pool, its pages come zeroed.
    Hugetlb,
    /// Memory of the process, with transparent huge pages: a pool, always there.
    Memfd,
    /// Guest memory that the host can map: a pool, off the kernel's direct map where the kernel supports that.
    GuestMemfd,
}

/// The files that slices of device-DAX are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaxFiles {
    /// One file: the kernel's region is static, so it cannot be split into devices.
    #[default]
    Static,
    /// One file: the kernel could split the region, but one device has the memory.
    Whole,
    /// A file per slice: the broker creates a device for each grant, and removes it after the return.
    PerSlice,
}

impl DaxFiles {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl RegionKind {
    /// The word that configurations and policies use for it.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Egm { .. } => "egm",
            Self::Reserved { .. } => "reserved",
            Self::Devdax { .. } => "devdax",
            Self::Fsdax { .. } => "fsdax",
            Self::Hugetlb => "hugetlb",
            Self::Memfd => "memfd",
            Self::GuestMemfd => "guest-memfd",
        }
    }

    /// Whether bytes have no fixed place and come zeroed from the kernel.
    #[must_use]
    pub const fn is_pool(&self) -> bool {
        matches!(self, Self::Hugetlb | Self::Memfd | Self::GuestMemfd)
    }

    /// Whether the host kernel has no struct pages for it.
    #[must_use]
    pub const fn is_invisible(&self) -> bool {
        matches!(self, Self::Egm { .. } | Self::Reserved { .. })
    }

    /// Whether all slices are one file, so that the holder of one slice's descriptor can map the others.
    #[must_use]
    pub const fn shares_file(&self) -> bool {
        !self.is_pool() && !self.has_slice_devices() && !self.has_slice_files()
    }

    /// Whether each slice is a device of its own: [`DaxFiles::PerSlice`].
    #[must_use]
    pub const fn has_slice_devices(&self) -> bool {
        matches!(self, Self::Devdax { files: DaxFiles::PerSlice, .. })
    }

    /// Whether each slice is a file with a name, which outlives its owner.
    #[must_use]
    pub const fn has_slice_files(&self) -> bool {
        matches!(self, Self::Fsdax { .. })
    }

    /// Whether an offset is the same memory for every owner, so that a bad page has one.
    #[must_use]
    pub(crate) const fn has_places(&self) -> bool {
        self.keeps_bytes() && !self.has_slice_files()
    }

    /// Whether an earlier owner's bytes stay until they are overwritten.
    #[must_use]
    pub(crate) const fn keeps_bytes(&self) -> bool {
        !self.is_pool()
    }
}

/// Whether `name` is a valid region name: 1 to 32 of a-z, 0-9, `.` and `-`, beginning with a letter. It becomes part of
/// file names.
#[must_use]
pub fn is_name(name: &str) -> bool {
    name.len() <= 32
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' || c == '-')
}

/// Default alignment of slices of physical memory: the largest of 2 MiB, 64 KiB and 4 KiB that divides `base` and
/// `size`. IOMMUs join neighbouring pages to these sizes even where the processor maps smaller ones.
fn largest_page(base: u64, size: u64) -> Option<ByteSize> {
    let fits = |page: &u64| base.is_multiple_of(*page) && size.is_multiple_of(*page);
    [2 << 20, 64 << 10, 4 << 10].into_iter().find(fits).map(ByteSize::new)
}

/// Checks that a region is made of whole pages.
fn check_pages(base: u64, size: u64, page: ByteSize) -> Result<(), RegionRefusal> {
    for (what, value) in [("base", base), ("size", size)] {
        if !value.is_multiple_of(page.get()) {
            return Err(RegionRefusal::Unaligned { what, value, page });
        }
    }
    Ok(())
}

/// One carve-out of host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// Name: `egm4`, `dax0.0`, `hugetlb-1g-node0`, `local`, or one from a host file. Lower case, digits, `.` and `-`.
    pub name: String,
    /// Source of its bytes.
    pub kind: RegionKind,
    /// Host NUMA node, where known.
    pub node: Option<u32>,
    /// Bytes, a multiple of `page_size`.
    pub size: ByteSize,
    /// Bytes of the largest page that maps it: slices are aligned to it.
    pub page_size: ByteSize,
    /// Host physical address of its first byte, where known.
    pub base: Option<Hpa>,
    /// GPUs that reach it at link speed.
    pub functions: Vec<PciAddress>,
    /// Pages that must not be used.
    pub retired: Retired,
}

/// The part of a region that one owner has: linear, so that offset in it and offset in the region differ by a constant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// Name of the region.
    pub region: String,
    /// First byte, counted in the region.
    pub offset: u64,
    /// Bytes from first to last, retired pages included.
    pub size: ByteSize,
}

impl Slice {
    /// Its bytes, counted in the region; `None` where they are no span.
    pub(crate) fn span(&self) -> Option<Span<InRegion>> {
        Span::new(Offset::new(self.offset), self.size.get()).ok()
    }
}

impl Region {
    /// Whether `word` of a request is its name or its kind.
    #[must_use]
    pub(crate) fn is_called(&self, word: &str) -> bool {
        self.name == word || self.kind.word() == word
    }

    /// Its host physical addresses, where they are known.
    #[must_use]
    pub fn span(&self) -> Option<Span<Host>> {
        Span::new(self.base?, self.size.get()).ok()
    }
}
