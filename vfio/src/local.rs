//! A device of this process as a function: it is used like a vfio-user device, but without a socket.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egm_address::{InBar, PciAddress, Span};
use egm_vfio_wire::message::SetIrqs;
use egm_vfio_wire::serve::Device;

use crate::backend::{Backend, BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::mapping::MadeOf;
use crate::memory::HostMemory;
use crate::parts::{KINDS, Parts, REGIONS, connected, disabled, runs};

/// Classifies a mapped part of a device, from a descriptor and the part's offset in it; the result decides how other
/// functions reach the part.
pub type MadeBy = fn(OwnedFd, u64) -> MadeOf;

/// A device of this process. Its drop calls [`Device::disconnected`].
///
/// The device handles one access of the guest at a time, as behind a socket: a slow access delays the others.
pub struct LocalFunction<D: Device> {
    device: Mutex<D>,
    parts: Parts,
    made_by: MadeBy,
}

impl<D: Device> LocalFunction<D> {
    /// Wraps `device`, named `name` in messages. `made_by` classifies the mapped parts of its files.
    ///
    /// # Errors
    /// The kernel's, for copies of its descriptors.
    pub fn new(name: String, device: D, made_by: MadeBy) -> io::Result<Self> {
        let mut parts = Parts::new(name, device.info().resettable);
        for index in 0..REGIONS {
            let (info, file) = device.region(index);
            parts.region_is(&info, file.map(|file| file.try_clone_to_owned()).transpose()?);
        }
        (0..KINDS).for_each(|index| parts.irq_is(Some(device.irq(index))));
        Ok(Self { device: Mutex::new(device), parts, made_by })
    }

    fn device(&self) -> MutexGuard<'_, D> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), BackendError> {
        let outcome = self.device().set_irqs(set, eventfds);
        outcome.map_err(|error| self.parts.refused(format!("set interrupt {}", set.index), error))
    }

    fn without(&self, what: &str) -> BackendError {
        self.parts.refused(what, io::ErrorKind::Unsupported)
    }
}

impl<D: Device + Send> Backend for LocalFunction<D> {
    fn name(&self) -> &str {
        &self.parts.name
    }

    fn region(&self, region: RegionIndex) -> &Region {
        self.parts.region(region)
    }

    fn interrupts(&self, kind: InterruptKind) -> Interrupts {
        self.parts.interrupts(kind)
    }

    fn read(&self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), BackendError> {
        self.parts.inside(region, offset, data.len()).inspect_err(|_| data.fill(0xff))?;
        self.device().read(region.number(), offset, data);
        Ok(())
    }

    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        self.parts.inside(region, offset, data.len())?;
        self.device().write(region.number(), offset, data);
        Ok(())
    }

    fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        congruent_to: u64,
    ) -> Result<Arc<dyn HostMemory>, BackendError> {
        self.parts.map(region, part, congruent_to, self.made_by)
    }

    fn connect(
        &self,
        kind: InterruptKind,
        first: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), BackendError> {
        let count = u32::try_from(triggers.len()).unwrap_or(u32::MAX);
        self.parts.has(kind, first, count, self.parts.interrupts(kind).count)?;
        for (start, run) in runs(first, triggers) {
            let eventfds = run.iter().flatten().map(|trigger| trigger.as_fd().try_clone_to_owned());
            let eventfds: io::Result<Vec<_>> = eventfds.collect();
            let eventfds = eventfds.map_err(|error| self.parts.refused("keep an eventfd", error))?;
            let count = u32::try_from(run.len()).unwrap_or(u32::MAX);
            self.set(connected(kind, start, count), eventfds)?;
        }
        Ok(())
    }

    fn connect_resample(&self, _resample: BorrowedFd<'_>) -> Result<(), BackendError> {
        Err(self.without("unmask INTx: it has none"))
    }

    fn mask_intx(&self, _masked: bool) -> Result<(), BackendError> {
        Err(self.without("mask INTx: it has none"))
    }

    fn disable(&self, kind: InterruptKind) -> Result<(), BackendError> {
        if self.parts.interrupts(kind).count == 0 { Ok(()) } else { self.set(disabled(kind), Vec::new()) }
    }

    fn can_reset(&self) -> bool {
        self.parts.resettable
    }

    fn reset(&self) -> Result<(), BackendError> {
        let outcome = self.device().reset();
        outcome.map_err(|error| self.parts.refused("reset", error))
    }

    fn reset_bus(&self) -> Result<Vec<PciAddress>, BackendError> {
        Err(self.without("reset its bus: it has none"))
    }
}

impl<D: Device> Drop for LocalFunction<D> {
    fn drop(&mut self) {
        self.device().disconnected();
    }
}
