//! virtio block device (virtio 1.3 §5.2) over a raw file or block device, one queue.
//!
//! `request` parses, `disk` is the only way to name bytes of the disk, `io` moves them between guest memory and
//! the disk without a copy. Here a request is taken from the queue, started, and answered when it is done; at most a
//! queue full of them is in flight, the rest waits in the queue.
//!
//! Writes that were reported to the guest as durable stay so: after a reset, also that at the end of the machine, the
//! disk is flushed once nothing is in flight, whatever the guest requested. Only then is the device at rest.
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod config;
mod disk;
mod io;
mod request;

use std::os::fd::AsFd;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::io::Errno;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

pub(crate) use self::disk::SECTOR;
pub use self::disk::{Disk, DiskError};
use self::io::{Done, Engine, Job, Transfer};
use self::request::{Action, Data, Request, Status, parse};
use super::ring::{Ring, slices};
use super::{ActivateError, Activation, Counter, DeviceState, Interrupt, VirtioDevice};
use crate::eventfd;
use crate::kept::KeptPart;

/// Bytes of the serial number (§5.2.6.2).
const SERIAL: usize = 20;

/// Counts since the start.
#[derive(Default)]
struct Counters {
    /// Invalid requests of the guest: refused, or without a place for an answer.
    mistakes: u64,
    /// Requests that the host could not carry out.
    failures: u64,
}

/// A request with its job in flight.
struct Waiting {
    head: u16,
    writable: u32,
    status: GuestAddress,
    is_discard: bool,
}

/// State that exists only while the driver is ready.
struct Running {
    ring: Ring,
    memory: Arc<GuestMemoryMmap>,
    interrupt: Arc<dyn Interrupt>,
    /// The driver has not negotiated flush, so a completed write must be durable.
    write_through: bool,
    /// Requests in flight, by the tag of the job.
    waiting: Vec<Option<Waiting>>,
    free: Vec<u16>,
}

/// A virtio block device with one queue.
pub struct Block {
    disk: Disk,
    serial: [u8; SERIAL],
    kicks: [Arc<EventFd>; 1],
    engine: Box<dyn Engine>,
    running: Option<Running>,
    /// A reset has yet to start its flush.
    unflushed: bool,
    /// The error of a reset's flush, kept because the kernel reports it only once.
    loss: Option<std::io::Error>,
    done: Vec<Done>,
    counters: Counters,
}

impl Block {
    /// A device for `disk`; `id` is its serial number as far as it fits into 20 bytes.
    ///
    /// # Errors
    /// The kernel's, when it refuses an eventfd, a thread or, other than by policy, an io_uring.
    pub fn new(disk: Disk, id: &str) -> std::io::Result<Self> {
        let mut serial = [0; SERIAL];
        for (to, from) in serial.iter_mut().zip(id.bytes()) {
            *to = from;
        }
        let kicks = [Arc::new(eventfd::new()?)];
        let engine = io::open(disk.file(), config::QUEUE_SIZE)?;
        Ok(Self {
            disk,
            serial,
            kicks,
            engine,
            running: None,
            unflushed: false,
            loss: None,
            done: Vec::new(),
            counters: Counters::default(),
        })
    }

    /// Answers what is done, starts what is new.
    fn work(&mut self) {
        self.collect();
        if self.take() {
            let _ = self.kick().write(1); // go on after the other devices had their turn
        }
        self.flush_after_reset();
        self.engine.commit();
        if let Some(running) = &mut self.running
            && running.ring.needs_interrupt()
        {
            running.interrupt.queue(0);
        }
    }

    fn kick(&self) -> &EventFd {
        let [kick] = &self.kicks;
        kick
    }

    fn collect(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        self.engine.collect(&mut done);
        for (tag, result) in done.drain(..) {
            let Some(running) = &mut self.running else {
                self.done_after_reset(result);
                continue;
            };
            let Some(waiting) = running.waiting.get_mut(usize::from(tag)).and_then(Option::take) else {
                continue;
            };
            running.free.push(tag);
            let status = outcome(&result, waiting.is_discard);
            if status != Status::Ok {
                self.counters.failures = self.counters.failures.saturating_add(1);
            }
            running.answer(waiting.head, waiting.writable, waiting.status, status);
        }
        self.done = done;
    }

