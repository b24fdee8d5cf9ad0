//! A host function as the guest's PCI function.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Instant;

use egm_address::BarOffset;
use egm_vfio::backend::{Backend, BackendError, RegionIndex};
use egm_vfio::pci::shadow::{
    AddedCapability, Bar, BarKind as ShadowKind, BarRange, Forward, MsixLayout, Options, Shadow,
};

use super::access::natural;
use super::coherent;
use super::error::PassthroughError;
use super::interrupts::Interrupts;
use super::intx::InterruptLine;
use super::parts;
use super::peers::Peers;
use super::windows::{Unreachable, Windows};
use crate::kvm::SlotTable;
use crate::lock::lock;
use crate::pci::msix::{MsiRouter, Msix};
use crate::pci::{CONFIG_SIZE, DecodedBar, PciFunction, Plugged};
use crate::plan::{BarKind, BarPlan};

/// INTA: the only pin that a function gets, since each is alone in its slot.
const PIN: u8 = 1;

/// Revision and class code: all ones is what a read of an absent function gives. Not the vendor's id, which vfio-pci answers
/// by itself.
const REVISION_AND_CLASS: u64 = 8;

/// Connections of an assigned function.
pub(crate) struct Connections {
    pub router: Arc<dyn MsiRouter>,
    /// The interrupt line of its pin; without one it has no pin.
    pub line: Option<Box<dyn InterruptLine>>,
    /// Puts mapped BARs into the guest's address space.
    pub slots: Arc<dyn SlotTable>,
    /// Other devices' address spaces.
    pub peers: Arc<Peers>,
    /// Whether other functions reach its BARs.
    pub reachable: bool,
    /// BARs that are memory, as the plan has them.
    pub memory: Vec<u8>,
}

/// MSI-X structures that the VMM emulates in a BAR.
#[derive(Debug, Clone, Copy)]
enum Own {
    Table,
    Pending,
}

/// A host function assigned to a guest.
pub(crate) struct AssignedFunction {
    backend: Arc<dyn Backend>,
    /// Locked while the function answers, which a server may take seconds for.
    shadow: Mutex<Shadow>,
    /// BAR placement after the last acknowledged config write, kept apart so that address lookups never wait for the shadow.
    decoded: Mutex<Vec<DecodedBar>>,
    interrupts: Interrupts,
    /// BAR ranges of the MSI-X structures.
    msix: Option<MsixLayout>,
    windows: Windows,
    /// Number of BAR parts that could be mapped and are not, since there are too many.
    trapped_parts: usize,
    /// BARs that are memory.
    memory: Vec<u8>,
    /// Accesses that the function did not answer.
    failed: AtomicU64,
    /// Resets of its bus for the guest.
    resets: AtomicU64,
    /// Whether it was pulled out, or its server ended: it never answers again.
    gone: AtomicBool,
    /// Called when that happens.
    tell: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Whether it was removed from the guest. Written while the shadow is locked.
    ended: AtomicBool,
}

