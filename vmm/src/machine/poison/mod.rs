//! Guest memory that goes bad: recorded for its later owners, reported to the operator and to the guest.
//!
//! ```text
//!  KVM_RUN reads it ──► the vCPU gives itself a machine check (checks.rs)
//!        └────────────────────────┐
//!  SIGBUS, found early ──► Watch ─┴─► Poison ─┬─► Lease::retire, one line on standard error
//!  an EGM device's list ──► Growth ───────────┘└─► found, not read: a machine check for vCPU 0,
//!                                                  or where there are none a record in the tables (errors.rs)
//! ```

mod again;
mod checks;
mod errors;
mod mapped;
mod record;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_device::Backing as _;
use egm_device::device::{Function, in_slice};
use egm_device::poison::{Cause, Event, EventBatch, PoisonWatch, RetiredListPoll};
use egm_device::region::RegionKind;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::timerfd::TimerFd;

use self::again::Again;
pub(super) use self::checks::MachineChecks;
pub(super) use self::errors::{ErrorBlock, Interrupt};
use self::mapped::{MappedMemory, MappedPiece};
use crate::api::{Journal, MachineEvent};
use crate::arch::native::machine_check::Reporter;
use crate::error::Chain;
use crate::memory::GuestRam;
use crate::plan::{BackingPlan, Plan};
use crate::reserve::{Leases, Taken};

/// Interval of reads of an EGM device's list of retired pages: no event reports its growth.
const LOOK: Duration = Duration::from_secs(10);

/// One of the machine's memories.
struct Memory {
    /// Id of the backing, for messages.
    id: String,
    /// Its name in [`PoisonWatch`] and [`RetiredListPoll`]: the region, or for ordinary memory a name that no region
    /// can have.
    name: String,
    slice: Option<Arc<Taken>>,
    /// Function that has it behind a BAR, if any.
    device: Option<Function>,
    /// The device's list, where it has one that can still be read.
    growth: Option<RetiredListPoll>,
    /// Bytes known to be bad.
    bad: SpanSet<InRegion>,
    /// Whether the ledger's record of a slice of this process can be changed.
    has_ledger: bool,
}

/// The part of the event loop that handles bad memory.
pub(super) struct Poison {
    watch: PoisonWatch,
    checks: Arc<MachineChecks>,
    /// Reports bad memory that was not read yet to a guest without machine checks for that.
    errors: Option<ErrorBlock>,
    again: Again,
    memories: Vec<Memory>,
    journal: Arc<Journal>,
    /// Expires when the lists are due to be read.
    timer: TimerFd,
}

/// Ways to report bad memory to the guest, where it has them.
pub(super) struct Reports {
    pub(super) reporter: Option<Reporter>,
    /// Block of the firmware's tables.
    pub(super) errors: Option<ErrorBlock>,
    pub(super) journal: Arc<Journal>,
}

/// A slice that is a PCI function.
pub(super) struct SliceDevice {
    /// Id of the backing, and of the device.
    pub(super) id: String,
    pub(super) function: Function,
}

impl Memory {
    fn new(id: &str, slice: Option<Arc<Taken>>, device: Option<&Function>) -> Self {
        let region = slice.as_ref().map(|slice| slice.region());
        let name = region.map_or_else(|| format!("memory {id}"), |region| region.name.clone());
        let egm = region.filter(|region| matches!(region.kind, RegionKind::Egm { .. }));
        let growth = egm.map(|region| RetiredListPoll::new(region.clone()));
        let device = device.cloned();
        Self { id: id.to_owned(), name, slice, device, growth, bad: SpanSet::default(), has_ledger: true }
    }

    /// Offset of its first byte in the region.
    fn start(&self) -> u64 {
        self.slice.as_ref().map_or(0, |slice| slice.slice().offset)
    }
}