    /// Takes requests while there is room, at most a queue full. Returns whether more may wait without a further kick.
    fn take(&mut self) -> bool {
        let Some(running) = &mut self.running else { return false };
        running.ring.disarm();
        for _ in 0..running.ring.size() {
            let Some(tag) = running.free.pop() else { return false }; // a completion will bring us back
            let request = match running.ring.pop() {
                Some(chain) => {
                    chain.ok().map(|chain| (chain.head, parse(chain, &running.memory, &self.disk)))
                }
                None => {
                    running.free.push(tag);
                    return running.ring.arm();
                }
            };
            let Some((head, request)) = request else {
                running.free.push(tag); // the ring gave it back
                continue;
            };
            let Some(request) = request else {
                self.counters.mistakes = self.counters.mistakes.saturating_add(1);
                running.free.push(tag);
                running.ring.complete(head, 0);
                continue;
            };
            if request.action.is_err() {
                self.counters.mistakes = self.counters.mistakes.saturating_add(1);
            }
            match running.job(request, &self.serial) {
                Some((waiting, job)) => {
                    if let Some(place) = running.waiting.get_mut(usize::from(tag)) {
                        *place = Some(waiting);
                    }
                    self.engine.submit(tag, job);
                }
                None => running.free.push(tag),
            }
        }
        true
    }

    /// Starts the flush that a reset owes, once nothing is in flight.
    fn flush_after_reset(&mut self) {
        let is_due = self.engine.in_flight() == 0 && std::mem::take(&mut self.unflushed);
        if is_due && !egm_address::fault!("flush-dropped") {
            self.engine.submit(0, Job::Flush);
        }
    }

    /// Takes a completion after a reset. Before the flush, it is of a guest's request, which gets no answer any more.
    fn done_after_reset(&mut self, result: std::io::Result<()>) {
        if !self.unflushed
            && let Err(error) = result
        {
            self.counters.failures = self.counters.failures.saturating_add(1);
            self.loss = Some(error);
        }
    }
}

impl Running {
    /// The job that `request` needs; `None` when it was answered at once.
    fn job(&mut self, request: Request, serial: &[u8]) -> Option<(Waiting, Job)> {
        let Request { head, writable, status, action } = request;
        let is_discard = matches!(action, Ok(Action::Discard(_)));
        let transfer = |span, data| Transfer::new(Arc::clone(&self.memory), span, data);
        let job = match action {
            Ok(Action::Read(span, data)) => Ok(Job::Read(transfer(span, data))),
            Ok(Action::Write(..)) if egm_address::fault!("disk-write-lost") => Err(Status::Ok),
            Ok(Action::Write(span, data)) => {
                Ok(Job::Write { transfer: transfer(span, data), durable: self.write_through })
            }
            Ok(Action::Flush) if egm_address::fault!("guest-flush-dropped") => Err(Status::Ok),
            Ok(Action::Flush) => Ok(Job::Flush),
            Ok(Action::Discard(span)) => Ok(Job::Punch(span)),
            // The driver then writes the zeroes itself, and they are durable.
            Ok(Action::Zero { .. }) if self.write_through => Err(Status::Unsupported),
            Ok(Action::Zero { span, may_unmap: true }) => Ok(Job::Punch(span)),
            Ok(Action::Zero { span, may_unmap: false }) => Ok(Job::Zero(span)),
            Ok(Action::Identify(data)) => {
                identify(&self.memory, &data, serial);
                Err(Status::Ok)
            }
            Err(status) => Err(status),
        };
        match job {
            Ok(job) => Some((Waiting { head, writable, status, is_discard }, job)),
            Err(answer) => {
                self.answer(head, writable, status, answer);
                None
            }
        }
    }