impl AssignedFunction {
    /// `backend` with its BARs at `bars`, and `added` capabilities. It was reset: a guest sees no other guest's state.
    ///
    /// # Errors
    /// [`PassthroughError`].
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        bars: &[BarPlan],
        added: Vec<AddedCapability>,
        connections: Connections,
    ) -> Result<Arc<Self>, PassthroughError> {
        let Connections { router, line, slots, peers, reachable, memory } = connections;
        let supports = |capability| slots.supports(capability);
        coherent::check(backend.as_ref(), &memory, supports)?;
        let line = line.filter(|_| backend.interrupts(egm_vfio::backend::InterruptKind::Intx).count > 0);
        let options = Options {
            bars: bars.iter().map(shadow_bar).collect(),
            pin: line.as_ref().map(|_| PIN),
            msi: true,
            msix: true,
            added,
            ..Options::default()
        };
        let shadow = shadow(backend.as_ref(), &options)?;
        let parts = parts::mapped(backend.as_ref(), bars, shadow.msix())?;
        let function = Arc::new(Self {
            interrupts: Interrupts::new(&backend, &shadow, &router, line)?,
            windows: Windows::new(parts.mapped, slots, peers, |bar| reachable || memory.contains(&bar)),
            trapped_parts: parts.left_out,
            memory,
            msix: shadow.msix(),
            decoded: Mutex::default(),
            shadow: Mutex::new(shadow),
            failed: AtomicU64::new(0),
            resets: AtomicU64::new(0),
            gone: AtomicBool::new(false),
            tell: OnceLock::new(),
            ended: AtomicBool::new(false),
            backend,
        });
        function.publish(&lock(&function.shadow));
        function.start(&lock(&function.shadow));
        if !function.memory.is_empty() {
            coherent::wait(function.backend.as_ref(), Instant::now, thread::sleep)?;
        }
        Ok(function)
    }

    /// Lets other functions reach its BARs where the plan has them.
    ///
    /// # Errors
    /// [`PassthroughError::MemoryUnreachable`], or else [`PassthroughError::Unreachable`] with the first that is refused;
    /// the function works all the same then.
    pub(crate) fn share_bars(&self, bars: &[BarPlan]) -> Result<(), PassthroughError> {
        let function = self.name().to_owned();
        let planned = bars.iter().map(|bar| DecodedBar::new(bar.index, bar.span));
        let (memory, registers): (Vec<_>, Vec<_>) =
            planned.partition(|bar: &DecodedBar| self.memory.contains(&bar.index));
        if let Err(Unreachable { bar, source }) = self.windows.share(&memory) {
            return Err(PassthroughError::MemoryUnreachable { function, bar, source });
        }
        let shared = self.windows.share(&registers);
        shared.map_err(|Unreachable { bar, source }| PassthroughError::Unreachable { function, bar, source })
    }

    /// Number of BAR parts that could be mapped and are reached by exits: others are larger, and there are too many.
    pub(crate) fn trapped_parts(&self) -> usize {
        self.trapped_parts
    }

    /// Carries out a function-level reset that the guest requested.
    fn reset_itself(&self, shadow: &mut Shadow) {
        self.interrupts.stop();
        self.reset_device();
        shadow.reset();
        self.start(shadow);
        self.publish(shadow);
    }

    fn publish(&self, shadow: &Shadow) {
        *lock(&self.decoded) =
            shadow.decoded().into_iter().map(|(index, span)| DecodedBar::new(index, span)).collect();
    }

    fn reset_device(&self) {
        if self.backend.can_reset() && !egm_address::fault!("flr-skipped") {
            self.count(self.backend.reset());
        }
    }

    /// A reset that may have to take other functions with it: their host names are `together`.
    fn reset_together(&self, together: &[&str]) {
        if self.backend.can_reset() {
            self.reset_device();
        } else {
            let consent: Vec<_> = together.iter().filter_map(|name| name.parse().ok()).collect();
            self.count(self.backend.reset_with(&consent));
        }
    }

    fn start(&self, shadow: &Shadow) {
        shadow.start().iter().for_each(|write| self.forward(write));
        self.interrupts.start();
    }

    fn forward(&self, write: &Forward) {
        if egm_address::fault!("command-write-lost") && write.offset == 4 {
            return;
        }
        self.count(self.backend.write(RegionIndex::Config, write.offset.into(), &write.data));
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    fn count(&self, outcome: Result<(), BackendError>) {
        self.failed.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
        if matches!(outcome, Err(BackendError::Gone { .. })) {
            self.leave();
        }
    }

    /// Marks the function as gone, and reports that once.
    fn leave(&self) {
        if !self.gone.swap(true, Ordering::Relaxed) {
            self.tell.get().iter().for_each(|tell| tell());
        }
    }

    /// The emulated structure at `offset` of `bar`, and the offset inside it.
    fn own(&self, bar: u8, offset: u64) -> Option<(&Msix, Own, u64)> {
        let (layout, at) = (self.msix?, BarOffset::new(offset));
        let inside = |place: BarRange| {
            let here = place.bar == bar && place.span.contains(at);
            here.then(|| at.offset_from(place.span.start()))?
        };
        let table = inside(layout.table).map(|inside| (Own::Table, inside));
        let (own, inside) = table.or_else(|| Some((Own::Pending, inside(layout.pending)?)))?;
        Some((self.interrupts.msix()?, own, inside))
    }

    /// Whether the region behind `bar` has these bytes; a BAR may be larger.
    fn has(&self, region: RegionIndex, offset: u64, length: usize) -> bool {
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        end.is_some_and(|end| end <= self.backend.region(region).size)
    }
}

impl PciFunction for AssignedFunction {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        if self.is_gone() {
            return data.fill(0xff); // what a bus reads where no function answers
        }
        let mut shadow = lock(&self.shadow);
        if shadow.msi().is_some_and(|msi| msi.mask != 0) {
            shadow.set_msi_pending(self.interrupts.msi_pending());
        }
        shadow.read(offset, data, |offset, data| {
            self.count(self.backend.read(RegionIndex::Config, offset.into(), data));
        });
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> bool {
        if self.is_gone() {
            return false;
        }
        let mut shadow = lock(&self.shadow);
        if self.ended.load(Ordering::Relaxed) {
            return false; // looked up just before its end: a connection made now would stay
        }
        let written = shadow.write(offset, data);
        written.forward.iter().for_each(|write| self.forward(write));
        if written.effects.reset {
            self.reset_itself(&mut shadow);
            return true;
        }
        self.interrupts.apply(&written.effects);
        if written.effects.decoding {
            self.publish(&shadow);
        }
        written.effects.decoding
    }

