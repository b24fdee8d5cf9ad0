//! Virtio devices: from opened resources to functions of the guest, with their part in the event loop.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use event_manager::{EventManager, MutEventSubscriber, SubscriberId, SubscriberOps};
use vm_memory::GuestMemoryMmap;

use super::Subscriber;
use super::exit::ExitLatch;
use super::finish::{RunningDevice, RunningDevices};
use crate::config::{Device, DeviceKind};
use crate::hotplug::Member;
use crate::kvm::Routes;
use crate::lock::lock;
use crate::pci::msix::Msix;
use crate::plan::FunctionPlan;
use crate::resources::OpenDevice;
use crate::virtio::blk::Block;
use crate::virtio::net::Net;
use crate::virtio::rng::Rng;
use crate::virtio::{Doorbell, TransportError, VirtioDevice, VirtioPci};

/// A virtio device: as its transport has it, and as the event loop has it.
pub(super) struct Virtio {
    pub(super) device: Arc<Mutex<dyn VirtioDevice>>,
    pub(super) subscriber: Subscriber,
}

impl Virtio {
    /// The virtio device of `opened`; `None` where that is none, or of another kind than `device`.
    ///
    /// # Errors
    /// The kernel's, when it refuses a descriptor or a thread.
    pub(super) fn new(opened: OpenDevice, device: &Device) -> io::Result<Option<Self>> {
        Ok(Some(match (opened, &device.kind) {
            (OpenDevice::Block(disk), _) => Self::of(Block::new(disk, &device.id)?),
            (OpenDevice::Net { taps, backend }, DeviceKind::VirtioNet { mac, .. }) => {
                Self::of(Net::new(*mac, taps, backend)?)
            }
            (OpenDevice::Vsock(vsock), _) => Self::of(*vsock),
            (OpenDevice::Rng, _) => Self::of(Rng::new()?),
            (OpenDevice::Net { .. } | OpenDevice::Assigned(_) | OpenDevice::Slice(_), _) => return Ok(None),
        }))
    }

    fn of<D: VirtioDevice + MutEventSubscriber + 'static>(device: D) -> Self {
        let device = Arc::new(Mutex::new(device));
        Self { subscriber: Arc::clone(&device) as Subscriber, device }
    }
}

/// Parts of the machine that virtio functions are connected to.
#[derive(Clone)]
pub(super) struct Wiring {
    pub(super) routes: Arc<Routes>,
    pub(super) doorbell: Arc<dyn Doorbell>,
    pub(super) memory: GuestMemoryMmap,
}

impl Wiring {
    /// The function of `plan` in front of `device`.
    ///
    /// # Errors
    /// The kernel's, when it refuses a descriptor; then those of a plan that does not fit the device.
    pub(super) fn function(
        &self,
        plan: &FunctionPlan,
        device: Arc<Mutex<dyn VirtioDevice>>,
    ) -> io::Result<Result<Arc<VirtioPci>, TransportError>> {
        let msix = Arc::new(Msix::new(plan.msix_vectors, self.routes.of(plan.address))?);
        let (memory, doorbell) = (self.memory.clone(), Arc::clone(&self.doorbell));
        Ok(VirtioPci::new(device, plan, msix, memory, doorbell).map(Arc::new))
    }
}

type Change = Box<dyn FnOnce(&mut EventManager<Subscriber>) + Send>;

/// Changes of the event loop that other threads request. (event-manager's remote endpoint has a descriptor that executions of
/// the program inherit.)
#[derive(Clone)]
pub(super) struct Changes {
    queue: Arc<Mutex<Vec<Change>>>,
    exit: Arc<ExitLatch>,
}

impl Changes {
    /// None yet, for the event loop that `exit` wakes.
    pub(super) fn new(exit: Arc<ExitLatch>) -> Self {
        Self { queue: Arc::default(), exit }
    }

    /// Requests `change` after all earlier ones.
    fn request(&self, change: impl FnOnce(&mut EventManager<Subscriber>) + Send + 'static) {
        lock(&self.queue).push(Box::new(change));
        let _ = self.exit.wake().write(1); // a full counter has woken it already
    }

    /// Carries all requested changes out, on the thread of the event loop.
    pub(super) fn carry_out(&self, events: &mut EventManager<Subscriber>) {
        let changes = std::mem::take(&mut *lock(&self.queue));
        changes.into_iter().for_each(|change| change(events));
    }
}

/// The event loop and the list of devices, which a device joins while the guest runs.
#[derive(Clone)]
pub(super) struct Running {
    pub(super) changes: Changes,
    pub(super) devices: RunningDevices,
}

impl Running {
    /// Adds `kept` to the list, and its `subscriber` to the event loop.
    pub(super) fn join(&self, kept: RunningDevice, subscriber: Subscriber) -> Joined {
        let joined = Joined {
            running: self.clone(),
            id: kept.id.clone(),
            function: Arc::clone(&kept.function),
            subscriber: Arc::default(),
            is_asked: false,
            has_left: Arc::default(),
        };
        let number = Arc::clone(&joined.subscriber);
        self.changes.request(move |events| {
            let _ = number.set(events.add_subscriber(subscriber));
        });
        lock(&self.devices).push(kept);
        joined
    }
}

/// A device that joined.
pub(super) struct Joined {
    running: Running,
    id: String,
    function: Arc<VirtioPci>,
    /// Its number in the event loop, once that has added it.
    subscriber: Arc<OnceLock<SubscriberId>>,
    /// Whether the event loop is requested to remove it.
    is_asked: bool,
    /// Whether the event loop has removed it.
    has_left: Arc<AtomicBool>,
}

impl Member for Joined {
    fn has_left(&mut self) -> bool {
        if !self.is_asked {
            // Until then the event loop completes what is pending.
            if !self.function.is_quiescent() {
                return false;
            }
            self.is_asked = true;
            let (number, has_left) = (Arc::clone(&self.subscriber), Arc::clone(&self.has_left));
            self.running.changes.request(move |events| {
                // It was added by an earlier request.
                drop(number.get().map(|number| events.remove_subscriber(*number)));
                has_left.store(true, Ordering::Release);
            });
        }
        if !self.has_left.load(Ordering::Acquire) {
            return false;
        }
        lock(&self.running.devices).retain(|kept| kept.id != self.id);
        // A vCPU can be inside an access still. The others are this and the controller's.
        Arc::strong_count(&self.function) <= 2
    }

    fn take_loss(&mut self) -> Option<io::Error> {
        self.function.take_loss()
    }
}
