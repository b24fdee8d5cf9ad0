//! virtio network device (virtio 1.3 §5.1) over a tap, in two forms: packets moved here (`userspace`) or by the
//! kernel's vhost-net.
//!
//! ```text
//!            userspace                                  vhost-net
//!  kick ──► this device ──readv/writev──► tap     kick ──► kernel worker ──► tap
//!  tap  ──► this device ──► interrupt             tap  ──► kernel worker ──► irqfd
//! ```
//! Taps are registered once and edge-triggered, so an idle or full queue costs no wake-ups and no `epoll_ctl`: a
//! queue that pauses for the driver is taken up again by its kick, one that pauses for the tap by the tap's next
//! edge, and one that has spent its budget kicks itself. The control queue is always served here.

mod backend;
mod saved;
mod spec;
pub mod tap;
#[cfg(test)]
mod tests;
mod token;
mod userspace;

use std::fs::File;
use std::io;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::eventfd::EventFd;

pub use self::backend::Backend;
use self::token::Token;
use self::userspace::{Dropped, Pause, Receive};
use super::ring::Ring;
use super::vhost::VhostQueues;
use super::{ActivateError, Activation, Counter, DeviceState, Interrupt, VirtioDevice, ring};
use crate::eventfd;
use crate::kept::KeptPart;

/// Counts since the start, beside [`Dropped`].
#[derive(Default)]
struct Counters {
    /// Chains that broke a rule of virtio 1.3 §2.7.
    malformed: u64,
    /// Control commands that were refused.
    commands_refused: u64,
    /// Times that a kernel worker gave up on a ring.
    worker_errors: u64,
}

/// A virtio network device.
pub struct Net {
    taps: Vec<File>,
    backend: Backend,
    features: u64,
    config: [u8; 10],
    queue_sizes: Vec<u16>,
    kicks: Vec<Arc<EventFd>>,
    counters: Counters,
    dropped: Dropped,
    /// A descriptor could not be registered with the event loop.
    deaf: bool,
    /// Whether vhost workers wait for the machine.
    is_held: bool,
    active: Option<Active>,
}

struct Active {
    interrupt: Arc<dyn Interrupt>,
    /// Pairs moved by this process: none with vhost-net.
    pairs: Vec<Option<Pair>>,
    /// Pairs moved by vhost-net.
    served: Option<VhostQueues>,
    control: Option<(usize, Ring)>,
    /// Pairs that the driver uses.
    used_pairs: u16,
}

struct Pair {
    receive: Receive,
    transmit: Ring,
    /// The tap took no more: its next edge event reports room.
    transmit_waits: bool,
}

impl Net {
    /// A device with one queue pair for each of `taps`, which [`tap::open`] opened; with [`Backend::Vhost`], as many
    /// workers.
    ///
    /// # Errors
    /// The error of eventfd(2).
    pub fn new(mac: [u8; 6], taps: Vec<File>, backend: Backend) -> io::Result<Self> {
        let queue_pairs = u16::try_from(taps.len()).unwrap_or(u16::MAX);
        let features = spec::features(queue_pairs) & backend.features();
        let queue_sizes = spec::queue_sizes(queue_pairs);
        let kick = |_| eventfd::new().map(Arc::new);
        Ok(Self {
            backend,
            features,
            config: spec::config_space(mac, queue_pairs),
            kicks: queue_sizes.iter().map(kick).collect::<Result<_, _>>()?,
            queue_sizes,
            counters: Counters::default(),
            dropped: Dropped::default(),
            deaf: false,
            is_held: false,
            active: None,
            taps,
        })
    }

    fn queue_pairs(&self) -> u16 {
        u16::try_from(self.taps.len()).unwrap_or(u16::MAX)
    }

