//! virtio 1.3 devices: the interface between a device and its transport.
//!
//! A device knows its features, its configuration space and its queues. It does not know PCI: the transport
//! ([`VirtioPci`]) owns the registers of virtio 1.3 §4.1 and hands the device its queues when the driver is ready.
//!
//! ```text
//!  vCPU thread                                   I/O thread (event-manager)
//!  ───────────                                   ─────────────────────────
//!  config write ─► transport ── activate() ─┐
//!  notify write ─► ioeventfd (kernel) ──────┼──► kick EventFd ─► device.process()
//!                                           │                     │
//!  status = 0   ─► transport ── reset() ────┘                     └─► interrupt.queue(i) ─► irqfd (kernel)
//! ```
//!
//! Kick descriptors live as long as the device: a device registers them once, in `MutEventSubscriber::init`, and
//! drains and ignores kicks while it is not active. Devices and transport share one lock, the device's own
//! (`Arc<Mutex<_>>`); the transport's registers have another that is always taken first.

pub mod blk;
pub mod iovec;
pub mod net;
pub mod ring;
pub mod rng;
mod saved;
#[cfg(test)]
mod testing;
mod transport;
pub mod vhost;
pub mod vsock;

use std::sync::Arc;

use event_manager::MutEventSubscriber;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

pub use self::saved::{DeviceState, FunctionState};
pub use self::transport::{BAR_SIZE, Doorbell, TransportError, VirtioPci};
use crate::kept::KeptPart;

/// VIRTIO_F_INDIRECT_DESC (virtio 1.3 §6): every device here follows indirect tables.
pub(crate) const RING_INDIRECT: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX (virtio 1.3 §6): every device here asks for and gives notifications by index.
pub(crate) const RING_EVENT_IDX: u64 = 1 << 29;

/// A name in words, and a count.
pub type Counter = (&'static str, u64);

/// Notifications from a device to its driver; implemented by the transport.
pub trait Interrupt: Send + Sync {
    /// Notifies the driver that queue `index` has used buffers (virtio 1.3 §2.3). An index out of range is ignored.
    fn queue(&self, index: u16);

    /// Notifies the driver that the configuration space changed.
    fn config(&self);

    /// The descriptor that interrupts for queue `index` when written, for a kernel worker (vhost); `None` when the
    /// driver gave the queue no vector.
    fn queue_eventfd(&self, index: u16) -> Option<Arc<EventFd>>;
}

/// Resources that a device gets when the driver has set DRIVER_OK.
pub struct Activation {
    /// Guest memory, which holds queues and buffers.
    pub memory: GuestMemoryMmap,
    /// One entry a queue of the device; `None` for a queue that the driver left disabled.
    pub queues: Vec<Option<Queue>>,
    /// Feature bits that both sides agreed on.
    pub features: u64,
    /// Notifications to the driver.
    pub interrupt: Arc<dyn Interrupt>,
}

/// Why a device could not start; the transport then sets DEVICE_NEEDS_RESET.
#[derive(Debug, thiserror::Error)]
#[error("virtio device cannot start: {what}")]
pub struct ActivateError {
    /// The step that failed.
    pub what: &'static str,
    /// The error of that step.
    #[source]
    pub source: std::io::Error,
}

/// A virtio device. Kept out: PCI identity, MSI-X, feature negotiation, queue addresses (the transport's),
/// and any path or name to open (devices receive descriptors).
pub trait VirtioDevice: MutEventSubscriber + Send {
    /// Device type number (virtio 1.3 §5).
    fn device_type(&self) -> u16;

    /// Offered feature bits, without the transport's own (VIRTIO_F_VERSION_1).
    fn features(&self) -> u64;

    /// Largest size of each queue, powers of two up to 32768.
    fn queue_sizes(&self) -> &[u16];

    /// Kick descriptor of each queue, made by the device, non-blocking, living as long as it.
    fn kicks(&self) -> &[Arc<EventFd>];

    /// Reads the device configuration space; bytes past its end read as zero.
    fn config_read(&self, offset: u64, data: &mut [u8]);

    /// Writes the device configuration space; what is not writable is ignored.
    fn config_write(&mut self, offset: u64, data: &[u8]);

    /// The driver is ready.
    ///
    /// # Errors
    /// [`ActivateError`]; the device is then as after [`VirtioDevice::reset`].
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// The driver gave queue `index` another vector, at any time: [`Interrupt::queue_eventfd`] now returns another
    /// descriptor. Only a device with a kernel worker that holds the old descriptor needs this.
    ///
    /// # Errors
    /// [`ActivateError`]; the device then interrupts by the old vector, and needs a reset.
    fn vector_changed(&mut self, _index: u16) -> Result<(), ActivateError> {
        Ok(())
    }

    /// Returns to the state before activation, without waiting: the device takes nothing new and no longer notifies the
    /// driver. Once it is [quiescent](VirtioDevice::is_quiescent), it touches no guest memory.
    fn reset(&mut self);

    /// Whether the last reset is over. The event loop completes what is pending. No thread waits for storage while it
    /// holds the device's lock: storage may take for ever.
    fn is_quiescent(&self) -> bool {
        true
    }

    /// Whether vhost workers serve its queues.
    fn uses_vhost(&self) -> bool {
        false
    }

    /// Stops its vhost workers, if it has any. They touch no guest memory until [`VirtioDevice::resume_vhost`], also where the device
    /// is activated meanwhile.
    ///
    /// # Errors
    /// Their positions cannot be read; they have stopped anyway.
    fn stop_vhost(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    /// Starts the stopped vhost workers again, from the same positions. A kick of each queue follows.
    ///
    /// # Errors
    /// [`ActivateError`]; the device then needs a reset.
    fn resume_vhost(&mut self) -> Result<(), ActivateError> {
        Ok(())
    }

    /// Whether the host has a request of the guest, or a flush, that the event loop will complete.
    fn is_busy(&self) -> bool {
        false
    }

    /// Its state beside the registers of the transport, while it is not [busy](VirtioDevice::is_busy) and its vhost
    /// workers have stopped; `None` while it is not active.
    fn saved(&self) -> Option<DeviceState>;

    /// Takes the rest of `saved`, after an activation with the positions of its queues. A kick of each queue follows.
    ///
    /// # Errors
    /// [`ActivateError`].
    fn restored(&mut self, _saved: &DeviceState) -> Result<(), ActivateError> {
        Ok(())
    }

    /// Duplicates of the files that it has of the host, which another execution of the program takes over.
    ///
    /// # Errors
    /// When descriptors run out.
    fn kept(&self) -> std::io::Result<KeptPart> {
        Ok(KeptPart::default())
    }

    /// Counts since the start, each with a name in words; guest mistakes are never logged one by one.
    fn counters(&self) -> Vec<Counter>;

    /// Takes the error of making the guest's writes durable, if the guest has not received it.
    fn take_loss(&mut self) -> Option<std::io::Error> {
        None
    }
}
