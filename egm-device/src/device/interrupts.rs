//! The interrupts of the function: MSI-X for its guest, and the two kinds that a VMM hears of itself, as vfio-pci has them.

use std::os::fd::OwnedFd;

use egm_vfio_wire::message::{IrqData, IrqInfo, SetIrqs};
use egm_vfio_wire::serve::Vectors;
use rustix::io::Errno;

use super::registers::{Event, VECTORS};

/// `VFIO_PCI_MSIX_IRQ_INDEX`.
const MSIX: u32 = 2;
/// `VFIO_PCI_ERR_IRQ_INDEX`.
const ERROR: u32 = 3;
/// `VFIO_PCI_REQ_IRQ_INDEX`.
const REQUEST: u32 = 4;

/// What a client has connected.
#[derive(Debug)]
pub(super) struct Interrupts {
    msix: Vectors,
    error: Vectors,
    request: Vectors,
}

impl Default for Interrupts {
    fn default() -> Self {
        Self { msix: Vectors::new(VECTORS), error: Vectors::new(1), request: Vectors::new(1) }
    }
}

impl Interrupts {
    /// A kind of them, of a function with MSI-X or without. Who has no vector of a kind is told so by a count of 0.
    pub(super) const fn info(index: u32, msix: bool) -> IrqInfo {
        let (count, noresize) = match index {
            MSIX if msix => (VECTORS, false),
            ERROR | REQUEST => (1, true),
            _ => (0, false),
        };
        IrqInfo { index, count, eventfd: true, maskable: false, automasked: false, noresize }
    }

    /// Does what a client asks for. One that comes after the owner has asked hears of it (`wanted`).
    ///
    /// # Errors
    /// As [`Vectors::set`].
    pub(super) fn set(
        &mut self,
        set: SetIrqs<'_>,
        eventfds: Vec<OwnedFd>,
        wanted: bool,
    ) -> Result<(), Errno> {
        match set.index {
            MSIX => self.msix.set(set, eventfds),
            ERROR => self.error.set(set, eventfds),
            REQUEST => {
                self.request.set(set, eventfds)?;
                if wanted && set.data == IrqData::Eventfd {
                    self.request.fire(0);
                }
                Ok(())
            }
            // Switching off a kind that there is none of is no mistake.
            _ => Ok(()),
        }
    }

    /// The guest is told.
    pub(super) fn fire(&self, event: Event) {
        self.msix.fire(event.vector());
        // A VMM that is asked for a device may unplug it: QEMU asks its guest to let it go.
        if event == Event::Wanted {
            self.request.fire(0);
        }
    }

    /// The device is lost for who still uses it. QEMU stops its guest.
    pub(super) fn fail(&self) {
        self.error.fire(0);
    }

    /// The client is gone.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
