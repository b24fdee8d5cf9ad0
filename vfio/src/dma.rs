//! What devices reach: one I/O address space, shared by the functions that are attached to it.

use std::io;
use std::sync::Arc;

use egm_address::{Io, Span};

use crate::memory::HostMemory;

/// What a device may do with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read only.
    Read,
}

/// What an I/O address space can take.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// Addresses that can be mapped, ascending and disjoint; empty when nobody says (then all can be tried).
    pub ranges: Vec<Span<Io>>,
    /// Smallest page that can be mapped, bytes.
    pub page_size: u64,
    /// Mappings that may still be made (`dma_avail`); `None` without a limit.
    pub mappings: Option<u32>,
}

/// Why a piece of memory cannot be reached by devices.
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
    /// The kernel or the server refused.
    #[error("devices cannot reach {size:#x} bytes at I/O address {iova}: cannot {what}")]
    Refused {
        /// First I/O address.
        iova: egm_address::Iova,
        /// Bytes.
        size: u64,
        /// What was tried.
        what: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// This kind of address space has no way to this kind of memory.
    #[error("devices cannot reach {size:#x} bytes at I/O address {iova}: {rule}")]
    NoWay {
        /// First I/O address.
        iova: egm_address::Iova,
        /// Bytes.
        size: u64,
        /// Why, and what would help.
        rule: &'static str,
    },
}

/// An I/O address space. All methods run on several threads at once; two maps of disjoint spans may run in parallel.
pub trait Domain: Send + Sync {
    /// What it can take.
    fn limits(&self) -> Limits;

    /// Devices reach `size` bytes of `memory` from `offset` on at `iova`; the memory is kept until [`Domain::unmap`] of
    /// the same span, or the end of the address space.
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

    /// Devices no longer reach `iova`, a span that was mapped.
    ///
    /// # Errors
    /// [`DmaError`].
    fn unmap(&self, iova: Span<Io>) -> Result<(), DmaError>;
}