    /// Lets the host spread packets over the first `pairs` pairs only. A driver starts with one (virtio 1.3 §5.1.6.5.6).
    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        if self.taps.len() == 1 {
            return Ok(());
        }
        self.taps
            .iter()
            .enumerate()
            .try_for_each(|(number, tap)| tap::set_attached(tap, number < usize::from(pairs)))
    }

    fn start(&mut self, mut activation: Activation) -> Result<Active, ActivateError> {
        if self.deaf {
            return Err(ActivateError { what: "epoll_ctl", source: io::ErrorKind::Other.into() });
        }
        if let Some(first) = self.taps.first() {
            tap::set_offload(first, spec::offload(activation.features))
                .map_err(|source| ActivateError { what: "TUNSETOFFLOAD", source })?;
        }
        self.use_pairs(1).map_err(|source| ActivateError { what: "TUNSETQUEUE", source })?;

        let mut ring = |index: usize| {
            let queue = activation.queues.get_mut(index)?.take()?;
            Some(Ring::new(queue, activation.memory.clone()))
        };
        let control = spec::control_queue(activation.features, self.queue_pairs());
        let control = control.and_then(|index| Some((index, ring(index)?)));
        let (mut pairs, mut served) = (Vec::new(), None);
        match &self.backend {
            Backend::Vhost(workers) => {
                backend::start(workers, &self.kicks, &activation)?;
                let queues = VhostQueues::new(activation.memory, activation.queues);
                if !self.is_held {
                    backend::run(workers, &self.taps, &queues)?;
                }
                served = Some(queues);
            }
            Backend::Userspace => {
                for pair in 0..self.taps.len() {
                    pairs.push(ring(2 * pair).zip(ring(2 * pair + 1)).map(|(receive, transmit)| Pair {
                        receive: Receive::new(receive, activation.features),
                        transmit,
                        transmit_waits: false,
                    }));
                }
            }
        }
        Ok(Active { interrupt: activation.interrupt, pairs, served, control, used_pairs: 1 })
    }

    fn kicked(&mut self, queue: usize) {
        if let Some(kick) = self.kicks.get(queue) {
            let _ = kick.read(); // empty when another event got there first
        }
        match &mut self.active {
            Some(Active { control: Some((control, _)), .. }) if *control == queue => self.control(),
            Some(_) if queue.is_multiple_of(2) => self.receive(queue / 2),
            Some(_) => self.transmit(queue / 2),
            None => {}
        }
    }

    fn receive(&mut self, number: usize) {
        let Some(active) = &mut self.active else { return };
        let (Some(Some(pair)), Some(tap)) = (active.pairs.get_mut(number), self.taps.get(number)) else {
            return;
        };
        let pause = pair.receive.run(tap, &mut self.dropped);
        active.finish_queue(2 * number, pause, &self.kicks);
    }

    fn transmit(&mut self, number: usize) {
        let Some(active) = &mut self.active else { return };
        let (Some(Some(pair)), Some(tap)) = (active.pairs.get_mut(number), self.taps.get(number)) else {
            return;
        };
        let pause = userspace::transmit(&mut pair.transmit, tap, &mut self.dropped);
        pair.transmit_waits = pause == Pause::Tap;
        active.finish_queue(2 * number + 1, pause, &self.kicks);
    }

    fn tap_ready(&mut self, number: usize, events: EventSet) {
        let pair = self.active.as_ref().and_then(|active| active.pairs.get(number)?.as_ref());
        let transmit_waits = pair.is_some_and(|pair| pair.transmit_waits);
        if events.contains(EventSet::IN) {
            self.receive(number);
        }
        if transmit_waits && events.contains(EventSet::OUT) {
            self.transmit(number);
        }
    }

    fn control(&mut self) {
        for _ in 0..userspace::BUDGET {
            let Some(Active { control: Some((_, ring)), .. }) = &mut self.active else { return };
            let chain = match ring.pop() {
                None if ring.arm() => continue,
                None => break,
                Some(Err(ring::Malformed)) => continue,
                Some(Ok(chain)) => chain,
            };
            let mut bytes = [0; spec::COMMAND_LENGTH];
            let length = ring::read(ring.memory(), &chain.readable, 0, &mut bytes);
            let command = spec::Command::parse(bytes.get(..length).unwrap_or_default(), self.queue_pairs());
            let used = command.map(|spec::Command::SetPairs(pairs)| pairs);
            let used = used.filter(|pairs| self.use_pairs(*pairs).is_ok());
            let done = used.is_some();
            if !done {
                self.counters.commands_refused = self.counters.commands_refused.saturating_add(1);
            }
            let Some(Active { control: Some((_, ring)), used_pairs, .. }) = &mut self.active else { return };
            *used_pairs = used.unwrap_or(*used_pairs);
            let answer = if done { spec::ACCEPTED } else { spec::REFUSED };
            let written = ring::write(ring.memory(), &chain.writable, 0, &[answer]);
            ring.complete(chain.head, u32::from(written > 0));
        }
        if let Some(Active { control: Some((index, ring)), interrupt, .. }) = &mut self.active
            && ring.needs_interrupt()
        {
            interrupt.queue(u16::try_from(*index).unwrap_or(u16::MAX));
        }
    }
}

