//! Test doubles of a function and an I/O address space, in memory: they behave like the kernel's and record requests.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egm_address::{InBar, PciAddress, Span};
use rustix::fs::MemfdFlags;

use crate::backend::{Backend, BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::mapping::{MadeOf, Mapping, MemoryPart};
use crate::memory::HostMemory;

mod domain;

pub use domain::{FakeDomain, kind};

/// Request to a fake function; reads, and requests that change nothing, are not recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// [`Backend::write`]: region, offset, bytes.
    Write(RegionIndex, u64, Vec<u8>),
    /// [`Backend::map`]: region and mapped span.
    Map(RegionIndex, Span<InBar>),
    /// [`Backend::connect`]: kind, first vector, which of the vectors have a descriptor.
    Connect(InterruptKind, u32, Vec<bool>),
    /// [`Backend::connect_resample`]; its descriptor is not kept.
    Resample,
    /// [`Backend::mask_intx`]: `true` masks, `false` unmasks.
    MaskIntx(bool),
    /// [`Backend::disable`] of this kind.
    Disable(InterruptKind),
    /// [`Backend::reset`] of the function alone.
    Reset,
    /// [`Backend::reset_bus`], recorded for [`Resets::Bus`] only.
    ResetBus,
}

/// Kind of reset that a fake function supports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Resets {
    /// A reset of its own.
    #[default]
    Own,
    /// A reset of its bus, which affects these functions.
    Bus(Vec<PciAddress>),
    /// No reset: [`Backend::can_reset`] is false, [`Backend::reset_bus`] fails.
    Nothing,
}

/// A function with regions in memory. Add regions and interrupts, then share an `Arc` of it.
#[derive(Default)]
pub struct FakeFunction {
    name: Option<String>,
    resets: Resets,
    regions: BTreeMap<RegionIndex, FakeRegion>,
    interrupts: BTreeMap<InterruptKind, Interrupts>,
    state: Mutex<FakeState>,
}

#[derive(Default)]
struct FakeRegion {
    region: Region,
    memory: Option<Arc<dyn HostMemory>>,
}

#[derive(Default)]
struct FakeState {
    calls: Vec<Call>,
    triggers: BTreeMap<(InterruptKind, u32), OwnedFd>,
    /// Kind that is enabled, of INTx, MSI and MSI-X.
    enabled: Option<InterruptKind>,
    /// INTx: asserted by the function, masked.
    asserted: bool,
    masked: bool,
    gone: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeFunction {
    /// Adds a region that holds `content` and zeroes up to `size`; `mappable` parts can be mapped.
    ///
    /// # Errors
    /// Out of memory.
    pub fn with_region(
        mut self,
        index: RegionIndex,
        size: u64,
        content: &[u8],
        mappable: &[Span<InBar>],
    ) -> io::Result<Self> {
        // A file uses memory only for written pages: a BAR may have 256 GiB.
        let file = rustix::fs::memfd_create("fake region", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, size)?;
        let memory: Arc<dyn HostMemory> = Arc::new(Mapping::of(file.as_fd(), 0, size, 0, MadeOf::Pages)?);
        memory.write(0, content).ok_or(io::ErrorKind::InvalidInput)?;
        let mappable = mappable.to_vec();
        let region = Region { size, readable: true, writable: true, mappable, msix_mappable: true };
        self.regions.insert(index, FakeRegion { region, memory: Some(memory) });
        Ok(self)
    }

    /// Adds `count` vectors of `kind`, which can be connected one after the other.
    #[must_use]
    pub fn with_interrupts(mut self, kind: InterruptKind, count: u32) -> Self {
        self.interrupts.insert(kind, Interrupts { count, dynamic: true });
        self
    }

    /// As [`FakeFunction::with_interrupts`], but vectors cannot be added while others are on.
    #[must_use]
    pub fn with_fixed_interrupts(mut self, kind: InterruptKind, count: u32) -> Self {
        self.interrupts.insert(kind, Interrupts { count, dynamic: false });
        self
    }

    /// Sets its name and its kind of reset.
    #[must_use]
    pub fn with_resets(mut self, name: &str, resets: Resets) -> Self {
        (self.name, self.resets) = (Some(name.to_owned()), resets);
        self
    }

    /// Takes the requests recorded since the last call of this function.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut lock(&self.state).calls)
    }

    /// Memory of a region: the device's own view, without a record.
    pub fn memory(&self, index: RegionIndex) -> Option<&Arc<dyn HostMemory>> {
        self.regions.get(&index)?.memory.as_ref()
    }

    /// Raises a vector, as the device would; `false` if no trigger is connected. [`Self::set_intx`] raises INTx.
    pub fn fire(&self, kind: InterruptKind, vector: u32) -> bool {
        lock(&self.state).fire(kind, vector)
    }

