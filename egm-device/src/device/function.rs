//! The function: its state behind a lock, its bytes, its vectors.
//!
//! A [`Function`] is a handle: every source of events on the slice has one, and each client gets a [`Connected`], its
//! state until it leaves. No lock is held while a scrub runs. Firing a vector never waits, so a lock may be held.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use egm_address::{CpuSet, InBar, SpanSet};
use egm_vfio_wire::message::{DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::{Device, Windows};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::config::{Config, Id, LENGTH};
use super::core::{Core, Effect, Facts};
use super::interrupts::Interrupts;
use super::memory::{Effort, SliceMemory, areas};
use super::registers::SIZE;
use crate::backing::Backing;
use crate::scrub::ScrubError;

const BAR0: u32 = 0;
const BAR2: u32 = 2;
const CONFIG: u32 = 7;

/// A time limit that is longer than any machine runs, and short enough to be added to a clock.
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);

/// Receives bytes that an access by the function found bad.
pub type BadBytes = dyn Fn(&SpanSet<InBar>) + Send + Sync;

/// Receives the end of each scrub that a client asked for, before the guest sees it.
pub type ScrubEnd = dyn Fn(&Result<(), ScrubError>) + Send + Sync;

/// Parameters of a function.
pub struct Setup {
    /// PCI vendor and device id.
    pub id: Id,
    /// Constants of the slice.
    pub facts: Facts,
    /// Bytes of it that are out of use.
    pub retired: SpanSet<InBar>,
    /// Receives more such bytes.
    pub bad: Box<BadBytes>,
    /// Receives the end of each scrub.
    pub scrubbed: Box<ScrubEnd>,
    /// The host processors near the slice, where known.
    pub near: Option<CpuSet>,
}

/// A slice as a PCI function.
#[derive(Clone)]
pub struct Function(Arc<Shared>);

struct Shared {
    memory: SliceMemory,
    bar: u64,
    bad: Box<BadBytes>,
    scrub_end: Box<ScrubEnd>,
    /// Bytes that the running scrub has made zero. Its workers run when processors are idle, so they take no lock.
    scrubbed: AtomicU64,
    state: Mutex<LockedState>,
    /// The guest has quiesced, or its client has left.
    unused: Condvar,
}

struct LockedState {
    core: Core,
    config: Config,
    interrupts: Interrupts,
    /// Number of connected clients: none or one behind a socket.
    clients: usize,
    /// It is served no more: no scrub begins.
    closed: bool,
    /// Ends the scrub that runs, if one does.
    cancel: Arc<AtomicBool>,
    /// The last scrub that the guest asked for.
    scrub: Option<JoinHandle<()>>,
}

impl LockedState {
    /// The cancel flag of the next scrub; it is set already if the function is closed.
    fn may_scrub(&mut self) -> Arc<AtomicBool> {
        self.cancel = Arc::new(AtomicBool::new(self.closed));
        self.cancel.clone()
    }
}

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Function").field("core", &self.state().core).finish_non_exhaustive()
    }
}

impl Function {
    /// A function over `backing`, of which it keeps a descriptor.
    ///
    /// # Errors
    /// The kernel's, for that descriptor.
    pub fn new(setup: Setup, backing: &dyn Backing) -> io::Result<Self> {
        let Setup { id, facts, retired, bad, scrubbed: scrub_end, near } = setup;
        let config = Config::new(id, &facts);
        let core = Core::new(facts, retired);
        let (interrupts, cancel) = (Interrupts::default(), Arc::default());
        let state = LockedState { core, config, interrupts, clients: 0, closed: false, cancel, scrub: None };
        let (memory, scrubbed) = (SliceMemory::of(backing, near)?, AtomicU64::new(0));
        let (state, unused) = (Mutex::new(state), Condvar::new());
        Ok(Self(Arc::new(Shared { memory, bar: facts.bar(), bad, scrub_end, scrubbed, state, unused })))
    }

    /// Connects one client, until it leaves.
    #[must_use]
    pub fn connect(&self) -> Connected {
        let mut state = self.state();
        state.clients = state.clients.saturating_add(1);
        drop(state);
        Connected { function: self.clone(), windows: Windows::default(), socket: None, owes_reset: false }
    }

