//! A PCI function as a driver in user space sees it, wherever it lives: the host's kernel, a vfio-user server, a test.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use egm_address::{InBar, PciAddress, Span};

use crate::memory::HostMemory;

/// A region of a function; the numbers are those of VFIO (`VFIO_PCI_*_REGION_INDEX`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegionIndex {
    /// Base address register 0 to 5.
    Bar(u8),
    /// Expansion ROM, number 6 (`VFIO_PCI_ROM_REGION_INDEX`).
    Rom,
    /// Configuration space, number 7 (`VFIO_PCI_CONFIG_REGION_INDEX`).
    Config,
}

impl RegionIndex {
    /// Number of the region in linux/vfio.h.
    pub const fn number(self) -> u32 {
        match self {
            Self::Bar(index) => index as u32,
            Self::Rom => 6,
            Self::Config => 7,
        }
    }
}

/// Properties of a region.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Region {
    /// Bytes; 0 when the function has no such region. Not always a power of two (variant drivers, vfio-user).
    pub size: u64,
    /// Whether it can be read.
    pub readable: bool,
    /// Whether it can be written.
    pub writable: bool,
    /// Mappable spans, ascending and disjoint, inside the region, aligned to host pages; empty if there are none.
    pub mappable: Vec<Span<InBar>>,
    /// Whether the page of the MSI-X table may be mapped too (`VFIO_REGION_INFO_CAP_MSIX_MAPPABLE`).
    pub msix_mappable: bool,
}

impl Region {
    /// A region that the function does not have.
    pub const NONE: &Self =
        &Self { size: 0, readable: false, writable: false, mappable: Vec::new(), msix_mappable: false };
}

/// An interrupt mechanism; the numbers are those of VFIO (`VFIO_PCI_*_IRQ_INDEX`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InterruptKind {
    /// INTx, level triggered: masked by the backend when it fires, until it is unmasked or its resample descriptor is
    /// written.
    Intx,
    /// MSI: up to 32 vectors, each a message that the function writes.
    Msi,
    /// MSI-X: up to 2048 vectors, each with a message of its own.
    Msix,
    /// The function reported an uncorrectable error, or is gone.
    Error,
    /// The host requests the function back.
    Request,
}

impl InterruptKind {
    /// Number of the mechanism in linux/vfio.h.
    pub const fn number(self) -> u32 {
        match self {
            Self::Intx => 0,
            Self::Msi => 1,
            Self::Msix => 2,
            Self::Error => 3,
            Self::Request => 4,
        }
    }
}

/// Capabilities of an interrupt mechanism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interrupts {
    /// Vectors; 0 when the function has none of this kind.
    pub count: u32,
    /// Whether vectors can be added while others are enabled (no `VFIO_IRQ_INFO_NORESIZE`).
    pub dynamic: bool,
}

/// Why a request to a function failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum BackendError {
    /// The kernel or the server refused.
    #[error("{function}: cannot {what}")]
    Refused {
        /// Name of the function.
        function: String,
        /// Failed operation: `map BAR 2`, `reset`.
        what: String,
        #[source]
        source: io::Error,
    },
    /// The function does not have what was requested.
    #[error("{function} has no {what}")]
    Absent {
        /// Name of the function.
        function: String,
        /// Missing part: `BAR 3`, `byte 0x1000 of BAR 0`, `MSI-X`.
        what: String,
    },
    /// The function, or its server, is gone.
    #[error("{function} is gone: {why}")]
    Gone {
        /// Name of the function.
        function: String,
        /// How that was detected.
        why: String,
    },
}

/// A function's registers, memory and interrupts. All methods run on several threads at once.
///
/// Not included: DMA (see [`crate::dma::Domain`]), the guest's view of it, and its address on the host.
pub trait Backend: Send + Sync {
    /// Name for messages: `0000:65:00.0`, `/run/gpu.sock`.
    fn name(&self) -> &str;

    /// Properties of `region`; size 0 if the function has none.
    fn region(&self, region: RegionIndex) -> &Region;

    /// Capabilities of `kind`; count 0 if the function has none.
    fn interrupts(&self, kind: InterruptKind) -> Interrupts;

    /// Reads `data.len()` bytes; on an error `data` is all ones, which is what a function that is gone answers.
    ///
    /// # Errors
    /// [`BackendError`].
    fn read(&self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), BackendError>;

    /// Writes `data`.
    ///
    /// # Errors
    /// [`BackendError`].
    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError>;

    /// Maps `part` of `region`, which must lie in one of its mappable spans, at an address congruent to `congruent_to`
    /// (the guest physical address) modulo the largest page that fits, so that huge mappings survive.
    ///
    /// # Errors
    /// [`BackendError`].
    fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        congruent_to: u64,
    ) -> Result<Arc<dyn HostMemory>, BackendError>;

    /// From now on vector `first + i` writes `triggers[i]`; `None` disconnects that vector. The first call for a kind
    /// enables it. One kind of INTx, MSI and MSI-X is enabled at a time: disable it before another.
    ///
    /// # Errors
    /// [`BackendError`].
    fn connect(
        &self,
        kind: InterruptKind,
        first: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), BackendError>;

    /// A write to `resample` unmasks INTx, and raises it again if it is still asserted.
    ///
    /// # Errors
    /// [`BackendError`].
    fn connect_resample(&self, resample: BorrowedFd<'_>) -> Result<(), BackendError>;

    /// Masks or unmasks INTx.
    ///
    /// # Errors
    /// [`BackendError`].
    fn mask_intx(&self, masked: bool) -> Result<(), BackendError>;

    /// Disables `kind`; nothing happens when it is not enabled.
    ///
    /// # Errors
    /// [`BackendError`].
    fn disable(&self, kind: InterruptKind) -> Result<(), BackendError>;

    /// Whether [`Backend::reset`] can do anything.
    fn can_reset(&self) -> bool;

    /// Function-level reset, or the next best that affects this function alone.
    ///
    /// # Errors
    /// [`BackendError`], also when the kernel has no way.
    fn reset(&self) -> Result<(), BackendError>;

    /// Resets its bus or slot, and with it every function there, for a function without a reset of its own. Only while
    /// none of them is used. Returns the functions that were reset, this one among them.
    ///
    /// # Errors
    /// [`BackendError`]; nothing is reset where one of them is not ours, or where there is no bus to reset.
    fn reset_bus(&self) -> Result<Vec<PciAddress>, BackendError>;

    /// Resets the bus or slot that it is on, with the functions there, which `consent` names.
    ///
    /// # Errors
    /// [`BackendError`]; nothing is reset without the consent of all.
    fn reset_with(&self, _consent: &[PciAddress]) -> Result<(), BackendError> {
        Err(BackendError::Absent { function: self.name().to_owned(), what: "bus to reset".to_owned() })
    }
}