    /// Asserts or releases INTx: it fires once and is masked until it is unmasked.
    pub fn set_intx(&self, asserted: bool) {
        let mut state = lock(&self.state);
        state.asserted = asserted;
        state.fire_intx();
    }

    /// Makes the function disappear, as surprise removal does.
    pub fn remove(&self) {
        lock(&self.state).gone = true;
    }

    fn absent(&self, what: String) -> BackendError {
        BackendError::Absent { function: self.name().to_owned(), what }
    }

    /// Records `call` and returns the state; an error once the function is gone.
    fn ask(&self, call: Option<Call>) -> Result<MutexGuard<'_, FakeState>, BackendError> {
        let mut state = lock(&self.state);
        if state.gone {
            return Err(BackendError::Gone { function: self.name().to_owned(), why: "removed".to_owned() });
        }
        state.calls.extend(call);
        Ok(state)
    }

    fn bytes(&self, region: RegionIndex, offset: u64) -> Result<&Arc<dyn HostMemory>, BackendError> {
        self.memory(region).ok_or_else(|| self.absent(format!("byte {offset:#x} of {region:?}")))
    }
}

impl FakeState {
    fn fire(&self, kind: InterruptKind, vector: u32) -> bool {
        let trigger = self.triggers.get(&(kind, vector));
        trigger.is_some_and(|trigger| rustix::io::write(trigger, &1u64.to_ne_bytes()).is_ok())
    }

    fn fire_intx(&mut self) {
        if self.asserted && !self.masked && self.fire(InterruptKind::Intx, 0) {
            self.masked = true;
        }
    }
}

impl Backend for FakeFunction {
    fn name(&self) -> &str {
        self.name.as_deref().unwrap_or("fake function")
    }

    fn region(&self, region: RegionIndex) -> &Region {
        self.regions.get(&region).map_or(Region::NONE, |region| &region.region)
    }

    fn interrupts(&self, kind: InterruptKind) -> Interrupts {
        self.interrupts.get(&kind).copied().unwrap_or_default()
    }

