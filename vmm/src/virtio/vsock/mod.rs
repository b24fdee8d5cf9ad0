//! virtio socket device (virtio 1.3 §5.10), in two forms: the kernel's vhost-vsock, where host programs use AF_VSOCK,
//! or Unix sockets served here (`muxer`), which needs no kernel module and no context id of the host's own.
//!
//! `packet` and `connection` are pure; `host` names the sockets, `slot` carries bytes between one
//! and guest memory, and `muxer` joins them all.
//!
//! Sockets come and go, also when a vCPU resets the device and no event loop is at hand. So they are in an epoll set
//! of the muxer, which drops closed ones by itself, and the event loop polls only that set.

mod connection;
mod handshakes;
mod host;
mod muxer;
mod packet;
mod saved;
mod slot;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::fd::RawFd;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

pub use self::host::HostSockets;
pub use self::host::SocketError;
pub(crate) use self::host::check_length;
use self::muxer::Muxer;
use super::ring::{self, Ring};
use super::vhost::{VhostError, VhostQueues, Vring, Worker};
use super::{
    ActivateError, Activation, Counter, DeviceState, Interrupt, RING_EVENT_IDX, RING_INDIRECT, VirtioDevice,
};
use crate::error::{Blame, Remedy, Report};
use crate::eventfd;
use crate::kept::KeptPart;

/// Device type number (virtio 1.3 §5).
const DEVICE_TYPE: u16 = 19;
/// Receive, transmit, event (virtio 1.3 §5.10.2). The event queue reports a restored machine only, and is always served here.
const QUEUE_SIZES: [u16; 3] = [256, 256, 64];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
const EVENT_INDEX: u16 = 2;
/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET, a structure of one field (virtio 1.3 §5.10.6.7).
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// Token of an event: a kick of queue 0 to 2, or one of these.
const SOCKETS: u32 = 0x100;
const WORKER_ERROR: u32 = 0x101;

/// Implementation of the packet path.
pub enum Backend {
    /// This process, to and from Unix sockets.
    Userspace(HostSockets),
    /// The kernel's vhost-vsock, to and from AF_VSOCK sockets.
    Vhost(Worker),
}

impl Backend {
    /// Claims an open descriptor of `/dev/vhost-vsock`.
    ///
    /// # Errors
    /// [`VhostError::Setup`].
    pub fn vhost(file: File) -> Result<Self, VhostError> {
        Worker::new(file, "/dev/vhost-vsock").map(Self::Vhost)
    }
}

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum VsockError {
    /// The kernel's vhost-vsock refused.
    #[error(transparent)]
    Vhost(#[from] VhostError),
    #[error("cannot make a descriptor for the vsock device")]
    Descriptor(#[from] io::Error),
}

impl Report for VsockError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Vhost(error) => error.remedy(),
            Self::Descriptor(_) => Blame::Host.help("raise the limit of open files: ulimit -n"),
        }
    }
}

/// Counts since the start.
#[derive(Default)]
struct Counters {
    /// Chains that broke a rule of virtio 1.3 §2.7 or held no packet.
    malformed: u64,
    /// Times that the kernel worker gave up on a ring.
    worker_errors: u64,
}

enum Mover {
    Userspace(Box<Muxer>),
    Vhost(Worker),
}

/// Why a queue stopped for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    /// An event of the driver or of a socket signals more.
    Event,
    /// The budget is spent: come back after others.
    Budget,
    /// Too many resets wait for receive buffers: come back when [`Muxer::answers`].
    Resets,
}

/// A virtio socket device.
pub struct Vsock {
    cid: u32,
    mover: Mover,
    features: u64,
    kicks: Vec<Arc<EventFd>>,
    counters: Counters,
    /// A descriptor could not be registered with the event loop.
    deaf: bool,
    /// Whether the vhost worker waits for the machine.
    is_held: bool,
    active: Option<Active>,
}

