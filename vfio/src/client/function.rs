//! Registers, memory and interrupts of a vfio-user device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use egm_address::{Address, InBar, PciAddress, Span};
use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::message::{Area, IrqAction, IrqData, IrqInfo, RegionInfo, SetIrqs};
use rustix::fs::{FileType, fstat};

use super::{Link, OpenError};
use crate::backend::{Backend, BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::host::{HostBar, HostBarKind};
use crate::mapping::{MadeOf, Mapping};
use crate::memory::HostMemory;

/// Regions of a function: six BARs, the ROM, and configuration space.
const REGIONS: u32 = 8;
/// Kinds of interrupts: INTx, MSI, MSI-X, error, request.
const KINDS: u32 = 5;

/// A function behind a vfio-user server.
pub struct UserFunction {
    link: Arc<Link>,
    parts: Parts,
}

/// What a server says of its device when it is opened.
pub(super) struct Parts {
    regions: Vec<Described>,
    irqs: Vec<Interrupts>,
    resettable: bool,
}

struct Described {
    region: Region,
    /// The file that it is mapped from, and where it begins there.
    file: Option<(OwnedFd, u64)>,
}

/// Asks for all of it.
pub(super) fn describe(name: &str, client: &mut Client) -> Result<Parts, OpenError> {
    let talk = |source| OpenError::Talk { path: name.to_owned(), source };
    let info = client.device_info().map_err(talk)?;
    let mut regions = Vec::new();
    for index in 0..REGIONS {
        let asked = if index < info.regions { known(client.region_info(index)).map_err(talk)? } else { None };
        let (info, file) = asked.unwrap_or_default();
        let file = file.filter(|_| info.mmap && info.size > 0).map(|file| (file, info.offset));
        if let Some((file, offset)) = &file {
            long_enough(name, index, file, offset.saturating_add(info.size), &info)?;
        }
        regions.push(Described { region: region(&info, file.is_some()), file });
    }
    let mut irqs = Vec::new();
    for index in 0..KINDS {
        let asked = if index < info.irqs { known(client.irq_info(index)).map_err(talk)? } else { None };
        irqs.push(asked.map(interrupts).unwrap_or_default());
    }
    Ok(Parts { regions, irqs, resettable: info.resettable })
}

/// A server that refuses to describe a part has none.
fn known<T>(answer: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match answer {
        Err(CallError::Refused { .. }) => Ok(None),
        other => other.map(Some),
    }
}

fn interrupts(info: IrqInfo) -> Interrupts {
    Interrupts { count: if info.eventfd { info.count } else { 0 }, dynamic: !info.noresize }
}

/// A memory file has to hold what is mapped of it: a vCPU that touches what is missing would end the guest.
fn long_enough(
    name: &str,
    region: u32,
    file: &OwnedFd,
    whole: u64,
    info: &RegionInfo,
) -> Result<(), OpenError> {
    let areas =
        info.areas.iter().map(|area| info.offset.saturating_add(area.offset).saturating_add(area.size));
    let end = areas.max().unwrap_or(whole);
    let regular =
        fstat(file).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    match regular.and_then(|stat| u64::try_from(stat.st_size).ok()) {
        Some(size) if size < end => Err(OpenError::ShortFile { path: name.to_owned(), region, end, size }),
        _ => Ok(()),
    }
}

fn region(info: &RegionInfo, file: bool) -> Region {
    let whole = Area { offset: 0, size: info.size };
    let areas = if info.areas.is_empty() { std::slice::from_ref(&whole) } else { &info.areas };
    let areas = if file { areas } else { &[] };
    Region {
        size: info.size,
        readable: info.read,
        writable: info.write,
        mappable: areas.iter().filter_map(|area| pages(info.offset, area)).collect(),
        // A server that lets the table be mapped says so by its areas.
        msix_mappable: true,
    }
}

/// The whole pages of `area`, whose region begins at `offset` of its file; none when they are not pages of the file.
fn pages(offset: u64, area: &Area) -> Option<Span<InBar>> {
    let page = u64::try_from(rustix::param::page_size()).ok()?;
    let start = area.offset.checked_next_multiple_of(page)?;
    let end = area.offset.checked_add(area.size)?;
    let end = end.checked_sub(end.checked_rem(page)?)?;
    let size = end.checked_sub(start).filter(|_| offset.checked_rem(page) == Some(0))?;
    Span::new(Address::new(start), size).ok()
}

impl UserFunction {
    pub(super) fn new(link: Arc<Link>, parts: Parts) -> Self {
        Self { link, parts }
    }

    /// Its base address registers, as a plan needs them: their kinds by configuration space, their sizes by regions.
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

    /// Its MSI-X vectors, as a plan needs them.
    pub fn msix_vectors(&self) -> u16 {
        u16::try_from(self.interrupts(InterruptKind::Msix).count).unwrap_or(u16::MAX)
    }

    fn described(&self, region: RegionIndex) -> Option<&Described> {
        self.parts.regions.get(usize::try_from(region.number()).ok()?)
    }

    fn absent(&self, what: String) -> BackendError {
        BackendError::Absent { function: self.link.name.clone(), what }
    }

    /// An access has to lie in its region.
    fn inside(&self, region: RegionIndex, offset: u64, length: usize) -> Result<(), BackendError> {
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        let inside = end.is_some_and(|end| end <= self.region(region).size);
        if inside { Ok(()) } else { Err(self.absent(format!("byte {offset:#x} of {region:?}"))) }
    }

    fn set(&self, what: &str, set: SetIrqs<'_>, eventfds: &[BorrowedFd<'_>]) -> Result<(), BackendError> {
        self.link.ask(format_args!("{what} interrupt {}", set.index), |client| client.set_irqs(set, eventfds))
    }
}

