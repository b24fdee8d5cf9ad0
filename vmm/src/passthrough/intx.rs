//! INTx of an assigned function: a level that the device holds until the guest's driver has served it.
//!
//! ```text
//!  device ── VFIO masks INTx ──► trigger ──► KVM raises the line
//!  device ◄─ VFIO unmasks ────── resample ◄─ KVM lowers the line at the guest's end of interrupt
//! ```
//! A device that still asserts fires again. The VMM is in neither direction.

use std::io;
use std::sync::{Arc, Mutex};

use egm_vfio::backend::{Backend, InterruptKind};
use vmm_sys_util::eventfd::EventFd;

use crate::eventfd::{self, borrowed};
use crate::lock::lock;

/// An interrupt line of the machine; KVM implements it.
pub(crate) trait InterruptLine: Send + Sync {
    /// A write to `trigger` raises the line; the guest's end of interrupt lowers it and writes `resample`.
    ///
    /// # Errors
    /// The kernel's.
    fn connect(&self, trigger: &EventFd, resample: &EventFd) -> io::Result<()>;

    /// Lowers the line, which `trigger` no longer raises.
    fn disconnect(&self, trigger: &EventFd);
}

/// Reasons why INTx is off; without any it is on.
#[derive(Debug, Default, Clone, Copy)]
struct IntxState {
    /// The guest's command register disables it.
    disabled: bool,
    /// MSI or MSI-X is on instead.
    displaced: bool,
    /// Connected on both sides.
    on: bool,
}

/// INTx of one function.
pub(super) struct Intx {
    backend: Arc<dyn Backend>,
    line: Box<dyn InterruptLine>,
    trigger: EventFd,
    resample: EventFd,
    state: Mutex<IntxState>,
}

impl Intx {
    /// INTx that is off until the first call of [`Intx::set_disabled`].
    pub(super) fn new(backend: Arc<dyn Backend>, line: Box<dyn InterruptLine>) -> io::Result<Self> {
        let (trigger, resample) = (eventfd::new()?, eventfd::new()?);
        Ok(Self { backend, line, trigger, resample, state: Mutex::default() })
    }

    /// Applies Interrupt Disable of the guest's command register.
    pub(super) fn set_disabled(&self, disabled: bool) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.disabled = disabled;
        self.update(&mut state)
    }

    /// Sets whether MSI or MSI-X is on instead.
    pub(super) fn set_displaced(&self, displaced: bool) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.displaced = displaced;
        self.update(&mut state)
    }

    fn update(&self, state: &mut IntxState) -> io::Result<()> {
        let wanted = !state.disabled && !state.displaced;
        if wanted == state.on {
            return Ok(());
        }
        if wanted {
            self.connect().inspect_err(|_| self.disconnect())?;
        } else {
            self.disconnect();
        }
        state.on = wanted;
        Ok(())
    }

    fn connect(&self) -> io::Result<()> {
        // A signal from before INTx was off is stale: a device that still asserts signals again.
        let _ = self.trigger.read();
        self.line.connect(&self.trigger, &self.resample)?;
        self.backend
            .connect(InterruptKind::Intx, 0, &[Some(borrowed(&self.trigger))])
            .map_err(io::Error::other)?;
        if egm_address::fault!("intx-not-resampled") {
            return Ok(());
        }
        self.backend.connect_resample(borrowed(&self.resample)).map_err(io::Error::other)
    }

    fn disconnect(&self) {
        // Fails for a function that is gone, which signals nothing any more.
        let _ = self.backend.disable(InterruptKind::Intx);
        if !egm_address::fault!("intx-not-deasserted") {
            self.line.disconnect(&self.trigger);
        }
    }
}