struct Active {
    interrupt: Arc<dyn Interrupt>,
    /// Receive and transmit, when this process serves them.
    rings: Option<(Ring, Ring)>,
    /// The same when the kernel's worker does.
    served: Option<VhostQueues>,
    /// The event queue, which this process serves in both cases.
    events: Option<Ring>,
    /// The driver is yet to receive that all connections are lost.
    owes_reset: bool,
}

struct Descriptor(RawFd);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl Vsock {
    /// A device for the guest with context id `cid`, 3 to 0xfffffffe.
    ///
    /// # Errors
    /// [`VsockError`].
    pub fn new(cid: u32, backend: Backend) -> Result<Self, VsockError> {
        let mut features = RING_INDIRECT | RING_EVENT_IDX;
        let mover = match backend {
            Backend::Userspace(sockets) => Mover::Userspace(Box::new(Muxer::new(sockets, cid)?)),
            Backend::Vhost(worker) => {
                worker.set_guest_cid(cid)?;
                features &= worker.features();
                Mover::Vhost(worker)
            }
        };
        let kick = |_| eventfd::new().map(Arc::new);
        let kicks = QUEUE_SIZES.iter().map(kick).collect::<Result<_, _>>()?;
        let (counters, deaf, is_held) = (Counters::default(), false, false);
        Ok(Self { cid, mover, features, kicks, counters, deaf, is_held, active: None })
    }

    fn start_worker(&self, worker: &Worker, activation: &Activation) -> Result<(), ActivateError> {
        let features = (activation.features & self.features) | (1 << VIRTIO_F_VERSION_1);
        let mut vrings = Vec::new();
        for (index, (queue, kick)) in (0u16..).zip(activation.queues.iter().zip(&self.kicks)).take(2) {
            let Some(queue) = queue else { return Ok(()) }; // nothing to serve without both
            vrings.push(Vring { index, queue, kick });
        }
        worker.start(&activation.memory, features, &vrings, &*activation.interrupt)?;
        if self.is_held { Ok(()) } else { run(worker) }
    }

    /// Moves what can be moved, and interrupts if the driver wants it.
    fn pump(&mut self) {
        let (Mover::Userspace(muxer), Some(active)) = (&mut self.mover, &mut self.active) else { return };
        let Some((receive, transmit)) = &mut active.rings else { return };
        let more = muxer.poll();
        let transmitted = muxer.transmit(transmit);
        let received = muxer.receive(receive);
        for (index, ring) in [(0, receive), (1, transmit)] {
            if ring.needs_interrupt() {
                active.interrupt.queue(index);
            }
        }
        let answers = transmitted == Pause::Resets && muxer.answers();
        if more || answers || transmitted == Pause::Budget || received == Pause::Budget {
            self.come_back();
        }
    }

    /// Notifies the driver that all connections are lost, once it has given a buffer for that.
    fn report_reset(&mut self) {
        let Some(Active { interrupt, events: Some(events), owes_reset, .. }) = &mut self.active else {
            return;
        };
        for _ in 0..events.size() {
            let next = if *owes_reset { events.pop() } else { None };
            let Some(chain) = next else { break };
            let Ok(chain) = chain else { continue }; // the ring gave it back
            let written = ring::write(events.memory(), &chain.writable, 0, &TRANSPORT_RESET);
            events.complete(chain.head, u32::try_from(written).unwrap_or(0));
            *owes_reset = written < TRANSPORT_RESET.len();
        }
        if events.needs_interrupt() {
            interrupt.queue(EVENT_INDEX);
        }
    }

    /// Asks for another [`Vsock::pump`], after others had their turn.
    fn come_back(&self) {
        if let Some(kick) = self.kicks.get(TRANSMIT) {
            let _ = kick.write(1); // full is as good as written
        }
    }
}

impl Active {
    fn malformed(&self) -> u64 {
        self.rings
            .iter()
            .map(|(receive, transmit)| receive.malformed().saturating_add(transmit.malformed()))
            .sum()
    }
}

fn run(worker: &Worker) -> Result<(), ActivateError> {
    worker.set_vsock_running(true).map_err(|source| ActivateError { what: "VHOST_VSOCK_SET_RUNNING", source })
}

