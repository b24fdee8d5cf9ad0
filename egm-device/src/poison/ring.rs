//! Faults on their way from a signal handler to a reader: bounded, without locks, each fault in one word.
//!
//! ```text
//! 63 ........ 12   11 ........ 7   6         5 ... 0
//! address          0               consumed  log2 of the bytes that are bad, 12 at least
//! ```
//! A slot is empty when it is 0. A writer needs one successful exchange and a reader one swap, so a handler may
//! interrupt any thread at any instruction. Order is lost and equal faults become one, which is right for bad pages.

use std::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 64;
const CONSUMED: u64 = 1 << 6;
const SHIFT: u64 = CONSUMED - 1;
/// A page has 4 KiB at least: the bits below are free for the rest.
const PAGE_SHIFT: u64 = 12;

/// A bad page in this process's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fault {
    /// First bad byte, a multiple of `size`.
    pub(super) address: u64,
    /// Bad bytes, a power of two.
    pub(super) size: u64,
    /// A thread read it (BUS_MCEERR_AR), as opposed to a notification before any access (BUS_MCEERR_AO).
    pub(super) consumed: bool,
}

impl Fault {
    /// The fault at `address` of `2^shift` bytes; a shift that no page has becomes that of the smallest page.
    pub(super) fn new(address: u64, shift: i16, consumed: bool) -> Self {
        let shift = u64::try_from(shift).ok().filter(|shift| (PAGE_SHIFT..SHIFT).contains(shift));
        let size = 1u64 << shift.unwrap_or(PAGE_SHIFT);
        Self { address: address & !(size - 1), size, consumed }
    }

    pub(super) fn word(self) -> u64 {
        let consumed = if self.consumed { CONSUMED } else { 0 };
        self.address | consumed | u64::from(self.size.trailing_zeros())
    }

    pub(super) fn of_word(word: u64) -> Option<Self> {
        let size = 1u64.checked_shl(u32::try_from(word & SHIFT).ok()?)?;
        let address = word & !((1 << PAGE_SHIFT) - 1);
        (word != 0).then_some(Self { address, size, consumed: word & CONSUMED != 0 })
    }
}

/// At most 64 unread faults.
#[derive(Debug)]
pub(super) struct Ring {
    slots: [AtomicU64; SLOTS],
    lost: AtomicU64,
}

impl Ring {
    pub(super) const fn new() -> Self {
        Self { slots: [const { AtomicU64::new(0) }; SLOTS], lost: AtomicU64::new(0) }
    }

    /// Stores `fault`, or counts it when all slots are taken. Safe in a signal handler.
    pub(super) fn push(&self, fault: Fault) {
        let word = fault.word();
        let taken = self.slots.iter().any(|slot| {
            let before = slot.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire);
            before.is_ok() || before == Err(word)
        });
        if !taken {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All stored faults, sorted, and the number of faults lost since the last call.
    pub(super) fn take(&self) -> (Vec<Fault>, u64) {
        let words = self.slots.iter().map(|slot| slot.swap(0, Ordering::AcqRel));
        let mut faults: Vec<_> = words.filter_map(Fault::of_word).collect();
        faults.sort_unstable();
        faults.dedup();
        (faults, self.lost.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_fault_comes_out_as_it_went_in(address: u64, shift: i16, consumed: bool) {
            let fault = Fault::new(address, shift, consumed);
            prop_assert_eq!(Fault::of_word(fault.word()), Some(fault));
            prop_assert!(fault.size >= 0x1000 && fault.address.is_multiple_of(fault.size));
            prop_assert!(address - fault.address < fault.size);
        }
    }

    #[test]
    fn faults_of_many_threads_come_out_once_each_and_the_rest_is_counted() {
        let ring = Ring::new();
        let fault = |n: u64| Fault::new(n << 12, 12, true);
        thread::scope(|scope| {
            for t in 0..4 {
                let ring = &ring;
                scope.spawn(move || (0..16).for_each(|n| ring.push(fault(t * 16 + n))));
            }
        });
        ring.push(fault(7)); // known already
        ring.push(fault(1000));
        let (faults, lost) = ring.take();
        assert_eq!(faults.into_iter().collect::<BTreeSet<_>>(), (0..64).map(fault).collect());
        assert_eq!(lost, 1);
        assert_eq!(ring.take(), (Vec::new(), 0));
    }
}
