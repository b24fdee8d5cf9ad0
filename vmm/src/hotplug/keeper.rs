//! Who brings functions and takes them away: a thread, and its steps without it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use egm_address::PciAddress;
use egm_vfio::backend::InterruptKind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Event, Handle, HotplugError, Left, PATIENCE, Request, Running, Source, What};
use crate::passthrough::{Ears, borrowed};
use crate::pci::{Duty, Plugged, Port, RootComplex};
use crate::plan::BridgePlan;

/// Longer than any machine runs, and short enough to be added to a clock.
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);

/// A function and what is heard of it.
pub(crate) struct New {
    pub(crate) function: Arc<dyn Plugged>,
    pub(crate) ears: Option<Ears>,
}

/// Makes a guest's function of the host's: its id, where it is, and the bridges of the free slots, of which it chooses one by
/// position.
pub(crate) type Maker =
    Box<dyn Fn(&str, PciAddress, &[BridgePlan]) -> Result<(usize, New), HotplugError> + Send>;

/// A hot-plug port.
pub(crate) struct Berth {
    pub(crate) port: Arc<Port>,
    /// Physical number of its slot.
    pub(crate) slot: u16,
    pub(crate) bridge: BridgePlan,
    pub(crate) occupant: Option<Occupant>,
}

/// A function that the guest has.
pub(crate) struct Occupant {
    pub(crate) id: String,
    pub(crate) new: New,
    /// The guest was asked to let it go.
    pub(crate) leaving: Option<Leaving>,
}

/// When it goes without the guest's leave, and who waits for it to be gone.
pub(crate) struct Leaving {
    until: Instant,
    answer: Option<Sender<Result<Left, HotplugError>>>,
}

impl Occupant {
    pub(crate) fn new(id: &str, new: New) -> Self {
        Self { id: id.to_owned(), new, leaving: None }
    }

    fn event(&self, what: What) -> Event {
        Event { id: self.id.clone(), function: self.new.function.name().to_owned(), what }
    }

    fn heard(&mut self) -> Vec<InterruptKind> {
        self.new.ears.as_mut().map(Ears::hear).unwrap_or_default()
    }
}

/// The functions of a machine.
pub(crate) struct Keeper {
    root: Arc<RootComplex>,
    berths: Vec<Berth>,
    /// Those behind no hot-plug port: they stay.
    fixed: Vec<Occupant>,
    maker: Maker,
    report: Box<dyn Fn(&Event) + Send>,
    handle: Handle,
    requests: Receiver<Request>,
    ended: bool,
}