fn ring(queues: &mut [Option<Queue>], index: usize, memory: &GuestMemoryMmap) -> Option<Ring> {
    Some(Ring::new(queues.get_mut(index)?.take()?, memory.clone()))
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    /// `guest_cid`, 64 bits (virtio 1.3 §5.10.4).
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let space = u64::from(self.cid).to_le_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = space.get(start..).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(rest.iter().chain(std::iter::repeat(&0))) {
            *to = *from;
        }
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        self.reset();
        if self.deaf {
            return Err(ActivateError { what: "epoll_ctl", source: io::ErrorKind::Other.into() });
        }
        let events = ring(&mut activation.queues, EVENT, &activation.memory);
        let (mut rings, mut served) = (None, None);
        match &self.mover {
            Mover::Vhost(worker) => {
                if let Err(error) = self.start_worker(worker, &activation) {
                    self.reset();
                    return Err(error);
                }
                served = Some(VhostQueues::new(activation.memory, activation.queues));
            }
            Mover::Userspace(_) => {
                let (queues, memory) = (&mut activation.queues, &activation.memory);
                rings = ring(queues, RECEIVE, memory).zip(ring(queues, TRANSMIT, memory));
            }
        }
        let interrupt = activation.interrupt;
        self.active = Some(Active { interrupt, rings, served, events, owes_reset: false });
        self.come_back(); // for host programs that connected meanwhile
        Ok(())
    }

    fn vector_changed(&mut self, index: u16) -> Result<(), ActivateError> {
        match (&self.mover, &self.active) {
            (Mover::Vhost(worker), Some(active)) if index < 2 => {
                worker.set_call(index.into(), index, &*active.interrupt)
            }
            _ => Ok(()),
        }
    }

    fn uses_vhost(&self) -> bool {
        matches!(self.mover, Mover::Vhost(_))
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

    /// Its connections were with sockets of another process.
    fn restored(&mut self, _saved: &DeviceState) -> Result<(), ActivateError> {
        self.active.iter_mut().for_each(|active| active.owes_reset = true);
        Ok(())
    }

    fn counters(&self) -> Vec<Counter> {
        let malformed = self.active.as_ref().map_or(0, Active::malformed);
        vec![
            ("wrong chains", self.counters.malformed.saturating_add(malformed)),
            ("worker errors", self.counters.worker_errors),
        ]
    }

    fn reset(&mut self) {
        match &mut self.mover {
            Mover::Userspace(muxer) => muxer.clear(),
            // Fails only when it does not run.
            Mover::Vhost(worker) => drop(worker.set_vsock_running(false)),
        }
        if let Some(active) = self.active.take() {
            self.counters.malformed = self.counters.malformed.saturating_add(active.malformed());
        }
    }
}

impl MutEventSubscriber for Vsock {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        if events.data() == WORKER_ERROR {
            if let Mover::Vhost(worker) = &self.mover {
                let _ = worker.error().read();
                self.counters.worker_errors = self.counters.worker_errors.saturating_add(1);
            }
            return;
        }
        let queue = usize::try_from(events.data()).unwrap_or(usize::MAX);
        if let Some(kick) = self.kicks.get(queue) {
            let _ = kick.read(); // empty when another event got there first
        }
        self.report_reset();
        self.pump();
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let kick = |(number, kick): (u32, &Arc<EventFd>)| Events::with_data(&**kick, number, EventSet::IN);
        let kicks = (0..).zip(&self.kicks).map(kick);
        let watch: Vec<_> = match &self.mover {
            Mover::Userspace(muxer) => {
                // Edge-triggered, so that events which wait for the driver do not keep the loop awake.
                let sockets = Descriptor(muxer.as_raw_fd());
                let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
                kicks.chain([Events::with_data(&sockets, SOCKETS, edges)]).collect()
            }
            // The kernel polls the kicks of the first two queues.
            Mover::Vhost(worker) => {
                kicks.skip(2).chain([Events::with_data(worker.error(), WORKER_ERROR, EventSet::IN)]).collect()
            }
        };
        self.deaf = watch.into_iter().any(|events| ops.add(events).is_err());
    }
}