impl Poison {
    /// Watches the memory of `plan`; `devices` are the functions that have some of it behind BARs. Call it on the
    /// event loop's thread, which gets the signals, before the vCPUs have threads.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new(
        plan: &Plan,
        ram: &GuestRam,
        leases: &Leases,
        devices: &[SliceDevice],
        Reports { reporter, errors, journal }: Reports,
    ) -> io::Result<Self> {
        let mut watch = PoisonWatch::new()?;
        let memory = |backing: &BackingPlan| {
            let device = devices.iter().find(|device| device.id == backing.id);
            Memory::new(&backing.id, leases.get(&backing.id), device.map(|device| &device.function))
        };
        let memories: Vec<_> = plan.backings.iter().map(memory).collect();
        let mut pieces = Vec::new();
        for piece in &ram.pieces {
            let Some(memory) = memories.get(piece.backing) else { continue };
            let at = Offset::new(memory.start().saturating_add(piece.offset));
            let size = u64::try_from(piece.mapping.size()).unwrap_or(u64::MAX);
            let host = u64::try_from(piece.mapping.as_ptr().addr()).unwrap_or(u64::MAX);
            let spans = Span::new(piece.gpa, size).ok().zip(Span::new(at, size).ok());
            let Some((guest, bytes)) = spans else { continue };
            watch.add(&memory.name, at, &piece.mapping);
            pieces.push(MappedPiece { host, guest, memory: piece.backing, bytes });
        }
        let checks = Arc::new(MachineChecks::new(MappedMemory(pieces), reporter, plan.vcpus.len())?);
        let mut timer = TimerFd::new().map_err(io::Error::from)?;
        if memories.iter().any(|memory| memory.growth.is_some()) {
            timer.reset(LOOK, Some(LOOK)).map_err(io::Error::from)?;
        }
        Ok(Self { watch, checks, errors, again: Again::new()?, memories, journal, timer })
    }

    /// Adds slice `id`, which `function` has behind a BAR: it comes while the guest runs.
    pub(super) fn add(&mut self, id: &str, slice: Option<Arc<Taken>>, function: &Function) {
        let memory = Memory::new(id, slice, Some(function));
        if memory.growth.is_some() && self.timer.reset(LOOK, Some(LOOK)).is_err() {
            tracing::warn!("pages of \"{id}\" that the host retires while the guest runs are not noticed");
        }
        // No piece of RAM has the number of an entry that is empty.
        match self.memories.iter_mut().find(|other| other.name.is_empty()) {
            Some(empty) => *empty = memory,
            None => self.memories.push(memory),
        }
    }

    /// Removes slice `id`, which has left the guest. Its entry stays, empty: the others keep their numbers.
    pub(super) fn remove(&mut self, id: &str) {
        for memory in self.memories.iter_mut().filter(|memory| memory.id == id) {
            (memory.slice, memory.device, memory.growth) = (None, None, None);
            memory.name.clear(); // no event names it
        }
    }

    /// Leaves bad pages of this process's slices to the scrub after the machine's end: it runs in a sandbox, without the
    /// ledger's files.
    pub(super) fn leave_ledger(&mut self) {
        self.memories.iter_mut().for_each(|memory| memory.has_ledger = false);
    }

    /// Whether some of the guest's RAM is known to be bad.
    pub(super) fn has_bad_ram(&mut self) -> bool {
        self.collect();
        let is_ram = |(number, memory): (usize, &Memory)| {
            memory.bad.iter().any(|bad| self.checks.memory.of_bytes(number, bad).next().is_some())
        };
        self.memories.iter().enumerate().any(is_ram)
    }

    /// The same for several owners, and the machine checks, which vCPUs and the event loop share.
    pub(super) fn shared(self) -> (Arc<Mutex<Self>>, Arc<MachineChecks>) {
        let checks = Arc::clone(&self.checks);
        (Arc::new(Mutex::new(self)), checks)
    }

    /// Records and reports the events since the last call; also after the machine's end, which they may explain.
    pub(super) fn collect(&mut self) {
        let EventBatch { events, elsewhere, lost } = self.watch.take_events();
        events.into_iter().for_each(|event| self.event(&event));
        self.look_again();
        if elsewhere > 0 {
            tracing::warn!("bad memory of the VMM itself, {elsewhere} pages: it ends when it reads them");
        }
        if lost > 0 {
            tracing::warn!("{lost} bad pages came too fast to be noted: the slices' next scrub finds them");
        }
    }

    fn look_again(&mut self) {
        if self.errors.as_ref().is_some_and(ErrorBlock::waits) {
            self.again.set();
        }
    }

    fn look_at_lists(&mut self) {
        let mut events = Vec::new();
        for memory in &mut self.memories {
            let (Some(growth), Some(slice)) = (&mut memory.growth, &memory.slice) else { continue };
            match growth.look(slice.file()) {
                Ok(new) => events.extend(new),
                Err(error) => {
                    tracing::warn!("no more news of bad pages of \"{}\": {error}", memory.id);
                    memory.growth = None;
                }
            }
        }
        // Slices of one region have each read its list: `event` skips bytes that are known by then.
        events.iter().for_each(|event| self.event(event));
    }

    fn event(&mut self, event: &Event) {
        for (number, memory) in self.memories.iter_mut().enumerate() {
            if memory.name != event.memory {
                continue;
            }
            let bytes = match memory.slice.as_ref().map(|slice| slice.slice()) {
                Some(slice) => Span::new(Offset::new(slice.offset), slice.size.get()).ok(),
                None => Some(event.span),
            };
            let Some(span) = bytes.and_then(|bytes| bytes.intersection(event.span)) else { continue };
            let new = SpanSet::from_iter([span]).minus(&memory.bad);
            memory.bad = memory.bad.iter().chain([span]).collect();
            let guest = |bad| self.checks.memory.of_bytes(number, bad);
            let block_is_bad =
                |block: &mut ErrorBlock| new.iter().flat_map(guest).any(|bad| block.is_on(bad));
            let _ = self.errors.take_if(block_is_bad); // else the VMM itself would read the bad page
            for bad in new.iter() {
                memory.report(number, bad, event.cause, &self.checks, self.errors.as_mut());
                let (offset, size) = (bad.start().get(), bad.size());
                self.journal.publish(&MachineEvent::BadMemory { backing: memory.id.clone(), offset, size });
            }
        }
    }
}

