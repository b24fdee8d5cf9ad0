//! A split virtqueue (virtio 1.3 §2.7) as a hostile driver may have written it: every chain is parsed into a
//! [`Chain`] before a device sees it, and what does not parse is given back with length 0 and counted.
//!
//! Nothing here loops over what the driver may extend meanwhile: [`Ring::pop`] looks at one chain a call, so a
//! device bounds its work by counting calls.

use virtio_queue::DescriptorChain;
use virtio_queue::Queue;
use virtio_queue::QueueOwnedT;
use virtio_queue::QueueT;
use vm_memory::GuestAddress;
use vm_memory::GuestMemory;
use vm_memory::GuestMemoryMmap;
use vm_memory::Permissions;
use vm_memory::VolatileSlice;

use super::saved::QueuePosition;

/// Most descriptors in a chain. The largest queue of the devices here has 256 entries, and a chain may not have more
/// descriptors than its queue has entries, indirect or not (virtio 1.3 §2.7.5.3.1).
const MAX_DESCRIPTORS: usize = 256;

/// Guest memory that one descriptor names; it was inside guest memory when the chain was parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First byte, guest physical.
    pub address: GuestAddress,
    /// Bytes, at least 1.
    pub length: u32,
}

/// A descriptor chain: what the device may read, then what it may write (virtio 1.3 §2.7.4.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Index of its first descriptor, which is its name in the used ring.
    pub head: u16,
    /// From driver to device, in order.
    pub readable: Vec<Segment>,
    /// From device to driver, in order.
    pub writable: Vec<Segment>,
}

/// A chain that breaks a rule of virtio 1.3 §2.7; it was given back to the driver already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

impl Chain {
    fn parse(
        memory: &GuestMemoryMmap,
        descriptors: DescriptorChain<&GuestMemoryMmap>,
    ) -> Result<Self, Malformed> {
        let mut chain = Self { head: descriptors.head_index(), readable: Vec::new(), writable: Vec::new() };
        let mut complete = false;
        for (count, descriptor) in descriptors.enumerate() {
            if count >= MAX_DESCRIPTORS {
                return Err(Malformed);
            }
            complete = !descriptor.has_next();
            let segment = Segment { address: descriptor.addr(), length: descriptor.len() };
            if segment.length == 0 {
                continue;
            }
            let (list, access) = if descriptor.is_write_only() {
                (&mut chain.writable, Permissions::Write)
            } else if chain.writable.is_empty() {
                (&mut chain.readable, Permissions::Read)
            } else {
                return Err(Malformed); // readable after writable
            };
            let is_memory = memory.check_range(segment.address, segment.length as usize, access);
            if !is_memory && !egm_address::fault!("descriptor-outside-memory") {
                return Err(Malformed);
            }
            list.push(segment);
        }
        // A loop, an index out of range or a bad indirect table ends the walk early.
        if complete { Ok(chain) } else { Err(Malformed) }
    }
}

/// Bytes that `segments` name together.
pub fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|s| u64::from(s.length)).sum()
}

/// Appends at most `limit` bytes of `segments`, after the first `skip`, to `out`.
pub fn slices<'m>(
    memory: &'m GuestMemoryMmap,
    segments: &[Segment],
    skip: u64,
    limit: u64,
    out: &mut Vec<VolatileSlice<'m>>,
) {
    let (mut skip, mut left) = (skip, limit);
    for segment in segments {
        let length = u64::from(segment.length);
        let passed = skip.min(length);
        skip = skip.saturating_sub(passed);
        let taken = length.saturating_sub(passed).min(left);
        left = left.saturating_sub(taken);
        if taken == 0 {
            continue;
        }
        let address = GuestAddress(segment.address.0.saturating_add(passed));
        let taken = usize::try_from(taken).unwrap_or(0); // a descriptor's length has 32 bits
        if let Ok(parts) = memory.get_slices(address, taken, Permissions::ReadWrite) {
            out.extend(parts.flatten());
        }
    }
}

/// Copies `bytes` into `segments` from their byte `offset` on; returns how many fitted.
pub fn write(memory: &GuestMemoryMmap, segments: &[Segment], offset: u64, bytes: &[u8]) -> usize {
    let mut parts = Vec::new();
    slices(memory, segments, offset, bytes.len() as u64, &mut parts);
    let mut left = bytes;
    for part in parts {
        let (now, later) = left.split_at(part.len().min(left.len()));
        part.copy_from(now);
        left = later;
    }
    bytes.len().saturating_sub(left.len())
}

