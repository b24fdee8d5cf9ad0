//! Packets between a tap and the queues of one pair, without a copy of our own: the tap reads and writes guest memory.
//!
//! The tap's header and the queue's are the same 12 bytes (virtio 1.3 §5.1.6 and `TUNSETVNETHDRSZ`), so a packet is
//! one readv or writev, and all that is written by hand is `num_buffers`.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use vm_memory::VolatileSlice;

use super::spec;
use crate::virtio::iovec;
use crate::virtio::ring;
use crate::virtio::ring::Chain;
use crate::virtio::ring::Ring;
use crate::virtio::saved::QueuePosition;

/// Packets or chains that one event moves at most, so that one busy queue does not keep others waiting.
pub(super) const BUDGET: usize = 64;

/// Offset of `num_buffers` in the header.
const NUM_BUFFERS: u64 = 10;

/// Why a queue stopped for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    /// The driver kicks when it has more.
    Driver,
    /// The tap becomes ready when it has or takes more.
    Tap,
    /// [`BUDGET`] is spent: come back after others.
    Budget,
}

/// Permanent losses, for counters.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dropped {
    /// Packets that the tap refused, such as a header that makes no sense.
    pub(super) transmit: u64,
    /// Reads that the tap failed.
    pub(super) receive: u64,
}

/// The receive queue: buffers that the driver gave, and were not used yet.
pub(super) struct Receive {
    pub(super) ring: Ring,
    waiting: VecDeque<Chain>,
    waiting_bytes: u64,
    mergeable: bool,
    /// Room that a packet may need before the tap is asked for one: the tap cuts what does not fit.
    wanted: u64,
}

impl Receive {
    pub(super) fn new(ring: Ring, features: u64) -> Self {
        let large = features & spec::GUEST_LARGE != 0;
        Self {
            ring,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            mergeable: features & spec::MERGEABLE != 0,
            wanted: if large { spec::LARGEST_PACKET } else { spec::ORDINARY_PACKET },
        }
    }

    /// Its position in the queue: buffers that wait here are taken again.
    pub(super) fn position(&self) -> QueuePosition {
        self.ring.position(self.waiting.len())
    }

    /// Moves packets from the tap to the driver until one of them has no more.
    pub(super) fn run(&mut self, tap: &File, dropped: &mut Dropped) -> Pause {
        self.ring.disarm();
        for _ in 0..BUDGET {
            if !self.collect() {
                if self.ring.arm() {
                    continue;
                }
                return Pause::Driver;
            }
            match self.packet(tap) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Pause::Tap,
                Err(_) => {
                    dropped.receive = dropped.receive.saturating_add(1);
                    return Pause::Tap;
                }
            }
        }
        Pause::Budget
    }

    /// Takes buffers until the largest packet fits; returns whether the tap may be read.
    fn collect(&mut self) -> bool {
        // With fewer chains than the queue has entries: bounded, whatever the driver adds meanwhile.
        for _ in 0..self.ring.size() {
            if self.enough() {
                return true;
            }
            match self.ring.pop() {
                None => break,
                Some(Err(ring::Malformed)) => {}
                // A buffer that the device can read makes no sense here, and neither does one without room for a header.
                Some(Ok(chain)) if !chain.readable.is_empty() || ring::total(&chain.writable) < 12 => {
                    self.ring.refuse(chain.head);
                }
                Some(Ok(chain)) => {
                    self.waiting_bytes = self.waiting_bytes.saturating_add(ring::total(&chain.writable));
                    self.waiting.push_back(chain);
                }
            }
        }
        // A small queue may be unable to hold the largest packet: then all that it has must do.
        self.enough() || self.waiting.len() >= usize::from(self.ring.size())
    }

    fn enough(&self) -> bool {
        if self.mergeable { self.waiting_bytes >= self.wanted } else { !self.waiting.is_empty() }
    }

    fn packet(&mut self, tap: &File) -> io::Result<()> {
        let memory = self.ring.memory();
        let mut segments: Vec<VolatileSlice<'_>> = Vec::new();
        let mut room = 0;
        for chain in self.waiting.iter().take(if self.mergeable { usize::MAX } else { 1 }) {
            if room >= spec::LARGEST_PACKET || segments.len() >= iovec::MAX_SEGMENTS {
                break;
            }
            ring::slices(memory, &chain.writable, 0, u64::MAX, &mut segments);
            room = room.saturating_add(ring::total(&chain.writable));
        }
        let length = iovec::readv(tap.as_fd(), &segments)? as u64;
        drop(segments);
        self.deliver(length);
        Ok(())
    }

    /// Completes as many buffers as a packet of `length` bytes fills, and reports their number to the driver.
    fn deliver(&mut self, length: u64) {
        let mut filled = Vec::new();
        let mut left = length;
        while let Some(chain) = self.waiting.pop_front() {
            let size = ring::total(&chain.writable);
            self.waiting_bytes = self.waiting_bytes.saturating_sub(size);
            let now = left.min(size);
            left = left.saturating_sub(now);
            filled.push((chain, u32::try_from(now).unwrap_or(u32::MAX))); // a packet has 16 bits of length
            if left == 0 {
                break;
            }
        }
        let count = u16::try_from(filled.len()).unwrap_or(u16::MAX);
        if let Some((first, _)) = filled.first() {
            let at = if egm_address::fault!("network-byte-flipped") { NUM_BUFFERS + 2 } else { NUM_BUFFERS };
            ring::write(self.ring.memory(), &first.writable, at, &count.to_le_bytes());
        }
        for (chain, written) in filled {
            self.ring.complete(chain.head, written);
        }
    }
}

/// Moves packets from the driver to the tap until one of them has had enough.
pub(super) fn transmit(ring: &mut Ring, tap: &File, dropped: &mut Dropped) -> Pause {
    ring.disarm();
    for _ in 0..BUDGET {
        match ring.pop() {
            None if ring.arm() => {}
            None => return Pause::Driver,
            Some(Err(ring::Malformed)) => {}
            Some(Ok(chain))
                if !chain.writable.is_empty() || ring::total(&chain.readable) > spec::LARGEST_PACKET =>
            {
                ring.refuse(chain.head);
            }
            Some(Ok(chain)) => match send(ring, &chain, tap) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ring.unpop(1);
                    return Pause::Tap;
                }
                result => {
                    if result.is_err() {
                        dropped.transmit = dropped.transmit.saturating_add(1);
                    }
                    ring.complete(chain.head, 0);
                }
            },
        }
    }
    Pause::Budget
}

fn send(ring: &Ring, chain: &Chain, tap: &File) -> io::Result<()> {
    let mut segments = Vec::with_capacity(chain.readable.len());
    ring::slices(ring.memory(), &chain.readable, 0, u64::MAX, &mut segments);
    iovec::writev(tap.as_fd(), &segments).map(|_| ())
}