/// The one interrupt line.
fn intx(action: IrqAction, data: IrqData<'static>) -> SetIrqs<'static> {
    SetIrqs { index: InterruptKind::Intx.number(), start: 0, count: 1, action, data }
}

impl Backend for UserFunction {
    fn name(&self) -> &str {
        &self.link.name
    }

    fn region(&self, region: RegionIndex) -> &Region {
        self.described(region).map_or(Region::NONE, |described| &described.region)
    }

    fn interrupts(&self, kind: InterruptKind) -> Interrupts {
        let index = usize::try_from(kind.number()).ok();
        let theirs = index.and_then(|index| self.parts.irqs.get(index)).copied().unwrap_or_default();
        match kind {
            // A server that goes away is an error that we see ourselves.
            InterruptKind::Error => Interrupts { count: 1, dynamic: true },
            _ => theirs,
        }
    }

    fn read(&self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), BackendError> {
        let read = self.inside(region, offset, data.len()).and_then(|()| {
            self.link
                .ask(format_args!("read {region:?}"), |client| client.read(region.number(), offset, data))
        });
        read.inspect_err(|_| data.fill(0xff))
    }

    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        self.inside(region, offset, data.len())?;
        self.link.ask(format_args!("write {region:?}"), |client| client.write(region.number(), offset, data))
    }

    fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        congruent_to: u64,
    ) -> Result<Arc<dyn HostMemory>, BackendError> {
        let absent = || self.absent(format!("mappable {part} in {region:?}"));
        let described = self.described(region).ok_or_else(absent)?;
        let inside = described.region.mappable.iter().any(|span| span.covers(part));
        let (file, first) = described.file.as_ref().filter(|_| inside).ok_or_else(absent)?;
        let offset = first.checked_add(part.start().get()).ok_or_else(absent)?;
        let made_of = MadeOf::File(self.link.keep(file)?, offset);
        let mapping = Mapping::of(file.as_fd(), offset, part.size(), congruent_to, made_of);
        let mapping = mapping.map_err(|source| {
            let what = format!("map {part} of {region:?}");
            BackendError::Refused { function: self.link.name.clone(), what, source }
        })?;
        Ok(Arc::new(mapping))
    }

    fn connect(
        &self,
        kind: InterruptKind,
        first: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), BackendError> {
        let count = u32::try_from(triggers.len()).unwrap_or(u32::MAX);
        let end = first.checked_add(count);
        if end.is_none_or(|end| end > self.interrupts(kind).count) {
            return Err(self.absent(format!("vector {first} and {count} more of {kind:?}")));
        }
        let mut start = first;
        if kind == InterruptKind::Error {
            let trigger =
                triggers.iter().flatten().next().map(|trigger| self.link.keep(trigger)).transpose()?;
            self.link.lost.connect(trigger);
            let theirs = self.parts.irqs.get(3).copied().unwrap_or_default();
            if theirs.count == 0 {
                return Ok(());
            }
        }
        for run in triggers.chunk_by(|one, next| one.is_some() == next.is_some()) {
            let eventfds: Vec<_> = run.iter().copied().flatten().collect();
            let count = u32::try_from(run.len()).unwrap_or(u32::MAX);
            let (action, data) = (IrqAction::Trigger, IrqData::Eventfd);
            self.set("connect", SetIrqs { index: kind.number(), start, count, action, data }, &eventfds)?;
            start = start.saturating_add(count);
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
        let theirs = usize::try_from(kind.number()).ok().and_then(|index| self.parts.irqs.get(index));
        if theirs.is_none_or(|theirs| theirs.count == 0) {
            return Ok(());
        }
        let (action, data) = (IrqAction::Trigger, IrqData::None);
        self.set("disable", SetIrqs { index: kind.number(), start: 0, count: 0, action, data }, &[])
    }

    fn can_reset(&self) -> bool {
        self.parts.resettable
    }

    fn reset(&self) -> Result<(), BackendError> {
        self.link.ask("reset", Client::reset)
    }

    fn reset_bus(&self) -> Result<Vec<PciAddress>, BackendError> {
        let (function, what) = (self.name().to_owned(), "reset its bus: vfio-user has none".to_owned());
        Err(BackendError::Refused { function, what, source: io::ErrorKind::Unsupported.into() })
    }
}
