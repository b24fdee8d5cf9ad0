//! Reports of bad memory that was not read yet, for a guest without machine checks: a record in the error block that
//! its tables name, and an interrupt (ACPI 6.5, clause 18.3.2.7).
//!
//! The guest clears the status of the block when it has read it. Further bad pages wait until then, and the interrupt
//! comes again at each check ([`super::again`]): a lost interrupt must not be the last.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use egm_address::{Gpa, Guest, Span};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::record::{self, PAGE};

/// Pages that may wait, 1 GiB of them; later ones are left out. The guest gets an abort when it reads those.
const MOST_WAITING: usize = 1 << 18;
/// Bytes of the status, the block's first field.
const STATUS: usize = 4;

/// Interrupts the guest, once for each call.
pub(in crate::machine) type Interrupt = Box<dyn Fn() + Send>;

pub(in crate::machine) struct ErrorBlock {
    memory: GuestMemoryMmap,
    at: Gpa,
    interrupt: Interrupt,
    waiting: VecDeque<Gpa>,
    /// There is a record in the block that the guest has not been seen to clear.
    has_record: bool,
}

impl ErrorBlock {
    /// The block at `at` of `memory`, without a record so far.
    pub(in crate::machine) const fn new(memory: GuestMemoryMmap, at: Gpa, interrupt: Interrupt) -> Self {
        Self { memory, at, interrupt, waiting: VecDeque::new(), has_record: false }
    }

    /// Reports `bad` to the guest, now or once it has read the last record. Returns whether all of it had room.
    pub(super) fn report(&mut self, bad: Span<Guest>) -> bool {
        let first = bad.start().get() & !(PAGE - 1);
        let mut pages = (first..bad.end().get()).step_by(usize::try_from(PAGE).unwrap_or(usize::MAX));
        let room = MOST_WAITING.saturating_sub(self.waiting.len());
        self.waiting.extend(pages.by_ref().take(room).map(Gpa::new));
        self.write();
        pages.next().is_none()
    }

    /// Whether the guest has a record to read, or pages wait for the next.
    pub(super) fn waits(&self) -> bool {
        self.has_record || !self.waiting.is_empty()
    }

    /// Whether the block itself is in `bad`.
    pub(super) fn is_on(&self, bad: Span<Guest>) -> bool {
        Span::new(self.at, PAGE).is_ok_and(|block| block.overlaps(bad))
    }

    /// Writes the next record when the guest has read the last, else interrupts it again. Returns whether it was read.
    pub(super) fn go_on(&mut self) -> bool {
        let read = self.is_clear();
        self.has_record &= !read;
        if self.has_record {
            (self.interrupt)()
        } else {
            self.write()
        }
        read
    }

    fn is_clear(&self) -> bool {
        let status = self.memory.load::<u32>(GuestAddress(self.at.get()), Ordering::Acquire);
        status.is_ok_and(|status| status == 0)
    }

    /// Writes the next record into a clear block. A guest that writes to the block spoils only its own records.
    fn write(&mut self) {
        if self.waiting.is_empty() || !self.is_clear() {
            return;
        }
        let status = GuestAddress(self.at.get());
        let next: Vec<Gpa> = self.waiting.drain(..self.waiting.len().min(record::MOST)).collect();
        let block = record::block(&next);
        let Some((first, rest)) = block.split_first_chunk::<STATUS>() else { return };
        let behind = GuestAddress(self.at.get().saturating_add(STATUS as u64));
        // The block is in the machine's own window of tables, which is always there.
        let _ = self.memory.write_slice(rest, behind);
        let _ = self.memory.store(u32::from_le_bytes(*first), status, Ordering::Release);
        self.has_record = true;
        if !egm_address::fault!("poison-not-delivered") {
            (self.interrupt)();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::*;

    const AT: Gpa = Gpa::new(0x1000);

    fn block() -> (ErrorBlock, Arc<AtomicU32>) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        let interrupt = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (ErrorBlock::new(memory, AT, Box::new(interrupt)), count)
    }

    fn status(block: &ErrorBlock) -> u32 {
        block.memory.read_obj(GuestAddress(AT.get())).unwrap()
    }

    #[test]
    fn what_is_found_while_the_guest_reads_waits_until_it_has() {
        let (mut block, interrupts) = block();
        let bad = |start, size| Span::new(Gpa::new(start), size).unwrap();
        let _ = block.report(bad(0x10_0000, 0x1000));
        assert_eq!((status(&block) >> 4, interrupts.load(Ordering::Relaxed), block.waits()), (1, 1, true));
        let _ = block.report(bad(0x20_0800, 0x1000));
        assert_eq!((status(&block) >> 4, interrupts.load(Ordering::Relaxed), block.waits()), (1, 1, true));
        block.memory.write_obj(0u32, GuestAddress(AT.get())).unwrap();
        let _ = block.go_on();
        assert_eq!((status(&block) >> 4, interrupts.load(Ordering::Relaxed), block.waits()), (2, 2, true));
        let address: u64 = block.memory.read_obj(GuestAddress(AT.get() + 20 + 72 + 16)).unwrap();
        assert_eq!(address, 0x20_0000);
    }

    #[test]
    fn a_guest_that_has_not_read_is_interrupted_at_each_look_until_it_has() {
        let (mut block, interrupts) = block();
        let _ = block.report(Span::new(Gpa::new(0x10_0000), PAGE).unwrap());
        let _ = block.go_on();
        let _ = block.go_on();
        assert_eq!((status(&block) >> 4, interrupts.load(Ordering::Relaxed), block.waits()), (1, 3, true));
        block.memory.write_obj(0u32, GuestAddress(AT.get())).unwrap();
        let _ = block.go_on();
        assert_eq!((status(&block), interrupts.load(Ordering::Relaxed), block.waits()), (0, 3, false));
    }

    #[test]
    fn the_block_is_on_each_bad_span_that_has_a_byte_of_it() {
        let (block, _) = block();
        let on = |start, size| block.is_on(Span::new(Gpa::new(start), size).unwrap());
        assert!(on(0x1000, PAGE) && on(0, 0x10_0000) && on(0x1fff, 1));
        assert!(!on(0, PAGE) && !on(0x2000, PAGE));
    }

    #[test]
    fn pages_without_room_are_not_reported() {
        let (mut block, _) = block();
        let most = MOST_WAITING as u64 * PAGE;
        assert!(block.report(Span::new(Gpa::new(0), most).unwrap()), "a record's pages wait no more");
        assert!(!block.report(Span::new(Gpa::new(most), 27 * PAGE).unwrap()));
    }

    #[test]
    fn more_pages_than_a_record_has_sections_take_several_and_all_of_them_come() {
        let (mut block, interrupts) = block();
        let _ = block.report(Span::new(Gpa::new(0), 30 * PAGE).unwrap());
        assert_eq!(status(&block) >> 4, 26);
        block.memory.write_obj(0u32, GuestAddress(AT.get())).unwrap();
        let _ = block.go_on();
        assert_eq!((status(&block) >> 4, interrupts.load(Ordering::Relaxed)), (4, 2));
    }
}
