//! The driver's side of a split virtqueue, for tests of devices; and a network of their own for those that need one.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use virtio_queue::Queue;
use virtio_queue::QueueT;
use vm_memory::Bytes;
use vm_memory::GuestAddress;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::ControlOperation;
use vmm_sys_util::epoll::Epoll;
use vmm_sys_util::epoll::EpollEvent;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::Interrupt;
use super::ring::Ring;

/// One MiB of guest memory in two regions.
pub(crate) fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x8_0000), (GuestAddress(0x8_0000), 0x8_0000)]).unwrap()
}

/// A buffer of a chain: guest physical address and bytes.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// The device may read it.
    Read(u64, u32),
    /// The device may write it.
    Write(u64, u32),
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A driver's view of one queue: table, available ring and used ring in the three KiB after `base`.
pub(crate) struct Driver {
    memory: GuestMemoryMmap,
    base: u64,
    size: u16,
    next_descriptor: u16,
    available: u16,
    used: u16,
}

impl Driver {
    pub(crate) fn new(memory: &GuestMemoryMmap, base: u64, size: u16) -> Self {
        assert!(size <= 128);
        Self { memory: memory.clone(), base, size, next_descriptor: 0, available: 0, used: 0 }
    }

    fn available_ring(&self) -> u64 {
        self.base + 0x800
    }

    fn used_ring(&self) -> u64 {
        self.base + 0xa00
    }

    /// The queue as a transport would hand it over.
    pub(crate) fn queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(self.base)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(self.available_ring())).unwrap();
        queue.try_set_used_ring_address(GuestAddress(self.used_ring())).unwrap();
        queue.set_ready(true);
        queue
    }

    pub(crate) fn ring(&self) -> Ring {
        Ring::new(self.queue(), self.memory.clone())
    }

    fn put<T: vm_memory::ByteValued>(&self, value: T, address: u64) {
        self.memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    fn descriptor(&mut self, address: u64, length: u32, flags: u16, next: u16) {
        let at = self.base + u64::from(self.next_descriptor % self.size) * 16;
        self.put(address, at);
        self.put(length, at + 8);
        self.put(flags, at + 12);
        self.put(next, at + 14);
        self.next_descriptor = (self.next_descriptor + 1) % self.size;
    }

    fn publish(&mut self, head: u16) {
        self.put(head, self.available_ring() + 4 + u64::from(self.available % self.size) * 2);
        self.available = self.available.wrapping_add(1);
        self.set_available_index(self.available);
    }

    /// Makes a chain available; returns its head.
    pub(crate) fn offer(&mut self, parts: &[Part]) -> u16 {
        let head = self.next_descriptor;
        for (i, part) in parts.iter().enumerate() {
            let (address, length, write) = match *part {
                Part::Read(address, length) => (address, length, 0),
                Part::Write(address, length) => (address, length, WRITE),
            };
            let more = if i + 1 < parts.len() { NEXT } else { 0 };
            let next = (self.next_descriptor + 1) % self.size;
            self.descriptor(address, length, write | more, next);
        }
        self.publish(head);
        head
    }

    /// Makes a chain available with one descriptor, which is its own successor.
    pub(crate) fn offer_loop(&mut self) -> u16 {
        let head = self.next_descriptor;
        self.descriptor(0x9000, 8, NEXT, head);
        self.publish(head);
        head
    }

    pub(crate) fn set_available_index(&self, index: u16) {
        self.put(index, self.available_ring() + 2);
    }

    /// Writes the whole available ring.
    pub(crate) fn set_available(&self, heads: &[u16], index: u16) {
        for (i, head) in heads.iter().enumerate() {
            self.put(*head, self.available_ring() + 4 + i as u64 * 2);
        }
        self.set_available_index(index);
    }

    /// Makes the rings as a driver leaves them before it activates the device.
    pub(crate) fn clear(&self) {
        self.memory.write_slice(&[0; 0xc00], GuestAddress(self.base)).unwrap();
    }

    /// Whether the device asks for no kicks (virtio 1.3 §2.7.10), without EVENT_IDX.
    pub(crate) fn kicks_are_off(&self) -> bool {
        self.memory.read_obj::<u16>(GuestAddress(self.used_ring())).unwrap() == 1
    }

    /// Buffers that the device completed since the last call: head and bytes written.
    pub(crate) fn used(&mut self) -> Vec<(u16, u32)> {
        let index: u16 = self.memory.read_obj(GuestAddress(self.used_ring() + 2)).unwrap();
        let mut done = Vec::new();
        while self.used != index {
            let at = GuestAddress(self.used_ring() + 4 + u64::from(self.used % self.size) * 8);
            let [head, length]: [u32; 2] = self.memory.read_obj(at).unwrap();
            done.push((u16::try_from(head).unwrap(), length));
            self.used = self.used.wrapping_add(1);
        }
        done
    }
}

/// Counts interrupts; has no descriptors for a kernel worker.
#[derive(Default)]
pub(crate) struct CountingInterrupt {
    queue: AtomicUsize,
}

impl CountingInterrupt {
    pub(crate) fn count(&self) -> usize {
        self.queue.load(Ordering::SeqCst)
    }
}

impl Interrupt for CountingInterrupt {
    fn queue(&self, _index: u16) {
        self.queue.fetch_add(1, Ordering::SeqCst);
    }

    fn config(&self) {}

    fn queue_eventfd(&self, _index: u16) -> Option<Arc<EventFd>> {
        None
    }
}

/// Waits until `event` is readable.
pub(crate) fn wait_readable(event: &impl AsRawFd) {
    let epoll = Epoll::new().unwrap();
    epoll.ctl(ControlOperation::Add, event.as_raw_fd(), EpollEvent::new(EventSet::IN, 0)).unwrap();
    // The kernel ends a wait early when a worker thread of a ring comes or goes.
    while epoll.wait(-1, &mut [EpollEvent::default()]).is_err() {}
}

/// Moves the calling thread, and what it starts, to a network of its own.
#[expect(
    unsafe_code,
    reason = "unshare(2) has no safe wrapper, as it may pull descriptors from other threads"
)]
pub(crate) fn enter_new_network() -> std::io::Result<()> {
    // SAFETY: CLONE_NEWNET changes nothing of the thread but the network that its later calls see.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Interrupts as a kernel worker raises them: a descriptor for each of three queues.
pub(crate) struct EventInterrupt {
    queues: Mutex<Vec<Arc<EventFd>>>,
}

impl EventInterrupt {
    pub(crate) fn new() -> Self {
        Self { queues: Mutex::new((0..3).map(|_| Self::vector()).collect()) }
    }

    #[expect(clippy::disallowed_methods, reason = "a test waits for it by a read that blocks")]
    fn vector() -> Arc<EventFd> {
        Arc::new(EventFd::new(0).unwrap())
    }

    /// Waits until queue `index` interrupted by the vector that it has.
    pub(crate) fn wait(&self, index: u16) {
        self.queue_eventfd(index).unwrap().read().unwrap();
    }

    /// Gives queue `index` another vector.
    pub(crate) fn change(&self, index: u16) {
        self.queues.lock().unwrap()[usize::from(index)] = Self::vector();
    }
}

impl Interrupt for EventInterrupt {
    fn queue(&self, index: u16) {
        self.queue_eventfd(index).unwrap().write(1).unwrap();
    }

    fn config(&self) {}

    fn queue_eventfd(&self, index: u16) -> Option<Arc<EventFd>> {
        self.queues.lock().unwrap().get(usize::from(index)).cloned()
    }
}
