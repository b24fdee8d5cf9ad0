//! Memory that becomes bad while it is in use.
//!
//! ```text
//! SIGBUS ─► signal.rs ─► a page under guard (scrub): replaced, an error with its offset
//!                    ├─► a guest's page, or one found early: ring.rs ─► Watch ─► Event
//!                    └─► anything else: the process dies, as without us
//! the device's list ─► Growth ─► Event
//! ```
//! An [`Event`] names memory and bytes: the ledger retires them, the VM notifies its guest. The vCPU that hit a bad
//! page also gets it from [`in_guest`], since its guest cannot continue.

mod ring;
mod signal;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use egm_address::{InRegion, Offset, Span};
use rustix::process::{
    MachineCheckMemoryCorruptionKillPolicy as Policy, set_machine_check_memory_corruption_kill_policy,
};

use crate::backing::{RetiredListError, RetiredPages, retired_pages};
use crate::mapping::Mapping;
use crate::region::Region;
use crate::retired::Retired;
use ring::Fault;

/// Source of the knowledge of a bad page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A guest touched it (BUS_MCEERR_AR): it waits for a machine check.
    Consumed,
    /// The hardware found it before any access (BUS_MCEERR_AO).
    Found,
    /// The device lists it as retired since the last read.
    Listed,
}

/// Bytes of watched memory that are bad from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The name that the memory was added under; for a [`RetiredListPoll`], its region.
    pub memory: String,
    /// The bytes in it.
    pub span: Span<InRegion>,
    /// Source of the knowledge.
    pub cause: Cause,
}

/// Result of one read of the queued signals.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// Bad bytes of watched memory, each once.
    pub events: Vec<Event>,
    /// Bad pages of this process that belong to no watched memory: still unread; a read kills the process.
    pub elsewhere: usize,
    /// Faults that were dropped because 64 were already queued.
    pub lost: u64,
}

#[derive(Debug)]
struct Watched {
    start: u64,
    size: u64,
    memory: String,
    at: u64,
}

/// Watches mapped memory for bad pages. One per process: two would take each other's events.
#[derive(Debug)]
pub struct PoisonWatch {
    wake: OwnedFd,
    watched: Vec<Watched>,
    batch: EventBatch,
}

impl PoisonWatch {
    /// Installs the SIGBUS handler and asks the kernel to notify the calling thread, while it lives and does not block
    /// SIGBUS, of bad pages before they are touched; a kernel without `CONFIG_MEMORY_FAILURE` never does.
    pub fn new() -> io::Result<Self> {
        let wake = signal::install()?.try_clone()?;
        let _ = set_machine_check_memory_corruption_kill_policy(Some(Policy::Early));
        Ok(Self { wake, watched: Vec::new(), batch: EventBatch::default() })
    }

    /// Watches `mapping`, which begins at byte `at` of the memory that events name as `memory`.
    pub fn add(&mut self, memory: &str, at: Offset, mapping: &Mapping) {
        let (start, size) = range(mapping);
        self.watched.push(Watched { start, size, memory: memory.to_owned(), at: at.get() });
    }

    /// Stops watching `mapping`, before its drop, because its addresses may be used again. Earlier faults are kept.
    pub fn remove(&mut self, mapping: &Mapping) {
        self.collect();
        let (start, _) = range(mapping);
        self.watched.retain(|watched| watched.start != start);
    }

    /// Everything since the last call; never waits.
    pub fn take_events(&mut self) -> EventBatch {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]); // before the ring: what comes in between wakes again
        self.collect();
        std::mem::take(&mut self.batch)
    }

    fn collect(&mut self) {
        let (faults, lost) = signal::RING.take();
        self.batch.lost = self.batch.lost.saturating_add(lost);
        for fault in faults {
            match self.watched.iter().find_map(|watched| watched.event(fault)) {
                Some(event) => self.batch.events.push(event),
                None => self.batch.elsewhere = self.batch.elsewhere.saturating_add(1),
            }
        }
    }
}

impl AsFd for PoisonWatch {
    /// Readable when an event is queued.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Watched {
    fn event(&self, fault: Fault) -> Option<Event> {
        let first = fault.address.max(self.start);
        let end = fault.address.saturating_add(fault.size).min(self.start.saturating_add(self.size));
        let inside = |address: u64| Some(Offset::new(address.checked_sub(self.start)?.checked_add(self.at)?));
        let span = Span::between(inside(first)?, inside(end)?)?;
        let cause = if fault.consumed { Cause::Consumed } else { Cause::Found };
        Some(Event { memory: self.memory.clone(), span, cause })
    }
}

fn range(mapping: &Mapping) -> (u64, u64) {
    let number = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    (number(mapping.as_ptr().addr()), number(mapping.size()))
}