/// Copies from `segments` into `bytes`, from their byte `offset` on; returns how many there were.
pub fn read(memory: &GuestMemoryMmap, segments: &[Segment], offset: u64, bytes: &mut [u8]) -> usize {
    let mut parts = Vec::new();
    slices(memory, segments, offset, bytes.len() as u64, &mut parts);
    let mut done = 0;
    for part in parts {
        let Some(room) = bytes.get_mut(done..) else { break };
        done = done.saturating_add(part.copy_to(room));
    }
    done
}

/// A queue that the driver enabled, and the memory that it lies in.
pub struct Ring {
    queue: Queue,
    memory: GuestMemoryMmap,
    /// The available index made no sense (virtio 1.3 §2.7.6): nothing more is taken until reset.
    broken: bool,
    /// Chains were completed since [`Ring::needs_interrupt`] was last asked.
    completed: bool,
    malformed: u64,
}

impl Ring {
    /// Takes over a queue as the transport activated it.
    pub fn new(queue: Queue, memory: GuestMemoryMmap) -> Self {
        Self { queue, memory, broken: false, completed: false, malformed: 0 }
    }

    /// The memory that chains refer to.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Entries of the queue.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Chains that broke a rule so far (the device's own included), and 1 for a broken available index.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    /// Takes the next chain that the driver made available; `None` when there is none.
    pub fn pop(&mut self) -> Option<Result<Chain, Malformed>> {
        if self.broken {
            return None;
        }
        let Ok(mut available) = self.queue.iter(&self.memory) else {
            self.broken = true;
            self.malformed = self.malformed.saturating_add(1);
            return None;
        };
        let descriptors = available.next()?;
        let head = descriptors.head_index();
        let parsed = Chain::parse(&self.memory, descriptors);
        if parsed.is_err() {
            self.refuse(head);
        }
        Some(parsed)
    }

