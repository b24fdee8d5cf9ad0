//! The interrupts of an assigned function, as its guest's configuration writes set them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use egm_vfio::backend::{Backend, InterruptKind};
use egm_vfio::pci::shadow::{Effects, Msi, Shadow};

use super::intx::{InterruptLine, Intx};
use super::vectors::DeviceVectors;
use crate::pci::msix::{MsiMessage, MsiRouter, Msix};

/// All three mechanisms; a function has some of them, and one is on at a time.
pub(super) struct Interrupts {
    msix: Option<Msix>,
    msi: Option<MsiVectors>,
    intx: Option<Arc<Intx>>,
    refused: AtomicU64,
}

/// MSI, as MSI-X with its table in configuration space.
struct MsiVectors {
    source: Arc<DeviceVectors>,
    vectors: Msix,
    count: u8,
}

impl Interrupts {
    /// The mechanisms that `shadow` shows its guest, signalled by `backend`; all off.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(super) fn new(
        backend: &Arc<dyn Backend>,
        shadow: &Shadow,
        router: &Arc<dyn MsiRouter>,
        line: Option<Box<dyn InterruptLine>>,
    ) -> io::Result<Self> {
        let intx = line.map(|line| Intx::new(Arc::clone(backend), line).map(Arc::new)).transpose()?;
        let source = |kind| Arc::new(DeviceVectors::new(Arc::clone(backend), kind, intx.clone()));
        let msix = shadow.msix().map(|layout| {
            Msix::of_device(layout.vectors, Arc::clone(router), source(InterruptKind::Msix) as _)
        });
        let msi = shadow.msi_vectors().map(|count| {
            let source = source(InterruptKind::Msi);
            let vectors = Msix::of_device(count.into(), Arc::clone(router), Arc::clone(&source) as _);
            MsiVectors { source, vectors, count }
        });
        Ok(Self { msix, msi, intx, refused: AtomicU64::new(0) })
    }

    /// The structures that are in a BAR.
    pub(super) fn msix(&self) -> Option<&Msix> {
        self.msix.as_ref()
    }

    /// Sets the state after a reset: INTx is on, where the function has it.
    pub(super) fn start(&self) {
        self.set_intx_disabled(false);
    }

    /// Switches everything off, as before [`Interrupts::start`].
    pub(super) fn stop(&self) {
        self.msix.iter().chain(self.msi.iter().map(|msi| &msi.vectors)).for_each(Msix::reset);
        if !egm_address::fault!("intx-lost-after-reset") {
            self.set_intx_disabled(true);
        }
    }

    /// Applies the effects of a configuration write.
    pub(super) fn apply(&self, effects: &Effects) {
        if let Some((now, msi)) = effects.msi.zip(self.msi.as_ref()) {
            msi.set(now);
        }
        if let Some((now, msix)) = effects.msix.zip(self.msix.as_ref()) {
            msix.set_control(now.enabled, now.masked);
        }
        if let Some(disabled) = effects.intx_disabled {
            self.set_intx_disabled(disabled);
        }
    }

    fn set_intx_disabled(&self, disabled: bool) {
        if self.intx.as_ref().is_some_and(|intx| intx.set_disabled(disabled).is_err()) {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// MSI vectors that wait for their mask to go, by bit.
    pub(super) fn msi_pending(&self) -> u32 {
        let mut pending = [0; 4];
        if let Some(msi) = &self.msi {
            msi.vectors.pending_read(0, &mut pending);
        }
        u32::from_le_bytes(pending)
    }

    /// Connections that the kernel refused, which the guest sees as interrupts that do not come.
    pub(super) fn refused(&self) -> u64 {
        let messages = self.msix.iter().chain(self.msi.iter().map(|msi| &msi.vectors));
        messages.fold(self.refused.load(Ordering::Relaxed), |sum, msix| sum.saturating_add(msix.refused()))
    }
}

impl MsiVectors {
    fn set(&self, now: Msi) {
        // Another number of vectors while it is on is the guest's mistake: the device gets it by off and on.
        if self.source.set_first(now.vectors.into()) {
            self.vectors.set_control(false, false);
        }
        for number in 0..self.count {
            let message = now.vector(number);
            let message = MsiMessage { address: message.address, data: message.data };
            self.vectors.program(number.into(), message, number >= now.vectors || now.is_masked(number));
        }
        self.vectors.set_control(now.enabled, false);
    }
}