/// A bad page that this thread's guest touched, by this process's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestFault {
    /// First bad byte, a multiple of `size`.
    pub address: u64,
    /// Bad bytes, a power of two, 4 KiB at least.
    pub size: u64,
}

/// Runs `work`, which runs a guest (`KVM_RUN`) and touches no guest memory itself: a bad page that the guest touches
/// becomes an event, does not kill, and is returned. Unless the guest is notified, it touches the page again.
pub fn in_guest<T>(work: impl FnOnce() -> T) -> (T, Option<GuestFault>) {
    let (result, fault) = signal::in_guest(work);
    (result, fault.map(|Fault { address, size, .. }| GuestFault { address, size }))
}

/// A bad page hit by a guarded access: offset in the mapping and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadPage {
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

/// Runs `work`, which touches `mapping` only, with pages of `page` bytes; a bad page becomes an error. After one,
/// `mapping` is other memory from that page on: its owner throws it away.
pub(crate) fn guarded(
    mapping: &Mapping,
    page: usize,
    work: impl FnOnce(),
) -> io::Result<Result<(), BadPage>> {
    signal::install()?;
    let bad = signal::guarded(mapping, page, work);
    Ok(bad.map_or(Ok(()), |(offset, size)| Err(BadPage { offset, size })))
}

/// Polls a device's list of retired pages: the device sends no notification when it grows.
#[derive(Debug)]
pub struct RetiredListPoll {
    region: Region,
    known: Retired,
}

impl RetiredListPoll {
    /// Starts with the retired pages of `region` as the known ones.
    #[must_use]
    pub fn new(region: Region) -> Self {
        let known = region.retired.clone();
        Self { region, known }
    }

    /// The bytes that `device` lists and that were not known. Call it every few seconds.
    ///
    /// # Errors
    /// [`RetiredListError`]; the known pages stay known.
    pub fn look(&mut self, device: &impl RetiredPages) -> Result<Vec<Event>, RetiredListError> {
        let now = retired_pages(device, &self.region)?;
        let new = now.spans().minus(self.known.spans());
        let all =
            now.spans().iter().chain(self.known.spans().iter()).map(|span| (span.start().get(), span.size()));
        self.known = Retired::new(all.collect::<Vec<_>>(), self.region.size.get(), 1);
        let event = |span| Event { memory: self.region.name.clone(), span, cause: Cause::Listed };
        Ok(new.iter().map(event).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::tests::region;
    use crate::region::RegionKind;

    const SLICE: Watched = Watched { start: 0x10_0000, size: 0x4000, memory: String::new(), at: 0x8000 };

    #[test]
    fn a_fault_is_placed_in_its_region_and_clipped_to_its_slice() {
        let place = |address, shift| {
            SLICE.event(Fault::new(address, shift, true)).map(|e| (e.span.start().get(), e.span.size()))
        };
        assert_eq!(place(0x10_1234, 12), Some((0x9000, 0x1000)));
        assert_eq!(place(0x10_3fff, 12), Some((0xb000, 0x1000)));
        assert_eq!(place(0x10_1000, 21), Some((0x8000, 0x4000)));
        assert_eq!((place(0x10_4000, 12), place(0xf_ffff, 12)), (None, None));
    }

    struct List(Vec<(u64, u64)>);

    impl RetiredPages for List {
        fn fill(&self, buffer: &mut [u8]) -> io::Result<()> {
            buffer[..4].copy_from_slice(&8u32.to_ne_bytes());
            buffer[4..8].copy_from_slice(&u32::try_from(self.0.len()).unwrap().to_ne_bytes());
            for ((offset, size), to) in self.0.iter().zip(buffer[8..].chunks_exact_mut(16)) {
                to[..8].copy_from_slice(&offset.to_ne_bytes());
                to[8..].copy_from_slice(&size.to_ne_bytes());
            }
            Ok(())
        }
    }

    #[test]
    fn a_page_that_a_device_lists_later_is_an_event_once() {
        let egm = RegionKind::Egm { device: "/dev/egm4".into() };
        let mut region = region(egm, 0x100_0000, 0x1_0000);
        region.retired = Retired::new([(0, 0x1_0000)], 0x100_0000, 0x1_0000);
        let mut growth = RetiredListPoll::new(region);
        assert_eq!(growth.look(&List(vec![(0, 0x1000)])).unwrap(), []);
        let events = growth.look(&List(vec![(0x2_3000, 0x1000), (0, 0x1000)])).unwrap();
        let spans: Vec<_> = events.iter().map(|e| (e.span.start().get(), e.span.size(), e.cause)).collect();
        assert_eq!(spans, [(0x2_0000, 0x1_0000, Cause::Listed)]);
        assert_eq!(growth.look(&List(vec![(0x2_3000, 0x1000)])).unwrap(), []);
    }
}