    /// Bytes of the slice went bad: the guest gets an event for those that are new.
    pub fn retire(&self, bad: &SpanSet<InBar>) {
        self.update_core(|core| core.retire(bad));
    }

    /// Requests the slice back from the guest and its VMM.
    pub fn request_return(&self) {
        self.update_core(Core::request_return);
    }

    /// Waits until the guest has quiesced, no client is left, or `timeout` is over; true if the memory is unused.
    #[must_use]
    pub fn wait_unused(&self, timeout: Duration) -> bool {
        let end = Instant::now().checked_add(timeout.min(LONGEST));
        let mut state = self.state();
        loop {
            let left = end.and_then(|end| end.checked_duration_since(Instant::now()));
            match left {
                _ if state.clients == 0 || state.core.is_quiesced() => return true,
                Some(left) if !left.is_zero() => {
                    let waited = self.0.unused.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                _ => return false,
            }
        }
    }

    fn update_core(&self, step: impl FnOnce(&mut Core) -> Effect) {
        let mut state = self.state();
        let effect = step(&mut state.core);
        self.carry_out(&mut state, effect);
    }

    fn state(&self) -> MutexGuard<'_, LockedState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_out(&self, state: &mut LockedState, effect: Effect) {
        match effect {
            Effect::Nothing => {}
            Effect::Fire(events) => events.iter().for_each(|event| state.interrupts.fire(*event)),
            Effect::Quiesced => self.0.unused.notify_all(),
            Effect::Scrub => self.begin_scrub(state),
        }
    }

    /// Scrubs on a thread: the guest waits by looking at its registers, and goes on with other things.
    fn begin_scrub(&self, state: &mut LockedState) {
        let (function, cancel) = (self.clone(), state.may_scrub());
        let work = move || {
            let _ = function.scrub(&cancel, Effort::Doorbell);
        };
        match thread::Builder::new().name("scrub".into()).spawn(work) {
            // The one before has ended: that is why another may begin.
            Ok(thread) => state.scrub = Some(thread),
            Err(_) => {
                let _ = state.core.scrub_ended(false); // none follows
            }
        }
    }

    /// Makes all usable bytes zero and reports it, once more where the doorbell was rung meanwhile.
    fn scrub(&self, cancel: &AtomicBool, effort: Effort) -> Result<(), Errno> {
        let Shared { memory, scrubbed, scrub_end, .. } = &*self.0;
        loop {
            scrubbed.store(0, Ordering::Relaxed);
            let usable = self.state().core.usable();
            let progress = |bytes| {
                scrubbed.fetch_max(bytes, Ordering::Relaxed);
            };
            let (bad, end) = memory.scrub(&usable, effort, &progress, cancel);
            self.found_bad(&bad);
            scrub_end(&end);
            let mut state = self.state();
            state.core.scrubbed(scrubbed.load(Ordering::Relaxed));
            if state.core.scrub_ended(end.is_ok()) != Effect::Scrub {
                return end.map_err(|_| Errno::IO);
            }
        }
    }

    /// Ends a running scrub, also a reset's, and prevents new ones: a client may have requested thousands before it was
    /// cut off. The owner scrubs the bytes that the slice's ledger records as dirty. A client with a guest that has not
    /// quiesced gets the error interrupt: it has lost the device.
    pub fn close(&self) {
        let mut state = self.state();
        if !state.closed && !state.core.is_quiesced() {
            state.interrupts.fail();
        }
        state.closed = true;
        state.cancel.store(true, Ordering::Relaxed);
    }