    fn answer(&mut self, head: u16, writable: u32, at: GuestAddress, status: Status) {
        // The address was in guest memory when the chain was parsed, and guest memory stays.
        let _ = self.memory.write_obj(status as u8, at);
        self.ring.complete(head, writable);
    }
}

/// A discard is a hint: a disk that cannot give space back did what it could. Zeroes that the host cannot make
/// cheaply, the driver writes itself.
fn outcome(result: &std::io::Result<()>, is_discard: bool) -> Status {
    let unsupported = |error| Errno::from_io_error(error) == Some(Errno::OPNOTSUPP);
    match result {
        Ok(()) => Status::Ok,
        Err(error) if unsupported(error) && is_discard => Status::Ok,
        Err(error) if unsupported(error) => Status::Unsupported,
        Err(_) => Status::IoError,
    }
}

fn identify(memory: &GuestMemoryMmap, data: &Data, serial: &[u8]) {
    let mut parts = Vec::new();
    slices(memory, &data.segments, data.skip, data.length.min(SERIAL as u64), &mut parts);
    let mut rest = serial;
    for part in parts {
        let (now, later) = rest.split_at(part.len().min(rest.len()));
        part.copy_from(now);
        rest = later;
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        config::features(&self.disk)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[config::QUEUE_SIZE]
    }

    fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(config::bytes(&self.disk).iter().skip(start)) {
            *to = *from;
        }
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, queues, features, interrupt } = activation;
        let Some(queue) = queues.into_iter().next().flatten() else {
            let source = std::io::ErrorKind::InvalidInput.into();
            return Err(ActivateError { what: "the request queue is not enabled", source });
        };
        if !self.is_quiescent() {
            let source = std::io::ErrorKind::ResourceBusy.into();
            return Err(ActivateError { what: "the last reset is not over", source });
        }
        let ring = Ring::new(queue, memory.clone());
        let size = ring.size();
        self.running = Some(Running {
            memory: Arc::new(memory),
            ring,
            interrupt,
            write_through: features & config::FLUSH == 0,
            waiting: std::iter::repeat_with(|| None).take(size.into()).collect(),
            free: (0..size).rev().collect(),
        });
        Ok(())
    }

    fn reset(&mut self) {
        let Some(running) = self.running.take() else { return };
        self.counters.mistakes = self.counters.mistakes.saturating_add(running.ring.malformed());
        self.unflushed = !self.disk.read_only();
        // The event loop flushes, not this thread, which may be a vCPU's: a thread that submitted to a ring does not
        // end before the kernel has answered.
        let _ = self.kick().write(1); // full is as good as written
    }

    fn is_quiescent(&self) -> bool {
        self.running.is_none() && !self.unflushed && self.engine.in_flight() == 0
    }

    fn is_busy(&self) -> bool {
        self.unflushed || self.engine.in_flight() > 0
    }

    fn kept(&self) -> std::io::Result<KeptPart> {
        Ok(KeptPart::of([self.disk.file().as_fd()])?.with_sectors(self.disk.sectors()))
    }

    fn saved(&self) -> Option<DeviceState> {
        let running = self.running.as_ref()?;
        Some(DeviceState::of_queues(vec![Some(running.ring.position(0))]))
    }

    fn counters(&self) -> Vec<Counter> {
        let malformed = self.running.as_ref().map_or(0, |running| running.ring.malformed());
        vec![
            ("wrong requests", self.counters.mistakes.saturating_add(malformed)),
            ("failed requests", self.counters.failures),
        ]
    }

    fn take_loss(&mut self) -> Option<std::io::Error> {
        self.loss.take()
    }
}

impl MutEventSubscriber for Block {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let added = ops
            .add(Events::new(self.kick(), EventSet::IN))
            .and_then(|()| ops.add(Events::new(self.engine.event(), EventSet::IN)));
        debug_assert!(added.is_ok(), "descriptors of this device, each added once");
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        // Nothing waits when a counter is empty: either event means "look".
        let _ = self.kick().read();
        let _ = self.engine.event().read();
        self.work();
    }
}

#[cfg(test)]
mod tests;