impl Active {
    fn malformed(&self) -> u64 {
        let pairs =
            self.pairs.iter().flatten().flat_map(|p| [p.receive.ring.malformed(), p.transmit.malformed()]);
        pairs.chain(self.control.iter().map(|(_, ring)| ring.malformed())).sum()
    }

    /// Interrupts if the driver wants it; comes back after others if there was more to do.
    fn finish_queue(&mut self, queue: usize, pause: Pause, kicks: &[Arc<EventFd>]) {
        let Some(Some(pair)) = self.pairs.get_mut(queue / 2) else { return };
        let ring = if queue.is_multiple_of(2) { &mut pair.receive.ring } else { &mut pair.transmit };
        if ring.needs_interrupt() {
            self.interrupt.queue(u16::try_from(queue).unwrap_or(u16::MAX));
        }
        if pause == Pause::Budget
            && let Some(kick) = kicks.get(queue)
        {
            let _ = kick.write(1); // full is as good as written
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u16 {
        spec::DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = self.config.get(start..).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(rest.iter().chain(std::iter::repeat(&0))) {
            *to = *from;
        }
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.reset();
        let active = self.start(activation).inspect_err(|_| self.backend.stop())?;
        self.active = Some(active);
        Ok(())
    }

    fn vector_changed(&mut self, index: u16) -> Result<(), ActivateError> {
        self.active.as_ref().map_or(Ok(()), |active| self.backend.vector_changed(index, &*active.interrupt))
    }

    fn uses_vhost(&self) -> bool {
        matches!(self.backend, Backend::Vhost(_))
    }

    fn stop_vhost(&mut self) -> io::Result<()> {
        self.stop()
    }

    fn resume_vhost(&mut self) -> Result<(), ActivateError> {
        self.resume()
    }

    fn kept(&self) -> io::Result<KeptPart> {
        self.files()
    }

    fn saved(&self) -> Option<DeviceState> {
        self.state()
    }

    fn restored(&mut self, saved: &DeviceState) -> Result<(), ActivateError> {
        self.take_state(saved)
    }

    fn counters(&self) -> Vec<Counter> {
        let malformed = self.active.as_ref().map_or(0, Active::malformed);
        vec![
            ("wrong chains", self.counters.malformed.saturating_add(malformed)),
            ("refused packets", self.dropped.transmit),
            ("failed reads", self.dropped.receive),
            ("refused commands", self.counters.commands_refused),
            ("worker errors", self.counters.worker_errors),
        ]
    }

    fn reset(&mut self) {
        self.backend.stop();
        if let Some(active) = self.active.take() {
            self.counters.malformed = self.counters.malformed.saturating_add(active.malformed());
        }
    }
}

impl MutEventSubscriber for Net {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        match Token::decode(events.data()) {
            Some(Token::Kick(queue)) => self.kicked(queue),
            Some(Token::Tap(pair)) => self.tap_ready(pair, events.event_set()),
            Some(Token::WorkerError(pair)) => {
                if let Backend::Vhost(workers) = &self.backend
                    && let Some(worker) = workers.get(pair)
                {
                    let _ = worker.error().read();
                    self.counters.worker_errors = self.counters.worker_errors.saturating_add(1);
                }
            }
            None => {}
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let mut watch = Vec::new();
        for (queue, kick) in self.kicks.iter().enumerate() {
            // The kernel polls the kicks of its queues. Queue 2 may be the control queue, and the last one is.
            let ours = match self.backend {
                Backend::Userspace => true,
                Backend::Vhost(_) => self.taps.len() > 1 && (queue == 2 || queue + 1 == self.kicks.len()),
            };
            if ours {
                watch.push(Events::with_data(&**kick, Token::Kick(queue).encode(), EventSet::IN));
            }
        }
        match &self.backend {
            Backend::Userspace => {
                let edges = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
                let taps = self.taps.iter().enumerate();
                watch
                    .extend(taps.map(|(pair, tap)| Events::with_data(tap, Token::Tap(pair).encode(), edges)));
            }
            Backend::Vhost(workers) => {
                watch.extend(workers.iter().enumerate().map(|(pair, worker)| {
                    Events::with_data(worker.error(), Token::WorkerError(pair).encode(), EventSet::IN)
                }));
            }
        }
        self.deaf = watch.into_iter().any(|events| ops.add(events).is_err());
    }
}
