//! Memory that devices reach: one I/O address space, shared by the functions that are attached to it.

mod all;
mod memlock;
mod order;

use std::io;
use std::sync::Arc;

use egm_address::{Io, Span};

use crate::memory::HostMemory;

pub use all::map_all;
pub use memlock::Memlock;
pub use order::{Piece, locked_bytes, order};

/// Access of a device to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The device reads and writes the memory.
    ReadWrite,
    /// The device only reads; its writes fault.
    Read,
}

/// Limits of an I/O address space.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// Addresses that can be mapped, ascending and disjoint; empty if unknown (then all can be tried).
    pub ranges: Vec<Span<Io>>,
    /// Smallest page that can be mapped, bytes.
    pub page_size: u64,
    /// Mappings that may still be made (`dma_avail`); `None` without a limit.
    pub mappings: Option<u32>,
}

/// Why a piece of memory cannot be reached by devices.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum DmaError {
    /// The kernel or the server refused.
    #[error("devices cannot reach {size:#x} bytes at I/O address {iova}: cannot {what}")]
    Refused {
        iova: egm_address::Iova,
        size: u64,
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// This kind of address space has no way to this kind of memory.
    #[error("devices cannot reach {size:#x} bytes at I/O address {iova}: {rule}")]
    NoWay {
        iova: egm_address::Iova,
        size: u64,
        /// Reason, and what would help.
        rule: &'static str,
    },
    /// The process may not lock so much memory.
    #[error(
        "devices need {needed:#x} more bytes of locked memory; this process may lock {limit:#x} and has locked {locked:#x}"
    )]
    Memlock {
        needed: u64,
        /// Bytes that may be locked (`RLIMIT_MEMLOCK`).
        limit: u64,
        locked: u64,
    },
    /// No range of the IOMMU has the address.
    #[error("devices cannot reach {size:#x} bytes at I/O address {iova}: the IOMMU translates {ranges} only")]
    Outside {
        iova: egm_address::Iova,
        size: u64,
        /// Ranges that it translates.
        ranges: String,
    },
    /// More maps than the address space takes.
    #[error("devices need {needed} maps of memory, and the address space takes {most} more")]
    TooMany {
        needed: usize,
        /// Maps that may still be made.
        most: u32,
    },
}

impl DmaError {
    /// Error for a refused map of `iova`: if memory is short, it names the limit on locked memory that the map exceeds.
    pub(crate) fn refused_map(iova: Span<Io>, source: io::Error) -> Self {
        let (start, size) = (iova.start(), iova.size());
        let no_memory = source.kind() == io::ErrorKind::OutOfMemory;
        let over = if no_memory { Memlock::of_process().check(size).err() } else { None };
        over.unwrap_or(Self::Refused { iova: start, size, what: "map memory", source })
    }

    /// Command or change that resolves the error, if one is known.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Memlock { needed, locked, .. } => {
                let bytes = needed.saturating_add(*locked);
                let kib = bytes.div_ceil(1024);
                Some(format!(
                    "let it lock {bytes} bytes: ulimit -l {kib}, or LimitMEMLOCK={bytes} in its systemd unit, or \
                     setcap cap_ipc_lock=ep on the program"
                ))
            }
            Self::Outside { .. } => {
                Some("move the guest's memory: \"pcie\" windows and memory sizes decide where it is; see: egm-vmm plan".to_owned())
            }
            Self::TooMany { .. } => {
                Some("raise /sys/module/vfio_iommu_type1/parameters/dma_entry_limit".to_owned())
            }
            Self::Refused { .. } | Self::NoWay { .. } => None,
        }
    }
}

/// An I/O address space. All methods run on several threads at once; two maps of disjoint spans may run in parallel.
pub trait Domain: Send + Sync {
    /// Limits of the address space.
    fn limits(&self) -> Limits;

    /// Whether `memory` may be mapped while other threads make its pages present; if not, only after that.
    fn takes_unfilled(&self, memory: &dyn HostMemory) -> bool {
        let _ = memory;
        true
    }

    /// Maps `iova` to `memory` from `offset` on, so that devices reach it; the memory is kept until [`Domain::unmap`]
    /// of the same span, or the end of the address space.
    ///
    /// # Errors
    /// [`DmaError`]; nothing is mapped then.
    fn map(
        &self,
        iova: Span<Io>,
        memory: &Arc<dyn HostMemory>,
        offset: u64,
        access: Access,
    ) -> Result<(), DmaError>;

    /// Unmaps `iova`, a span that was mapped: devices no longer reach it.
    ///
    /// # Errors
    /// [`DmaError`].
    fn unmap(&self, iova: Span<Io>) -> Result<(), DmaError>;
}