    /// Ends the scrub that the guest asked for, and waits for that.
    fn end_scrub(&self) {
        let mut state = self.state();
        state.cancel.store(true, Ordering::Relaxed);
        let scrub = state.scrub.take();
        drop(state);
        // Its registers show how it ended.
        scrub.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Resets it; returns when all is done, a scrub too.
    fn reset(&self) -> Result<(), Errno> {
        self.end_scrub();
        let mut state = self.state();
        state.config.reset();
        let effect = state.core.reset();
        let cancel = state.may_scrub();
        drop(state);
        if effect == Effect::Scrub { self.scrub(&cancel, Effort::Reset) } else { Ok(()) }
    }

    fn found_bad(&self, bad: &SpanSet<InBar>) {
        if !bad.is_empty() {
            (self.0.bad)(bad);
            self.retire(bad);
        }
    }

    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        let some = RegionInfo { index, read: true, write: true, ..RegionInfo::default() };
        match index {
            BAR0 => (RegionInfo { size: SIZE.into(), ..some }, None),
            BAR2 => {
                let memory = &self.0.memory;
                let areas = areas(&self.state().core.usable(), memory.page());
                let (mmap, offset) = (!areas.is_empty(), memory.offset());
                let info = RegionInfo { size: self.0.bar, offset, mmap, areas, ..some };
                (info, mmap.then(|| memory.descriptor()))
            }
            CONFIG => (RegionInfo { size: LENGTH as u64, ..some }, None),
            _ => (RegionInfo { index, ..RegionInfo::default() }, None),
        }
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        match region {
            BAR0 => {
                let mut state = self.state();
                if state.core.is_scrubbing() {
                    state.core.scrubbed(self.0.scrubbed.load(Ordering::Relaxed));
                }
                state.core.read(offset, data);
            }
            BAR2 => {
                let usable = self.state().core.usable();
                let bad = self.0.memory.read(offset, data, &usable);
                self.found_bad(&bad);
            }
            CONFIG => self.state().config.read(offset, data),
            _ => {}
        }
    }

    /// True when it asks for a reset.
    #[must_use]
    fn write(&self, region: u32, offset: u64, data: &[u8]) -> bool {
        match region {
            BAR0 => {
                let mut state = self.state();
                let effect = state.core.write(offset, data);
                self.carry_out(&mut state, effect);
            }
            BAR2 => {
                let usable = self.state().core.usable();
                let bad = self.0.memory.write(offset, data, &usable);
                self.found_bad(&bad);
            }
            CONFIG => return self.state().config.write(offset, data),
            _ => {}
        }
        false
    }
}

/// A function with the state of one client: windows on its memory, and eventfds.
#[derive(Debug)]
pub struct Connected {
    function: Function,
    windows: Windows,
    /// The connection, where there is one.
    socket: Option<OwnedFd>,
    /// It asked for resets and did not wait for them.
    owes_reset: bool,
}

impl Connected {
    /// The client is at the other end of `socket`. Before it hung up, it may have sent thousands of resets, each with a
    /// scrub. No client waits for their end, so one reset is done for all of them.
    #[must_use]
    pub fn over(mut self, socket: OwnedFd) -> Self {
        self.socket = Some(socket);
        self
    }

    fn has_hung_up(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| {
            let mut ended = [PollFd::new(socket, PollFlags::empty())];
            let looked = poll(&mut ended, Some(&Timespec::default()));
            looked.is_ok() && ended[0].revents().contains(PollFlags::HUP)
        })
    }
}

impl Device for Connected {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { resettable: true, regions: 9, irqs: 5 }
    }

    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        self.function.region(index)
    }

    fn irq(&self, index: u32) -> IrqInfo {
        Interrupts::info(index, self.function.state().core.facts().msix)
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        self.function.read(region, offset, data);
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        if self.function.write(region, offset, data) {
            let _ = self.reset();
        }
    }

    fn reaches_memory(&self) -> bool {
        false // the function does no DMA
    }

    fn dma_map(&mut self, map: DmaMap, _file: Option<OwnedFd>) -> Result<(), Errno> {
        self.windows.map(map, None)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.windows.unmap(unmap)
    }

    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        let mut state = self.function.state();
        let wanted = state.core.is_wanted();
        state.interrupts.set(set, eventfds, wanted)
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.owes_reset = self.has_hung_up();
        if self.owes_reset { Ok(()) } else { self.function.reset() }
    }

    fn disconnected(&mut self) {
        self.windows = Windows::default();
        let mut state = self.function.state();
        state.interrupts.clear();
        state.core.left();
        drop(state);
        // The next guest's bytes must not be hit by this one's scrub.
        self.function.end_scrub();
        if std::mem::take(&mut self.owes_reset) {
            let _ = self.function.reset();
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut state = self.function.state();
        state.clients = state.clients.saturating_sub(1);
        drop(state);
        self.function.0.unused.notify_all();
    }
}
