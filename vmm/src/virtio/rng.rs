//! virtio entropy device (virtio 1.3 §5.4): bytes of getrandom(2) for whatever the driver offers.
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::io;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::ring::{Ring, Segment, slices};
use super::{
    ActivateError, Activation, Counter, DeviceState, Interrupt, RING_EVENT_IDX, RING_INDIRECT, VirtioDevice,
};
use crate::eventfd;

const QUEUE_SIZE: u16 = 64;
/// Most bytes that one chain gets: the driver asks again for more, after others had their turn.
const MAX_BYTES: u64 = 64 << 10;

/// A virtio entropy device with one queue.
pub struct Rng {
    kicks: [Arc<EventFd>; 1],
    running: Option<(Ring, Arc<dyn Interrupt>)>,
    /// Chains that the guest got wrong.
    mistakes: u64,
}

impl Rng {
    /// A device.
    ///
    /// # Errors
    /// When the kernel refuses an eventfd.
    pub fn new() -> io::Result<Self> {
        Ok(Self { kicks: [Arc::new(eventfd::new()?)], running: None, mistakes: 0 })
    }

    fn kick(&self) -> &EventFd {
        let [kick] = &self.kicks;
        kick
    }

    /// Serves at most a queue full of chains. Returns whether more may wait without a further kick.
    fn serve(&mut self) -> bool {
        let Some((ring, interrupt)) = &mut self.running else { return false };
        ring.disarm();
        let mut more = true;
        for _ in 0..ring.size() {
            let Some(chain) = ring.pop() else {
                more = ring.arm();
                break;
            };
            if let Ok(chain) = chain {
                if chain.writable.is_empty() {
                    self.mistakes = self.mistakes.saturating_add(1);
                }
                let written = fill(ring.memory(), &chain.writable);
                ring.complete(chain.head, written);
            }
        }
        if ring.needs_interrupt() {
            interrupt.queue(0);
        }
        more
    }
}

/// Fills the segments, up to [`MAX_BYTES`]; returns how many bytes are random now.
fn fill(memory: &GuestMemoryMmap, segments: &[Segment]) -> u32 {
    let mut parts = Vec::new();
    slices(memory, segments, 0, MAX_BYTES, &mut parts);
    let mut written: u32 = 0;
    let mut buffer = [0u8; 4096];
    for part in parts {
        let mut rest = part;
        while !rest.is_empty() {
            let room = buffer.get_mut(..rest.len().min(4096)).unwrap_or_default();
            // It may return less than was requested.
            let count = match getrandom(&mut *room, GetRandomFlags::empty()) {
                Ok(count) => count,
                Err(Errno::INTR) => continue,
                Err(_) => return written, // forbidden here: the driver gets less than it asked for
            };
            if egm_address::fault!("rng-not-random") {
                room.fill(0);
            }
            rest.copy_from(room.get(..count).unwrap_or_default());
            written = written.saturating_add(u32::try_from(count).unwrap_or(0));
            let Ok(later) = rest.offset(count) else { break };
            rest = later;
        }
    }
    written
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        4
    }

    fn features(&self) -> u64 {
        RING_INDIRECT | RING_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    fn config_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Some(queue) = activation.queues.into_iter().next().flatten() else {
            let source = io::ErrorKind::InvalidInput.into();
            return Err(ActivateError { what: "the request queue is not enabled", source });
        };
        self.running = Some((Ring::new(queue, activation.memory), activation.interrupt));
        Ok(())
    }

    fn saved(&self) -> Option<DeviceState> {
        let (ring, _) = self.running.as_ref()?;
        Some(DeviceState::of_queues(vec![Some(ring.position(0))]))
    }

    fn counters(&self) -> Vec<Counter> {
        let malformed = self.running.as_ref().map_or(0, |(ring, _)| ring.malformed());
        vec![("wrong chains", self.mistakes.saturating_add(malformed))]
    }

    fn reset(&mut self) {
        if let Some((ring, _)) = self.running.take() {
            self.mistakes = self.mistakes.saturating_add(ring.malformed());
        }
    }
}

impl MutEventSubscriber for Rng {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let added = ops.add(Events::new(self.kick(), EventSet::IN));
        debug_assert!(added.is_ok(), "a descriptor of this device, added once");
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        let _ = self.kick().read();
        if self.serve() {
            let _ = self.kick().write(1); // go on after the other devices had their turn
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::virtio::testing::{CountingInterrupt, Driver, Part, memory};

    fn active(driver: &Driver, memory: &GuestMemoryMmap) -> (Rng, Arc<CountingInterrupt>) {
        let (mut rng, interrupt) = (Rng::new().unwrap(), Arc::new(CountingInterrupt::default()));
        let queues = vec![Some(driver.queue())];
        let activation =
            Activation { memory: memory.clone(), queues, features: 0, interrupt: interrupt.clone() };
        rng.activate(activation).unwrap();
        (rng, interrupt)
    }

    #[test]
    fn every_writable_byte_up_to_the_limit_becomes_random() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        let small = driver.offer(&[Part::Write(0x9000, 100), Part::Write(0xa000, 5000)]);
        let large = driver.offer(&[Part::Write(0x2_0000, 0x1_8000)]);
        let useless = driver.offer(&[Part::Read(0x9000, 4)]);
        let (mut rng, interrupt) = active(&driver, &memory);
        assert!(!rng.serve());
        assert_eq!(driver.used(), [(small, 5100), (large, 0x1_0000), (useless, 0)]);
        assert_eq!((interrupt.count(), rng.counters()), (1, vec![("wrong chains", 1)]));
        let mut bytes = vec![0; 5000];
        memory.read_slice(&mut bytes, GuestAddress(0xa000)).unwrap();
        let zeroes = bytes.iter().filter(|b| **b == 0).count();
        assert!(zeroes < 200, "{zeroes} of 5000 random bytes are zero"); // 20 expected; chance of 200 below 1e-100
        memory.read_slice(&mut bytes, GuestAddress(0x3_0000)).unwrap();
        assert!(bytes.iter().all(|b| *b == 0), "nothing beyond the limit is written");
    }

    #[test]
    fn kicks_while_not_active_do_nothing() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        driver.offer(&[Part::Write(0x9000, 8)]);
        let (mut rng, interrupt) = active(&driver, &memory);
        rng.reset();
        assert!(!rng.serve());
        assert_eq!((driver.used(), interrupt.count()), (vec![], 0));
    }
}