    /// Gives the last `count` popped chains back to the available side, as if they had not been popped.
    pub(crate) fn unpop(&mut self, count: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(count));
    }

    /// Its position when the last `waiting` chains that were popped are not used yet: they come again.
    pub(super) fn position(&self, waiting: usize) -> QueuePosition {
        let waiting = u16::try_from(waiting).unwrap_or(0); // at most the size of the queue
        QueuePosition {
            available: self.queue.next_avail().wrapping_sub(waiting),
            used: self.queue.next_used(),
        }
    }

    /// Puts a chain in the used ring, with `written` bytes in its writable part.
    pub fn complete(&mut self, head: u16, written: u32) {
        let head = head.wrapping_add(u16::from(egm_address::fault!("used-ring-wrong-head")));
        // Fails only for a head beyond the queue, which has no place in the used ring, or a ring outside memory.
        match self.queue.add_used(&self.memory, head, written) {
            Ok(()) => self.completed = true,
            Err(_) => self.malformed = self.malformed.saturating_add(1),
        }
    }

    /// Gives back a chain that makes no sense to the device: with length 0, and counted.
    pub fn refuse(&mut self, head: u16) {
        self.malformed = self.malformed.saturating_add(1);
        self.complete(head, 0);
    }

    /// Asks the driver for a kick with its next chain. Returns whether chains came meanwhile, for which there may be
    /// no kick.
    pub fn arm(&mut self) -> bool {
        !self.broken && self.queue.enable_notification(&self.memory).unwrap_or(false)
    }

    /// Notifies the driver that kicks are not needed for now.
    pub(crate) fn disarm(&mut self) {
        // Only a hint: when it cannot be written, the driver kicks more often.
        let _ = self.queue.disable_notification(&self.memory);
    }

    /// Whether the driver wants an interrupt for what was completed since the last call (virtio 1.3 §2.7.7).
    pub(crate) fn needs_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.completed) && self.queue.needs_notification(&self.memory).unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::Bytes;

    use super::*;
    use crate::virtio::testing::Driver;
    use crate::virtio::testing::Part;
    use crate::virtio::testing::memory;

    #[test]
    fn a_chain_keeps_its_readable_and_writable_parts_in_order() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        let head = driver.offer(&[Part::Read(0x9000, 8), Part::Read(0xa000, 4), Part::Write(0xb000, 16)]);
        let mut ring = driver.ring();
        let chain = ring.pop().unwrap().unwrap();
        assert_eq!(chain.head, head);
        assert_eq!(total(&chain.readable), 12);
        assert_eq!(chain.writable, [Segment { address: GuestAddress(0xb000), length: 16 }]);
        ring.complete(chain.head, 5);
        assert_eq!(driver.used(), [(head, 5)]);
        assert!(ring.pop().is_none());
    }

    #[test]
    fn chains_that_break_a_rule_come_back_with_length_0_and_are_counted() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        let after_writable = driver.offer(&[Part::Write(0x9000, 8), Part::Read(0xa000, 4)]);
        let outside = driver.offer(&[Part::Read(0xffff_0000, 8)]);
        let across_the_end = driver.offer(&[Part::Write(0xf_ffff, 2)]);
        let good = driver.offer(&[Part::Read(0x9000, 8)]);
        let looped = driver.offer_loop();
        let mut ring = driver.ring();
        let heads: Vec<_> = std::iter::from_fn(|| ring.pop()).map(|c| c.map(|c| c.head)).collect();
        assert_eq!(heads, [Err(Malformed), Err(Malformed), Err(Malformed), Ok(good), Err(Malformed)]);
        assert_eq!(driver.used(), [(after_writable, 0), (outside, 0), (across_the_end, 0), (looped, 0)]);
        assert_eq!(ring.malformed(), 4);
    }

    #[test]
    fn an_available_index_beyond_the_queue_stops_the_queue_until_reset() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        driver.offer(&[Part::Read(0x9000, 8)]);
        driver.set_available_index(18);
        let mut ring = driver.ring();
        assert!(ring.pop().is_none());
        assert_eq!(ring.malformed(), 1);
        driver.set_available_index(1);
        assert!(ring.pop().is_none());
        assert!(!ring.arm(), "a broken queue has nothing to come back for");
    }

    #[test]
    fn chains_that_are_unpopped_come_again_in_their_order() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        let heads = [0x9000, 0xa000, 0xb000].map(|address| driver.offer(&[Part::Read(address, 8)]));
        let mut ring = driver.ring();
        let pop = |ring: &mut Ring| ring.pop().map(|chain| chain.unwrap().head);
        assert_eq!((pop(&mut ring), pop(&mut ring)), (Some(heads[0]), Some(heads[1])));
        ring.unpop(1);
        assert_eq!(pop(&mut ring), Some(heads[1]));
        ring.unpop(2);
        assert_eq!([(); 4].map(|()| pop(&mut ring)), [Some(heads[0]), Some(heads[1]), Some(heads[2]), None]);
    }

    #[test]
    fn arming_asks_for_kicks_and_reports_chains_that_came_meanwhile() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 0x1000, 16);
        let mut ring = driver.ring();
        ring.disarm();
        assert!(driver.kicks_are_off());
        assert!(!ring.arm() && !driver.kicks_are_off());
        driver.offer(&[Part::Read(0x9000, 8)]);
        assert!(ring.arm());
        assert!(ring.pop().unwrap().is_ok() && !ring.arm());
    }

    #[test]
    fn a_ring_has_the_size_of_its_queue_and_the_memory_of_its_chains() {
        let memory = memory();
        memory.write_obj(0x1234_u32, GuestAddress(0x9000)).unwrap();
        let ring = Driver::new(&memory, 0x1000, 16).ring();
        assert_eq!(ring.size(), 16);
        assert_eq!(ring.memory().read_obj::<u32>(GuestAddress(0x9000)).unwrap(), 0x1234);
    }

    #[test]
    fn without_a_used_buffer_there_is_no_interrupt() {
        for event_idx in [false, true] {
            let memory = memory();
            let mut driver = Driver::new(&memory, 0x1000, 16);
            driver.offer(&[Part::Read(0x9000, 8)]);
            driver.offer_loop();
            let mut queue = driver.queue();
            queue.set_event_idx(event_idx);
            let mut ring = Ring::new(queue, memory);
            assert!(!ring.needs_interrupt(), "event_idx {event_idx}");
            let chain = ring.pop().unwrap().unwrap();
            assert!(!ring.needs_interrupt(), "event_idx {event_idx}");
            ring.complete(chain.head, 0);
            assert_eq!((ring.needs_interrupt(), ring.needs_interrupt()), (true, false));
            // What pop gives back counts as well; the driver's used_event is still 0, which EVENT_IDX respects.
            assert!(ring.pop().unwrap().is_err());
            assert_eq!((ring.needs_interrupt(), ring.needs_interrupt()), (!event_idx, false));
        }
    }

    #[test]
    fn copies_skip_and_limit_across_segments() {
        let memory = memory();
        let segments = [
            Segment { address: GuestAddress(0x9000), length: 3 },
            Segment { address: GuestAddress(0xa000), length: 4 },
        ];
        assert_eq!(write(&memory, &segments, 2, b"abcdefgh"), 5);
        let mut back = [0; 8];
        assert_eq!(read(&memory, &segments, 1, &mut back), 6);
        assert_eq!(&back, b"\0abcde\0\0");
        let mut byte = [0];
        memory.read_slice(&mut byte, GuestAddress(0xa004)).unwrap();
        assert_eq!(byte, [0], "nothing beyond the segments is written");
    }

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    /// The buffer of descriptor `index`.
    fn buffer(index: u16) -> Segment {
        Segment { address: GuestAddress(0x9000 + u64::from(index) * 16), length: 8 }
    }

    /// A descriptor as the driver writes it.
    fn descriptor(segment: Segment, flags: u16, next: u16) -> Vec<u8> {
        let Segment { address, length } = segment;
        [&address.0.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()]
            .concat()
    }

    /// The chain from descriptor 0 on through `table` (flags and next of each), if it is one.
    fn walk(table: &[(u16, u16)]) -> Option<Chain> {
        let mut chain = Chain { head: 0, readable: Vec::new(), writable: Vec::new() };
        let mut index = 0;
        for _ in table {
            let (flags, next) = *table.get(usize::from(index))?;
            if flags & INDIRECT != 0 {
                return None;
            }
            if flags & WRITE != 0 {
                chain.writable.push(buffer(index));
            } else if chain.writable.is_empty() {
                chain.readable.push(buffer(index));
            } else {
                return None;
            }
            if flags & NEXT == 0 {
                return Some(chain);
            }
            index = next;
        }
        None
    }

    /// Table number `number` of `size` descriptors: each has one of `flags`, and with [`NEXT`] any index up to `size`.
    fn table(number: u32, size: u16, flags: &[u16]) -> Vec<(u16, u16)> {
        let ends = flags.iter().map(|&flags| (flags, 0));
        let linked = flags.iter().flat_map(|&flags| (0..=size).map(move |next| (flags | NEXT, next)));
        let choices: Vec<_> = ends.chain(linked).collect();
        let base = u32::try_from(choices.len()).unwrap();
        let digit = |place: u16| usize::try_from(number / base.pow(u32::from(place)) % base).unwrap();
        (0..size).map(|place| choices[digit(place)]).collect()
    }

    fn table_bytes(table: &[(u16, u16)]) -> Vec<u8> {
        (0..).zip(table).flat_map(|(index, &(flags, next))| descriptor(buffer(index), flags, next)).collect()
    }

    /// Three sizes, 24 next and 24 available indices: 1,728 pairs of indices, all around a change of the sign or 0.
    #[test]
    fn every_pair_of_indices_near_a_wrap_yields_each_available_chain_once_and_in_order() {
        let indices = || (0xfffa..=0xffff).chain(0..6).chain(0x7ffa..0x8006_u16);
        for size in [1, 2, 4_u16] {
            let memory = memory();
            let driver = Driver::new(&memory, 0x1000, size);
            let ends = vec![(0, 0); usize::from(size)];
            memory.write_slice(&table_bytes(&ends), GuestAddress(0x1000)).unwrap();
            let heads: Vec<u16> = (0..size).rev().collect();
            for (next, available) in indices().flat_map(|next| indices().map(move |index| (next, index))) {
                let context = format!("size {size}, next {next:#x}, available {available:#x}");
                driver.set_available(&heads, available);
                memory.write_obj(next, GuestAddress(0x1a02)).unwrap();
                let mut queue = driver.queue();
                queue.set_next_avail(next);
                queue.set_next_used(next);
                let mut ring = Ring::new(queue, memory.clone());
                let pending = available.wrapping_sub(next);
                let valid = pending <= size;
                let chains = if valid { pending } else { 0 };
                for step in 0..chains {
                    let slot = next.wrapping_add(step) % size;
                    let chain = ring.pop().unwrap().unwrap();
                    let head = heads[usize::from(slot)];
                    let expected = Chain { head, readable: vec![buffer(head)], writable: Vec::new() };
                    assert_eq!(chain, expected, "{context}");
                    ring.complete(chain.head, u32::from(step));
                    let used = GuestAddress(0x1a04 + u64::from(slot) * 8);
                    let element: [u32; 2] = memory.read_obj(used).unwrap();
                    assert_eq!(element, [u32::from(chain.head), u32::from(step)], "{context}");
                }
                assert!(ring.pop().is_none() && ring.pop().is_none(), "{context}");
                assert_eq!(ring.malformed(), u64::from(!valid), "{context}");
                let used: u16 = memory.read_obj(GuestAddress(0x1a02)).unwrap();
                assert_eq!(used, next.wrapping_add(chains), "{context}");
            }
        }
    }

    /// 6 tables of one descriptor, 64 of two and 20,736 of four.
    #[test]
    fn every_small_table_yields_the_chain_of_a_walk_or_is_refused() {
        for (size, tables) in [(1, 6), (2, 64), (4, 20_736)] {
            let memory = memory();
            let mut driver = Driver::new(&memory, 0x1000, size);
            driver.set_available(&[0], 1);
            for number in 0..tables {
                let table = table(number, size, &[0, WRITE]);
                memory.write_slice(&table_bytes(&table), GuestAddress(0x1000)).unwrap();
                let mut ring = driver.ring();
                let expected = walk(&table);
                let refused = expected.is_none();
                assert_eq!(ring.pop(), Some(expected.ok_or(Malformed)), "{table:?}");
                assert_eq!((ring.malformed(), ring.pop()), (u64::from(refused), None), "{table:?}");
            }
            assert!(driver.used().iter().all(|&used| used == (0, 0)));
        }
    }

    /// 33 lengths of an indirect table, and 64 tables for each: 2,112 cases.
    #[test]
    fn every_small_indirect_table_yields_the_chain_of_a_walk_or_is_refused() {
        let memory = memory();
        let driver = Driver::new(&memory, 0x1000, 2);
        driver.set_available(&[0], 1);
        for length in 0..=32_u32 {
            let segment = Segment { address: GuestAddress(0x4000), length };
            memory.write_slice(&descriptor(segment, INDIRECT, 0), GuestAddress(0x1000)).unwrap();
            for number in 0..64 {
                let table = table(number, 2, &[0, INDIRECT]);
                memory.write_slice(&table_bytes(&table), GuestAddress(0x4000)).unwrap();
                let entries = usize::try_from(length / 16).unwrap();
                let expected = if length.is_multiple_of(16) { walk(&table[..entries]) } else { None };
                let popped = driver.ring().pop();
                assert_eq!(popped, Some(expected.ok_or(Malformed)), "length {length}, {table:?}");
            }
        }
    }

    #[test]
    fn every_head_beyond_a_small_queue_is_refused_without_a_used_buffer() {
        for size in [1, 2, 4_u16] {
            for head in size..=u16::from(u8::MAX) {
                let memory = memory();
                let mut driver = Driver::new(&memory, 0x1000, size);
                driver.set_available(&[head], 1);
                let mut ring = driver.ring();
                assert_eq!((ring.pop(), ring.pop()), (Some(Err(Malformed)), None));
                assert!(driver.used().is_empty() && ring.malformed() == 2, "size {size}, head {head}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_in_the_rings_end_without_a_panic(
            table in prop::collection::vec(any::<u8>(), 256),
            heads in prop::collection::vec(any::<u16>(), 16),
            index in any::<u16>(),
        ) {
            let memory = memory();
            let driver = Driver::new(&memory, 0x1000, 16);
            memory.write_slice(&table, GuestAddress(0x1000)).unwrap();
            driver.set_available(&heads, index);
            let mut ring = driver.ring();
            let popped = std::iter::from_fn(|| ring.pop()).count();
            prop_assert!(popped <= 16);
            if index > 16 {
                prop_assert_eq!(popped, 0);
            }
        }
    }
}
