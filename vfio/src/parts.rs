//! A function in vfio-user's terms, served by a socket or in this process: regions with their files, and interrupts.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use egm_address::{Address, InBar, Span};
use egm_vfio_wire::message::{Area, IrqAction, IrqData, IrqInfo, RegionInfo, SetIrqs};

use crate::backend::{BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::mapping::{MadeOf, Mapping};
use crate::memory::HostMemory;

/// Regions of a function: six BARs, the ROM, and configuration space.
pub(crate) const REGIONS: u32 = 8;
/// Kinds of interrupts: INTx, MSI, MSI-X, error, request.
pub(crate) const KINDS: u32 = 5;

/// Description of a device, read when it is opened.
pub(crate) struct Parts {
    pub(crate) name: String,
    regions: Vec<Described>,
    irqs: Vec<Interrupts>,
    pub(crate) resettable: bool,
}

struct Described {
    region: Region,
    /// File to map the region from, and the region's offset in it.
    file: Option<(OwnedFd, u64)>,
}

impl Parts {
    pub(crate) fn new(name: String, resettable: bool) -> Self {
        Self { name, regions: Vec::new(), irqs: Vec::new(), resettable }
    }

    /// Adds the next region, in index order.
    pub(crate) fn region_is(&mut self, info: &RegionInfo, file: Option<OwnedFd>) {
        let file = file.filter(|_| info.mmap && info.size > 0).map(|file| (file, info.offset));
        self.regions.push(Described { region: region(info, file.is_some()), file });
    }

    /// Adds the next kind of interrupt, in index order.
    pub(crate) fn irq_is(&mut self, info: Option<IrqInfo>) {
        self.irqs.push(info.map(interrupts).unwrap_or_default());
    }

    pub(crate) fn region(&self, region: RegionIndex) -> &Region {
        self.described(region).map_or(Region::NONE, |described| &described.region)
    }

    pub(crate) fn interrupts(&self, kind: InterruptKind) -> Interrupts {
        let index = usize::try_from(kind.number()).ok();
        index.and_then(|index| self.irqs.get(index)).copied().unwrap_or_default()
    }

    fn described(&self, region: RegionIndex) -> Option<&Described> {
        self.regions.get(usize::try_from(region.number()).ok()?)
    }

    pub(crate) fn absent(&self, what: String) -> BackendError {
        BackendError::Absent { function: self.name.clone(), what }
    }

    pub(crate) fn refused(&self, what: impl Into<String>, source: impl Into<std::io::Error>) -> BackendError {
        BackendError::Refused { function: self.name.clone(), what: what.into(), source: source.into() }
    }

    /// Checks that an access lies in its region.
    pub(crate) fn inside(&self, region: RegionIndex, offset: u64, length: usize) -> Result<(), BackendError> {
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        let inside = end.is_some_and(|end| end <= self.region(region).size);
        if inside { Ok(()) } else { Err(self.absent(format!("byte {offset:#x} of {region:?}"))) }
    }

    /// Checks that the vectors exist: `of` is their total.
    pub(crate) fn has(
        &self,
        kind: InterruptKind,
        first: u32,
        count: u32,
        of: u32,
    ) -> Result<(), BackendError> {
        let inside = first.checked_add(count).is_some_and(|end| end <= of);
        if inside { Ok(()) } else { Err(self.absent(format!("vector {first} and {count} more of {kind:?}"))) }
    }

    /// Maps `part` of `region`; `made_of` classifies the mapping, from a descriptor and the part's offset in it.
    pub(crate) fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        congruent_to: u64,
        made_of: impl FnOnce(OwnedFd, u64) -> MadeOf,
    ) -> Result<Arc<dyn HostMemory>, BackendError> {
        let absent = || self.absent(format!("mappable {part} in {region:?}"));
        let refused = |source| self.refused(format!("map {part} of {region:?}"), source);
        let described = self.described(region).ok_or_else(absent)?;
        let inside = described.region.mappable.iter().any(|span| span.covers(part));
        let (file, first) = described.file.as_ref().filter(|_| inside).ok_or_else(absent)?;
        let offset = first.checked_add(part.start().get()).ok_or_else(absent)?;
        let made_of = made_of(file.try_clone().map_err(refused)?, offset);
        let mapping = Mapping::of(file.as_fd(), offset, part.size(), congruent_to, made_of);
        Ok(Arc::new(mapping.map_err(refused)?))
    }
}

/// Request that disables all interrupts of `kind`.
pub(crate) fn disabled(kind: InterruptKind) -> SetIrqs<'static> {
    let (action, data) = (IrqAction::Trigger, IrqData::None);
    SetIrqs { index: kind.number(), start: 0, count: 0, action, data }
}

/// Request that connects vectors of `kind` from `start` on to the eventfds sent with it; without any, disconnects them.
pub(crate) fn connected(kind: InterruptKind, start: u32, count: u32) -> SetIrqs<'static> {
    SetIrqs { index: kind.number(), start, count, action: IrqAction::Trigger, data: IrqData::Eventfd }
}

/// Splits `triggers` into runs of connected or disconnected vectors, each with the number of its first vector.
pub(crate) fn runs<T>(first: u32, triggers: &[Option<T>]) -> impl Iterator<Item = (u32, &[Option<T>])> {
    let mut start = first;
    triggers.chunk_by(|one, next| one.is_some() == next.is_some()).map(move |run| {
        let here = start;
        start = start.saturating_add(u32::try_from(run.len()).unwrap_or(u32::MAX));
        (here, run)
    })
}

fn interrupts(info: IrqInfo) -> Interrupts {
    Interrupts { count: if info.eventfd { info.count } else { 0 }, dynamic: !info.noresize }
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
        // A server that allows mapping of the table shows it by its areas.
        msix_mappable: true,
    }
}

/// The whole pages of `area` in a region that begins at `offset` of its file; `None` if they are not pages of the file.
fn pages(offset: u64, area: &Area) -> Option<Span<InBar>> {
    let page = u64::try_from(rustix::param::page_size()).ok()?;
    let start = area.offset.checked_next_multiple_of(page)?;
    let end = area.offset.checked_add(area.size)?;
    let end = end.checked_sub(end.checked_rem(page)?)?;
    let size = end.checked_sub(start).filter(|_| offset.checked_rem(page) == Some(0))?;
    Span::new(Address::new(start), size).ok()
}
