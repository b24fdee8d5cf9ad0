//! The interrupts of the function: MSI-X for its guest, and two kinds for the VMM itself, as vfio-pci has them.

use std::os::fd::OwnedFd;

use egm_vfio_wire::message::{IrqData, IrqInfo, SetIrqs};
use egm_vfio_wire::serve::Vectors;
use rustix::io::Errno;

use super::registers::{Event, VECTORS};

/// `VFIO_PCI_MSIX_IRQ_INDEX` of linux/vfio.h: one vector for each [`Event`].
const MSIX: u32 = 2;
/// `VFIO_PCI_ERR_IRQ_INDEX` of linux/vfio.h: the slice is taken from a guest that has not quiesced.
const ERROR: u32 = 3;
/// `VFIO_PCI_REQ_IRQ_INDEX` of linux/vfio.h: the owner requests the slice back.
const REQUEST: u32 = 4;

/// The eventfds that a client has connected.
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
    /// Information on one kind, of a function with MSI-X or without; count 0 where it has no such vector.
    pub(super) const fn info(index: u32, msix: bool) -> IrqInfo {
        let (count, noresize) = match index {
            MSIX if msix => (VECTORS, false),
            ERROR | REQUEST => (1, true),
            _ => (0, false),
        };
        IrqInfo { index, count, eventfd: true, maskable: false, automasked: false, noresize }
    }

    /// Applies a client's request. A request eventfd that is set after the owner has asked (`wanted`) fires at once.
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

    /// Fires the event's vector.
    pub(super) fn fire(&self, event: Event) {
        self.msix.fire(event.vector());
        // A VMM that gets a device request may unplug the device: QEMU requests its release from its guest.
        if event == Event::Wanted {
            self.request.fire(0);
        }
    }

    /// Reports that the device is lost, by the error interrupt. QEMU stops its guest.
    pub(super) fn fail(&self) {
        self.error.fire(0);
    }

    /// Drops the eventfds of a client that has left.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
