//! MSI and MSI-X vectors in the device: connected when the guest first opens them.
//!
//! VFIO sets up a host interrupt a vector, so all of a ConnectX's 2048 would cost each host CPU's vectors and a second of
//! start-up. Where vectors can be added while others are on (Linux 6.5, `Interrupts::dynamic`) one more is one call.
//! Elsewhere all are switched off and a power of two of them on again; each connected one is signalled once afterwards,
//! since signals of the device in between are lost: a driver bears an interrupt too many, but not one too few.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use egm_vfio::backend::{Backend, InterruptKind};
use vmm_sys_util::eventfd::EventFd;

use super::intx::Intx;
use crate::eventfd::borrowed;
use crate::lock::lock;
use crate::pci::msix::VectorSource;

/// The device's side of one mechanism.
pub(super) struct DeviceVectors {
    backend: Arc<dyn Backend>,
    kind: InterruptKind,
    intx: Option<Arc<Intx>>,
    /// Vectors that the device is to use from the start.
    first: AtomicU32,
    state: Mutex<VectorState>,
}

#[derive(Default)]
struct VectorState {
    /// Vectors that VFIO has set up.
    enabled: u32,
    /// Eventfd of each vector that the guest has opened.
    triggers: Vec<Option<Arc<EventFd>>>,
}

impl DeviceVectors {
    pub(super) fn new(backend: Arc<dyn Backend>, kind: InterruptKind, intx: Option<Arc<Intx>>) -> Self {
        Self { backend, kind, intx, first: AtomicU32::new(1), state: Mutex::default() }
    }

    /// Sets the number of vectors for when the mechanism is next switched on; returns whether it changed. MSI needs all
    /// at once: their number decides which bits of the message the device changes (PCI Express Base 6.0 §7.7.1.2).
    pub(super) fn set_first(&self, vectors: u32) -> bool {
        self.first.swap(vectors.max(1), Ordering::Relaxed) != vectors.max(1)
    }

    fn connect(&self, first: u32, triggers: &[Option<Arc<EventFd>>]) -> io::Result<()> {
        let fds: Vec<Option<BorrowedFd<'_>>> =
            triggers.iter().map(|trigger| trigger.as_ref().map(|trigger| borrowed(trigger))).collect();
        self.backend.connect(self.kind, first, &fds).map_err(io::Error::other)
    }

    /// Switches `vectors` vectors on in place of those that are.
    fn enable(&self, state: &mut VectorState, vectors: u32) -> io::Result<()> {
        if state.enabled > 0 {
            self.backend.disable(self.kind).map_err(io::Error::other)?;
            state.enabled = 0;
        }
        state.triggers.resize(usize::try_from(vectors).map_err(io::Error::other)?, None);
        self.connect(0, &state.triggers)?;
        state.enabled = vectors;
        Ok(())
    }

    /// Enables enough vectors for `vector`, or leaves the enabled ones as they were.
    fn grow(&self, state: &mut VectorState, vector: u32) -> io::Result<()> {
        let (before, count) = (state.enabled, self.backend.interrupts(self.kind).count);
        let wanted = vector.saturating_add(1);
        if wanted > count {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let grown = self.enable(state, wanted.next_power_of_two().min(count));
        let grown = grown.or_else(|error| self.enable(state, before.max(1)).and(Err(error)));
        state.triggers.iter().flatten().for_each(|trigger| drop(trigger.write(1)));
        grown
    }
}

impl VectorSource for DeviceVectors {
    fn start(&self) -> io::Result<()> {
        self.intx.as_ref().map_or(Ok(()), |intx| intx.set_displaced(true))?;
        // Firmware of some devices checks whether messages are on: they are from now, with no vector open yet.
        let mut state = lock(&self.state);
        self.enable(&mut state, self.first.load(Ordering::Relaxed))
    }

    fn supply(&self, vector: u16, trigger: &Arc<EventFd>) -> io::Result<()> {
        let (mut state, number) = (lock(&self.state), u32::from(vector));
        if number >= state.enabled && !self.backend.interrupts(self.kind).dynamic {
            self.grow(&mut state, number)?;
        }
        self.connect(number, &[Some(Arc::clone(trigger))])?;
        let index = usize::from(vector);
        if state.triggers.len() <= index {
            state.triggers.resize(index.saturating_add(1), None);
        }
        if let Some(place) = state.triggers.get_mut(index) {
            *place = Some(Arc::clone(trigger));
        }
        Ok(())
    }

    fn stop(&self) {
        let mut state = lock(&self.state);
        *state = VectorState::default();
        // Both fail for a function that is gone, which signals nothing any more.
        let _ = self.backend.disable(self.kind);
        let _ = self.intx.as_ref().map(|intx| intx.set_displaced(false));
    }
}
