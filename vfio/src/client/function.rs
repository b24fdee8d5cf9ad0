//! Registers, memory and interrupts of a vfio-user device.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use egm_address::{InBar, PciAddress, Span};
use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::message::{IrqAction, IrqData, RegionInfo, SetIrqs};
use rustix::fs::{FileType, fstat};

use super::{Link, OpenError};
use crate::backend::{Backend, BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::host::{HostBar, HostBarKind};
use crate::mapping::MadeOf;
use crate::memory::HostMemory;
use crate::parts::{KINDS, Parts, REGIONS, connected, disabled, runs};

/// A function behind a vfio-user server.
pub struct UserFunction {
    link: Arc<Link>,
    parts: Parts,
}

/// Queries the server for all regions and interrupts of its device.
pub(super) fn describe(name: &str, client: &mut Client) -> Result<Parts, OpenError> {
    let talk = |source| OpenError::Talk { path: name.to_owned(), source };
    let info = client.device_info().map_err(talk)?;
    let mut parts = Parts::new(name.to_owned(), info.resettable);
    for index in 0..REGIONS {
        let asked = if index < info.regions { known(client.region_info(index)).map_err(talk)? } else { None };
        let (info, file) = asked.unwrap_or_default();
        if let Some(file) = file.as_ref().filter(|_| info.mmap && info.size > 0) {
            long_enough(name, index, file, &info)?;
        }
        parts.region_is(&info, file);
    }
    for index in 0..KINDS {
        let asked = if index < info.irqs { known(client.irq_info(index)).map_err(talk)? } else { None };
        parts.irq_is(asked);
    }
    Ok(parts)
}

/// If a server refuses to describe a part, the device does not have it.
fn known<T>(answer: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match answer {
        Err(CallError::Refused { .. }) => Ok(None),
        other => other.map(Some),
    }
}

/// Checks that a memory file has all bytes to be mapped: a vCPU that touches missing bytes would end the guest.
fn long_enough(name: &str, region: u32, file: &OwnedFd, info: &RegionInfo) -> Result<(), OpenError> {
    let areas =
        info.areas.iter().map(|area| info.offset.saturating_add(area.offset).saturating_add(area.size));
    let end = areas.max().unwrap_or_else(|| info.offset.saturating_add(info.size));
    let regular =
        fstat(file).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    match regular.and_then(|stat| u64::try_from(stat.st_size).ok()) {
        Some(size) if size < end => Err(OpenError::ShortFile { path: name.to_owned(), region, end, size }),
        _ => Ok(()),
    }
}

impl UserFunction {
    pub(super) fn new(link: Arc<Link>, parts: Parts) -> Self {
        Self { link, parts }
    }

    /// Base address registers, as a plan needs them: their kinds from configuration space, their sizes from regions.
    ///
    /// # Errors
    /// [`BackendError`] when configuration space cannot be read.
    pub fn bars(&self) -> Result<Vec<HostBar>, BackendError> {
        let mut bars = Vec::new();
        let mut upper_half = false;
        for index in 0..6 {
            let size = self.region(RegionIndex::Bar(index)).size;
            if std::mem::take(&mut upper_half) || size == 0 {
                continue;
            }
            let mut register = [0; 4];
            self.read(
                RegionIndex::Config,
                u64::from(index).saturating_mul(4).saturating_add(0x10),
                &mut register,
            )?;
            let kind = HostBarKind::of_register(u32::from_le_bytes(register));
            upper_half = matches!(kind, HostBarKind::Memory64 | HostBarKind::Memory64Prefetchable);
            bars.push(HostBar { index, kind, size, start: 0 });
        }
        Ok(bars)
    }

    /// Number of MSI-X vectors, as a plan needs it.
    pub fn msix_vectors(&self) -> u16 {
        u16::try_from(self.interrupts(InterruptKind::Msix).count).unwrap_or(u16::MAX)
    }

    fn set(&self, what: &str, set: SetIrqs<'_>, eventfds: &[BorrowedFd<'_>]) -> Result<(), BackendError> {
        self.link.ask(format_args!("{what} interrupt {}", set.index), |client| client.set_irqs(set, eventfds))
    }
}

/// Request for INTx, which has one vector.
fn intx(action: IrqAction, data: IrqData<'static>) -> SetIrqs<'static> {
    SetIrqs { index: InterruptKind::Intx.number(), start: 0, count: 1, action, data }
}

impl Backend for UserFunction {
    fn name(&self) -> &str {
        &self.link.name
    }

    fn region(&self, region: RegionIndex) -> &Region {
        self.parts.region(region)
    }

    fn interrupts(&self, kind: InterruptKind) -> Interrupts {
        match kind {
            // The loss of the server is an error that this process detects itself.
            InterruptKind::Error => Interrupts { count: 1, dynamic: true },
            _ => self.parts.interrupts(kind),
        }
    }

    fn read(&self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), BackendError> {
        let read = self.parts.inside(region, offset, data.len()).and_then(|()| {
            self.link
                .ask(format_args!("read {region:?}"), |client| client.read(region.number(), offset, data))
        });
        read.inspect_err(|_| data.fill(0xff))
    }

    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        self.parts.inside(region, offset, data.len())?;
        self.link.ask(format_args!("write {region:?}"), |client| client.write(region.number(), offset, data))
    }

    fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        congruent_to: u64,
    ) -> Result<Arc<dyn HostMemory>, BackendError> {
        self.parts.map(region, part, congruent_to, MadeOf::File)
    }

    fn connect(
        &self,
        kind: InterruptKind,
        first: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), BackendError> {
        let count = u32::try_from(triggers.len()).unwrap_or(u32::MAX);
        self.parts.has(kind, first, count, self.interrupts(kind).count)?;
        if kind == InterruptKind::Error {
            let trigger =
                triggers.iter().flatten().next().map(|trigger| self.link.keep(trigger)).transpose()?;
            self.link.lost.connect(trigger);
            if self.parts.interrupts(kind).count == 0 {
                return Ok(());
            }
        }
        for (start, run) in runs(first, triggers) {
            let eventfds: Vec<_> = run.iter().copied().flatten().collect();
            let count = u32::try_from(run.len()).unwrap_or(u32::MAX);
            self.set("connect", connected(kind, start, count), &eventfds)?;
        }
        Ok(())
    }

    fn connect_resample(&self, resample: BorrowedFd<'_>) -> Result<(), BackendError> {
        self.set("resample", intx(IrqAction::Unmask, IrqData::Eventfd), &[resample])
    }

    fn mask_intx(&self, masked: bool) -> Result<(), BackendError> {
        let action = if masked { IrqAction::Mask } else { IrqAction::Unmask };
        self.set("mask", intx(action, IrqData::None), &[])
    }

    fn disable(&self, kind: InterruptKind) -> Result<(), BackendError> {
        if kind == InterruptKind::Error {
            self.link.lost.connect(None);
        }
        if self.parts.interrupts(kind).count == 0 {
            return Ok(());
        }
        self.set("disable", disabled(kind), &[])
    }

    fn can_reset(&self) -> bool {
        self.parts.resettable
    }

    fn reset(&self) -> Result<(), BackendError> {
        if egm_address::fault!("reset-not-forwarded") {
            return Ok(());
        }
        self.link.ask("reset", Client::reset)
    }

    fn reset_bus(&self) -> Result<Vec<PciAddress>, BackendError> {
        Err(self.parts.refused("reset its bus: vfio-user has none", io::ErrorKind::Unsupported))
    }
}