impl Keeper {
    /// Keeps what is in `berths` and what is `fixed`; `report` hears of what happens.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn new(
        root: Arc<RootComplex>,
        berths: Vec<Berth>,
        fixed: Vec<Occupant>,
        maker: Maker,
        report: Box<dyn Fn(&Event) + Send>,
    ) -> io::Result<Self> {
        let (sender, requests) = channel();
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        for berth in &berths {
            let wake = Arc::clone(&wake);
            berth.port.on_duty(move || drop(wake.write(1)));
        }
        let handle = Handle { requests: sender, wake };
        let keeper = Self { root, berths, fixed, maker, report, handle, requests, ended: false };
        keeper.occupants().for_each(|occupant| keeper.listen(occupant));
        Ok(keeper)
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// When the host gives none.
    pub(crate) fn start(self) -> io::Result<Running> {
        let handle = self.handle.clone();
        let thread = thread::Builder::new().name("hotplug".to_owned()).spawn(move || self.run())?;
        Ok(Running { handle, thread: Some(thread) })
    }

    fn occupants(&self) -> impl Iterator<Item = &Occupant> {
        self.berths.iter().filter_map(|berth| berth.occupant.as_ref()).chain(&self.fixed)
    }

    /// A function that finds out that it is gone wakes the keeper.
    fn listen(&self, occupant: &Occupant) {
        let wake = Arc::clone(&self.handle.wake);
        occupant.new.function.on_lost(Box::new(move || drop(wake.write(1))));
    }

    fn run(mut self) -> Vec<String> {
        loop {
            let next = self.turn(Instant::now());
            if self.ended {
                return self.end();
            }
            self.wait(next.map(|next| next.saturating_duration_since(Instant::now())));
        }
    }

    fn wait(&self, limit: Option<Duration>) {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let ears = self.occupants().filter_map(|occupant| occupant.new.ears.as_ref());
        let fds = std::iter::once(borrowed(&self.handle.wake)).chain(ears.flat_map(Ears::descriptors));
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // Whatever it says, the next turn looks at everything.
        let _ = poll(&mut fds, limit.as_ref());
    }

    /// Does all that is to be done now; says when there will be more, if nobody comes before.
    pub(crate) fn turn(&mut self, now: Instant) -> Option<Instant> {
        let _ = self.handle.wake.read();
        while let Ok(request) = self.requests.try_recv() {
            match request {
                Request::Plug { id, source, answer } => drop(answer.send(self.plug(&id, source))),
                Request::Unplug { id, patience, answer } => self.unplug(&id, now, patience, answer),
                Request::End => self.ended = true,
            }
        }
        self.hear(now);
        self.reset();
        for berth in 0..self.berths.len() {
            self.let_go(berth, now);
        }
        let leaving = self.occupants().filter_map(|occupant| occupant.leaving.as_ref());
        leaving.map(|leaving| leaving.until).min()
    }

    /// What the host says.
    fn hear(&mut self, now: Instant) {
        for occupant in &mut self.fixed {
            for kind in occupant.heard() {
                let what = match kind {
                    InterruptKind::Error if occupant.new.function.is_lost(true) => {
                        occupant.new.function.lose();
                        What::LostFixed
                    }
                    InterruptKind::Error => What::FailedFixed,
                    _ => What::WantedFixed,
                };
                (self.report)(&occupant.event(what));
            }
        }
        for index in 0..self.berths.len() {
            let Some(occupant) = self.berths.get_mut(index).and_then(|berth| berth.occupant.as_mut()) else {
                continue;
            };
            let heard = occupant.heard();
            let failed = heard.contains(&InterruptKind::Error);
            let lost = occupant.new.function.is_lost(failed);
            if lost || failed {
                let what = if lost { What::Lost } else { What::Failed };
                (self.report)(&occupant.event(what));
                self.take(index, Left::Surprise);
            } else if heard.contains(&InterruptKind::Request) && occupant.leaving.is_none() {
                (self.report)(&occupant.event(What::Wanted(PATIENCE)));
                self.ask_guest(index, now, PATIENCE, None);
            }
        }
    }

    /// Resets what the guest has cut off; at the same time, as far as that matters to them.
    fn reset(&self) {
        let due = |berth: &Berth| match (berth.port.duty(), &berth.occupant) {
            (Some(Duty::Reset(times)), Some(occupant)) => {
                Some((Arc::clone(&berth.port), times, Arc::clone(&occupant.new.function)))
            }
            _ => None,
        };
        let due: Vec<_> = self.berths.iter().filter_map(due).collect();
        let names: Vec<&str> = due.iter().map(|(_, _, function)| function.name()).collect();
        for (port, times, function) in &due {
            function.reset(&names);
            port.fresh(*times);
        }
        if !due.is_empty() {
            self.root.update();
        }
    }

    /// A function that the guest has let go, or not in time, goes.
    fn let_go(&mut self, index: usize, now: Instant) {
        let Some(berth) = self.berths.get(index) else { return };
        let late = berth.occupant.as_ref().and_then(|occupant| occupant.leaving.as_ref());
        if berth.port.duty() == Some(Duty::Pull) {
            self.take(index, Left::Orderly);
        } else if late.is_some_and(|leaving| leaving.until <= now) {
            self.take(index, Left::Surprise);
        }
    }

    /// Takes out what is in a berth; the guest is told, the host gets it back.
    fn take(&mut self, index: usize, left: Left) {
        let Some(berth) = self.berths.get_mut(index) else { return };
        let Some(occupant) = berth.occupant.take() else { return };
        // A guest that let it go is told when it is gone, the other at once.
        if left == Left::Surprise {
            berth.port.pull();
            self.root.update();
        }
        occupant.new.function.end();
        berth.port.pull();
        self.root.update();
        for (what, number) in occupant.new.function.counters() {
            if number > 0 {
                (self.report)(&occupant.event(What::Counted(what, number)));
            }
        }
        let (gone, answer) =
            (occupant.event(What::Removed(left)), occupant.leaving.and_then(|leaving| leaving.answer));
        drop(occupant.new); // closes it
        (self.report)(&gone);
        if let Some(answer) = answer {
            let _ = answer.send(Ok(left));
        }
    }

    fn plug(&mut self, id: &str, source: Source) -> Result<u16, HotplugError> {
        let named = || id.to_owned();
        if self.occupants().any(|occupant| occupant.id == id) {
            return Err(HotplugError::Taken { id: named() });
        }
        let free = self.berths.iter().enumerate().filter(|(_, berth)| berth.occupant.is_none());
        let free: Vec<(usize, BridgePlan)> = free.map(|(index, berth)| (index, berth.bridge)).collect();
        if free.is_empty() {
            return Err(HotplugError::NoSlot { id: named() });
        }
        let (chosen, new) = match source {
            Source::Function(function) => (0, New { function, ears: None }),
            Source::Host(address) => {
                let bridges: Vec<_> = free.iter().map(|(_, bridge)| *bridge).collect();
                (self.maker)(id, address, &bridges)?
            }
        };
        let occupant = Occupant::new(id, new);
        self.listen(&occupant);
        let berth = free.get(chosen).and_then(|(index, _)| self.berths.get_mut(*index));
        let berth = berth.ok_or_else(|| HotplugError::NoSlot { id: named() })?;
        berth.port.insert(Arc::clone(&occupant.new.function));
        (self.report)(&occupant.event(What::Plugged(berth.slot)));
        berth.occupant = Some(occupant);
        let slot = berth.slot;
        self.root.update();
        Ok(slot)
    }

    fn unplug(
        &mut self,
        id: &str,
        now: Instant,
        patience: Duration,
        answer: Sender<Result<Left, HotplugError>>,
    ) {
        let occupied = |berth: &Berth| berth.occupant.as_ref().is_some_and(|occupant| occupant.id == id);
        let index = self.berths.iter().position(occupied);
        let leaving = index.and_then(|index| self.berths.get(index)?.occupant.as_ref()?.leaving.as_ref());
        let error = match (index, leaving) {
            (Some(index), None) => return self.ask_guest(index, now, patience, Some(answer)),
            (Some(_), Some(_)) => HotplugError::Leaving { id: id.to_owned() },
            (None, _) => HotplugError::Unknown { id: id.to_owned() },
        };
        let _ = answer.send(Err(error));
    }

    fn ask_guest(
        &mut self,
        index: usize,
        now: Instant,
        patience: Duration,
        answer: Option<Sender<Result<Left, HotplugError>>>,
    ) {
        let Some(berth) = self.berths.get_mut(index) else { return };
        if let Some(occupant) = &mut berth.occupant {
            let until = now.checked_add(patience.min(LONGEST)).unwrap_or(now);
            occupant.leaving = Some(Leaving { until, answer });
            berth.port.press();
        }
    }

    /// The machine has ended.
    fn end(self) -> Vec<String> {
        let mut counted = Vec::new();
        for occupant in self.occupants() {
            occupant.new.function.end();
            let counters = occupant.new.function.counters().into_iter().filter(|(_, number)| *number > 0);
            counted.extend(counters.map(|(what, number)| format!("{number} {what} at \"{}\"", occupant.id)));
        }
        counted
    }
}

#[cfg(test)]
mod tests;
