//! The way from a device to its driver: MSI-X vectors chosen by the driver (virtio 1.3 §4.1.5.1.2).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use vmm_sys_util::eventfd::EventFd;

use super::registers::NO_VECTOR;
use crate::pci::msix::Msix;
use crate::virtio::Interrupt;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Lock-free, so that a device may interrupt while it holds its own lock and a vCPU changes a vector.
pub(super) struct PciInterrupt {
    msix: Arc<Msix>,
    isr: AtomicU8,
    generation: AtomicU8,
    config: AtomicU16,
    queues: Box<[AtomicU16]>,
}

impl PciInterrupt {
    /// No vector yet for any of `queues` queues.
    pub(super) fn new(msix: Arc<Msix>, queues: usize) -> Self {
        Self {
            msix,
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            config: AtomicU16::new(NO_VECTOR),
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
        }
    }

    pub(super) fn msix(&self) -> &Msix {
        &self.msix
    }

    /// Configuration changes interrupt by `vector`.
    pub(super) fn set_config(&self, vector: u16) {
        self.config.store(vector, Ordering::Release);
    }

    /// Queue `index` interrupts by `vector`.
    pub(super) fn set_queue(&self, index: u16, vector: u16) {
        if let Some(queue) = self.queues.get(usize::from(index)) {
            queue.store(vector, Ordering::Release);
        }
    }

    /// After a device reset: no vectors, no status. The generation goes on, so that no driver mistakes a new
    /// configuration for an old one.
    pub(super) fn reset(&self) {
        self.set_config(NO_VECTOR);
        for queue in &self.queues {
            queue.store(NO_VECTOR, Ordering::Release);
        }
        self.isr.store(0, Ordering::Release);
    }

    /// Reads and clears the interrupt status (§4.1.4.5.1).
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// The configuration generation (§4.1.4.3.1).
    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// The interrupt status, without clearing it.
    pub(super) fn isr(&self) -> u8 {
        self.isr.load(Ordering::Acquire)
    }

    /// Sets status and generation; status bits that no device has are dropped.
    pub(super) fn restore(&self, isr: u8, generation: u8) {
        self.isr.store(isr & (ISR_QUEUE | ISR_CONFIG), Ordering::Release);
        self.generation.store(generation, Ordering::Release);
    }

    fn vector(&self, index: u16) -> u16 {
        self.queues.get(usize::from(index)).map_or(NO_VECTOR, |v| v.load(Ordering::Acquire))
    }
}

impl Interrupt for PciInterrupt {
    fn queue(&self, index: u16) {
        self.isr.fetch_or(ISR_QUEUE, Ordering::AcqRel);
        self.msix.signal(self.vector(index));
    }

    fn config(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        self.msix.signal(self.config.load(Ordering::Acquire));
    }

    fn queue_eventfd(&self, index: u16) -> Option<Arc<EventFd>> {
        self.msix.trigger(self.vector(index)).cloned()
    }
}