    fn read(&self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), BackendError> {
        data.fill(0xff);
        drop(self.ask(None)?);
        self.bytes(region, offset)?
            .read(offset, data)
            .ok_or_else(|| self.absent(format!("byte {offset:#x} of {region:?}")))
    }

    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        let _state = self.ask(Some(Call::Write(region, offset, data.to_vec())))?;
        self.bytes(region, offset)?
            .write(offset, data)
            .ok_or_else(|| self.absent(format!("byte {offset:#x} of {region:?}")))
    }

    fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        _congruent_to: u64,
    ) -> Result<Arc<dyn HostMemory>, BackendError> {
        drop(self.ask(Some(Call::Map(region, part)))?);
        let known = self.regions.get(&region);
        let inside = known.filter(|known| known.region.mappable.iter().any(|span| span.covers(part)));
        let memory = inside.and_then(|known| known.memory.clone());
        let mapped = memory.and_then(|memory| MemoryPart::new(memory, part.start().get(), part.size()));
        let mapped = mapped.ok_or_else(|| self.absent(format!("mappable {part} in {region:?}")))?;
        Ok(Arc::new(mapped))
    }

    fn connect(
        &self,
        kind: InterruptKind,
        first: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), BackendError> {
        let given = triggers.iter().map(Option::is_some).collect();
        let mut state = self.ask(Some(Call::Connect(kind, first, given)))?;
        let vectors = first..self.interrupts(kind).count;
        if vectors.len() < triggers.len() {
            return Err(self.absent(format!("vector {} of {kind:?}", vectors.end)));
        }
        let refused = |source| {
            let (function, what) = (self.name().to_owned(), format!("connect {kind:?}"));
            BackendError::Refused { function, what, source }
        };
        if matches!(kind, InterruptKind::Intx | InterruptKind::Msi | InterruptKind::Msix) {
            if state.enabled.is_some_and(|enabled| enabled != kind) {
                return Err(refused(io::ErrorKind::InvalidInput.into()));
            }
            state.enabled = Some(kind);
        }
        for (vector, trigger) in vectors.zip(triggers) {
            match trigger {
                Some(trigger) => {
                    let kept = trigger.try_clone_to_owned().map_err(refused)?;
                    state.triggers.insert((kind, vector), kept);
                }
                None => drop(state.triggers.remove(&(kind, vector))),
            }
        }
        state.fire_intx();
        Ok(())
    }

    fn connect_resample(&self, _resample: BorrowedFd<'_>) -> Result<(), BackendError> {
        self.ask(Some(Call::Resample)).map(drop)
    }

    fn mask_intx(&self, masked: bool) -> Result<(), BackendError> {
        let mut state = self.ask(Some(Call::MaskIntx(masked)))?;
        state.masked = masked;
        state.fire_intx();
        Ok(())
    }

    fn disable(&self, kind: InterruptKind) -> Result<(), BackendError> {
        let mut state = self.ask(Some(Call::Disable(kind)))?;
        state.triggers.retain(|(connected, _), _| *connected != kind);
        state.enabled = state.enabled.filter(|enabled| *enabled != kind);
        Ok(())
    }

    fn can_reset(&self) -> bool {
        self.resets == Resets::Own
    }

    fn reset(&self) -> Result<(), BackendError> {
        let mut state = self.ask(Some(Call::Reset))?;
        state.asserted = false;
        Ok(())
    }

    fn reset_bus(&self) -> Result<Vec<PciAddress>, BackendError> {
        let Resets::Bus(functions) = &self.resets else {
            return Err(self.absent("bus that can be reset".to_owned()));
        };
        self.ask(Some(Call::ResetBus))?.asserted = false;
        Ok(functions.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use egm_address::Iova;

    use super::*;
    use crate::dma::{Access, Domain};

    fn bar(start: u64, size: u64) -> Span<InBar> {
        Span::new(egm_address::Address::new(start), size).unwrap()
    }

    fn function() -> FakeFunction {
        FakeFunction::default()
            .with_region(RegionIndex::Bar(0), 0x4000, b"\x01", &[bar(0x1000, 0x3000)])
            .unwrap()
            .with_interrupts(InterruptKind::Intx, 1)
            .with_interrupts(InterruptKind::Msix, 4)
    }

    fn eventfd() -> OwnedFd {
        rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
    }

    fn signalled(event: &OwnedFd) -> bool {
        rustix::io::read(event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn a_mapped_bar_is_the_region_that_is_read_and_written() {
        let function = function();
        let mapped = function.map(RegionIndex::Bar(0), bar(0x2000, 0x1000), 0).unwrap();
        function.write(RegionIndex::Bar(0), 0x2004, &[7]).unwrap();
        let mut data = [0];
        mapped.read(4, &mut data).unwrap();
        assert_eq!(data, [7]);
        assert!(function.map(RegionIndex::Bar(0), bar(0, 0x1000), 0).is_err());
        assert_eq!(function.take_calls().len(), 3);
    }

    #[test]
    fn intx_fires_once_until_it_is_unmasked_and_again_while_it_is_asserted() {
        let (function, event) = (function(), eventfd());
        function.connect(InterruptKind::Intx, 0, &[Some(event.as_fd())]).unwrap();
        function.set_intx(true);
        assert!(signalled(&event));
        function.set_intx(true);
        assert!(!signalled(&event));
        function.mask_intx(false).unwrap();
        assert!(signalled(&event));
        function.set_intx(false);
        function.mask_intx(false).unwrap();
        assert!(!signalled(&event));
    }

    #[test]
    fn one_kind_of_interrupt_is_enabled_at_a_time_and_vectors_end_where_the_table_does() {
        let (function, event) = (function(), eventfd());
        function.connect(InterruptKind::Intx, 0, &[Some(event.as_fd())]).unwrap();
        let msix = |first| function.connect(InterruptKind::Msix, first, &[Some(event.as_fd())]);
        assert!(matches!(msix(0), Err(BackendError::Refused { .. })));
        function.disable(InterruptKind::Intx).unwrap();
        msix(3).unwrap();
        assert!(matches!(msix(4), Err(BackendError::Absent { .. })));
        assert!(function.fire(InterruptKind::Msix, 3) && signalled(&event));
        assert!(!function.fire(InterruptKind::Msix, 2));
    }

    #[test]
    fn a_function_that_is_gone_answers_all_ones() {
        let function = function();
        function.remove();
        let mut data = [0; 4];
        let gone = function.read(RegionIndex::Bar(0), 0, &mut data);
        assert!(matches!(gone, Err(BackendError::Gone { .. })));
        assert_eq!(data, [0xff; 4]);
    }

    #[test]
    fn a_domain_keeps_memory_until_it_is_unmapped_and_faults_elsewhere() {
        let domain = FakeDomain::default();
        let memory: Arc<dyn HostMemory> = Arc::new(Mapping::pages(0x4000, 0).unwrap());
        let iova = Span::new(Iova::new(0x1_0000), 0x2000).unwrap();
        domain.map(iova, &memory, 0x1000, Access::ReadWrite).unwrap();
        domain.write(Iova::new(0x1_0010), b"dma").unwrap();
        let mut data = [0; 3];
        memory.read(0x1010, &mut data).unwrap();
        assert_eq!(&data, b"dma");
        assert!(domain.read(Iova::new(0xffff), &mut data).is_none());
        assert!(domain.map(iova, &memory, 0, Access::Read).is_err());
        assert_eq!(Arc::strong_count(&memory), 2);
        domain.unmap(iova).unwrap();
        assert_eq!(Arc::strong_count(&memory), 1);
        assert!(domain.unmap(iova).is_err());
    }
}