    fn decoded(&self) -> Vec<DecodedBar> {
        let waits = egm_address::fault!("bars-behind-an-answer").then(|| lock(&self.shadow));
        drop(waits);
        lock(&self.decoded).clone()
    }

    fn place(&self, bars: &[DecodedBar]) {
        if !self.is_gone() {
            self.windows.place(bars);
            // It may have gone meanwhile, and nothing else would withdraw these windows.
            if self.is_gone() {
                self.windows.withdraw();
            }
        }
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        if self.is_gone() {
            return data.fill(0xff);
        }
        for (at, range) in natural(offset, data.len()) {
            let Some(piece) = data.get_mut(range) else { continue };
            match self.own(bar, at) {
                Some((msix, Own::Table, inside)) => msix.table_read(inside, piece),
                Some((msix, Own::Pending, inside)) => msix.pending_read(inside, piece),
                None if self.has(RegionIndex::Bar(bar), at, piece.len()) => {
                    self.count(self.backend.read(RegionIndex::Bar(bar), at, piece));
                }
                None => piece.fill(0xff),
            }
        }
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        if self.is_gone() {
            return;
        }
        for (at, range) in natural(offset, data.len()) {
            let Some(piece) = data.get(range) else { continue };
            match self.own(bar, at) {
                Some((msix, Own::Table, inside)) => msix.table_write(inside, piece),
                Some((_, Own::Pending, _)) => {} // read-only (PCI Express Base 6.0 §7.7.2.3)
                None if self.has(RegionIndex::Bar(bar), at, piece.len()) => {
                    self.count(self.backend.write(RegionIndex::Bar(bar), at, piece));
                }
                None => {}
            }
        }
    }
}

impl Plugged for AssignedFunction {
    fn reset(&self, together: &[&str]) {
        lock(&self.decoded).clear();
        self.windows.withdraw();
        self.resets.fetch_add(1, Ordering::Relaxed);
        let mut shadow = lock(&self.shadow);
        self.interrupts.stop();
        self.reset_together(together);
        shadow.reset();
        self.start(&shadow);
        self.publish(&shadow);
    }

    fn end(&self) {
        let shadow = lock(&self.shadow);
        self.ended.store(true, Ordering::Relaxed);
        self.interrupts.stop();
        drop(shadow);
        // No writer may reach it between its reset and its next user.
        self.windows.end();
        // The kernel would wait a minute for the answer of one that is gone.
        if !self.is_gone() {
            self.reset_device();
        }
    }

    fn name(&self) -> &str {
        self.backend.name()
    }

    fn is_lost(&self) -> bool {
        self.is_gone()
    }

    fn look_if_lost(&self) -> bool {
        let mut class = [0; 4];
        let read = self.backend.read(RegionIndex::Config, REVISION_AND_CLASS, &mut class);
        // A refused read gives all ones too, and proves nothing.
        if read.is_ok() && class == [0xff; 4] {
            self.leave();
        }
        self.count(read);
        self.is_gone()
    }

    fn lose(&self) {
        self.gone.store(true, Ordering::Relaxed);
        self.windows.withdraw();
    }

    fn on_lost(&self, tell: Box<dyn Fn() + Send + Sync>) {
        let _ = self.tell.set(tell);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("unanswered accesses", self.failed.load(Ordering::Relaxed)),
            ("interrupts not connected", self.interrupts.refused()),
            ("BAR moves refused", self.windows.refused()),
            ("resets of its bus", self.resets.load(Ordering::Relaxed)),
        ]
    }
}

fn shadow_bar(bar: &BarPlan) -> Bar {
    let kind = match bar.kind {
        BarKind::Memory32 => ShadowKind::Memory32,
        BarKind::Memory64 => ShadowKind::Memory64,
        BarKind::Memory64Prefetchable => ShadowKind::Memory64Prefetchable,
    };
    Bar { index: bar.index, kind, span: bar.span }
}

fn shadow(backend: &dyn Backend, options: &Options) -> Result<Shadow, PassthroughError> {
    let size = usize::try_from(backend.region(RegionIndex::Config).size).unwrap_or(usize::MAX);
    let mut space = vec![0; size.min(CONFIG_SIZE)];
    backend.read(RegionIndex::Config, 0, &mut space)?;
    Shadow::new(&space, options)
        .map_err(|source| PassthroughError::Config { function: backend.name().to_owned(), source })
}