impl Memory {
    /// Records `bad`, newly bad bytes of memory `number`, and reports them to guest, device and operator.
    fn report(
        &self,
        number: usize,
        bad: Span<InRegion>,
        cause: Cause,
        checks: &MachineChecks,
        mut errors: Option<&mut ErrorBlock>,
    ) {
        let recordable = self.slice.as_ref().filter(|slice| self.has_ledger || slice.is_of_broker());
        let recorded = recordable.map(|slice| slice.retire(&SpanSet::from_iter([bad])));
        let mut line = format!("bad memory: \"{}\", {:#x} bytes at {:#x}", self.id, bad.size(), bad.start());
        if let Some(slice) = &self.slice {
            line.push_str(&format!(" of region \"{}\"", slice.region().name));
        }
        let (mut reported, mut unreported) = (cause == Cause::Consumed, false);
        for guest in checks.memory.of_bytes(number, bad) {
            line.push_str(&format!(", guest address {:#x}", guest.start()));
            if cause != Cause::Consumed {
                let accepted =
                    checks.found(guest) || errors.as_mut().is_some_and(|block| block.report(guest));
                reported |= accepted;
                unreported |= !accepted;
            }
        }
        if let (Some(device), Some(slice)) = (&self.device, &self.slice) {
            device.retire(&in_slice(slice.slice(), &SpanSet::from_iter([bad])));
            reported = true;
        }
        line.push_str(match cause {
            Cause::Consumed => "; the guest read it",
            Cause::Found | Cause::Listed if reported && unreported => "; reported to the guest in part",
            Cause::Found | Cause::Listed if reported => "; reported to the guest",
            Cause::Found | Cause::Listed => "; cannot be reported to the guest",
        });
        match recorded {
            Some(Ok(())) => line.push_str(", no later owner gets it"),
            Some(Err(error)) => line.push_str(&format!(
                "; a later owner may get it, without a record: {}",
                Chain(error.as_ref())
            )),
            None if self.slice.is_some() => {
                line.push_str("; it is recorded only if the scrub after the machine's end finds it")
            }
            None => {}
        }
        tracing::warn!("{line}");
    }
}

impl MutEventSubscriber for Poison {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        if events.fd() == self.timer.as_raw_fd() {
            let _ = self.timer.wait();
            self.look_at_lists();
            self.look_again();
        } else if events.fd() == self.again.as_raw_fd() {
            self.again.take();
            self.again.expired(self.errors.as_mut().is_none_or(ErrorBlock::go_on));
            self.look_again();
        } else if events.fd() == self.checks.wake.as_raw_fd() {
            let _ = self.checks.wake.read(); // the event loop looks into the boxes after each turn
        } else {
            self.collect();
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(&self.watch.as_fd(), EventSet::IN));
        let _ = ops.add(Events::new(&self.checks.wake, EventSet::IN));
        let _ = ops.add(Events::new(&self.timer, EventSet::IN));
        let _ = ops.add(Events::new(&self.again, EventSet::IN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_memory_is_in_the_journal_once_however_often_it_is_reported() {
        let journal = Journal::opened();
        let mut poison = Poison {
            watch: PoisonWatch::new().unwrap(),
            checks: Arc::new(MachineChecks::new(MappedMemory(Vec::new()), None, 0).unwrap()),
            errors: None,
            again: Again::new().unwrap(),
            memories: vec![Memory::new("node0", None, None)],
            journal: Arc::clone(&journal),
            timer: TimerFd::new().unwrap(),
        };
        let event = |start, memory: &str| {
            let span = Span::new(Offset::new(start), 8192).unwrap();
            Event { memory: memory.to_owned(), span, cause: Cause::Found }
        };
        for start in [4096, 4096, 8192] {
            poison.event(&event(start, "memory node0"));
            poison.event(&event(start, "of another machine"));
        }
        let found: Vec<_> =
            journal.values().iter().map(|e| (e["offset"].as_u64(), e["size"].as_u64())).collect();
        assert_eq!(found, [(Some(4096), Some(8192)), (Some(12288), Some(4096))]);
        assert_eq!(journal.values()[0]["backing"], "node0");
    }
}
