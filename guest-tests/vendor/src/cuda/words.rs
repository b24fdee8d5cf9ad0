//! Memory that processors and GPUs access at the same time. This is an unsafe module.
//!
//! It guarantees: there is no reference to the bytes; each access is one aligned word inside, volatile or atomic, so
//! that the compiler neither invents nor drops one.
#![expect(unsafe_code, reason = "what a device changes is no memory of Rust's")]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cuda::pattern;

/// Words that differ from the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrong {
    /// Number of words that differ.
    pub count: u64,
    /// Index of one of them.
    pub index: u64,
    /// Value of that word.
    pub value: u64,
}

/// The words of some memory, for processors.
#[derive(Clone, Copy)]
pub struct Words<'m> {
    start: NonNull<u64>,
    count: u64,
    memory: PhantomData<&'m ()>,
}

// SAFETY: an address range that is valid in every thread, accessed by single words.
unsafe impl Send for Words<'_> {}
// SAFETY: as above.
unsafe impl Sync for Words<'_> {}

impl<'m> Words<'m> {
    /// `count` words at `start`, which `memory` has mapped for processors.
    pub(crate) fn new<M>(_memory: &'m M, start: NonNull<u8>, count: u64) -> Self {
        Self { start: start.cast(), count, memory: PhantomData }
    }

    /// Number of words, each of 64 bits.
    #[must_use]
    pub fn count(self) -> u64 {
        self.count
    }

    /// `count` of them from `first`; fewer where there are no more.
    #[must_use]
    pub fn part(self, first: u64, count: u64) -> Self {
        let first = first.min(self.count);
        let start = self.start.as_ptr().wrapping_add(usize::try_from(first).unwrap_or(0));
        let start = NonNull::new(start).unwrap_or(self.start);
        Self { start, count: count.min(self.count - first), memory: PhantomData }
    }

    fn place(self, index: u64) -> Option<*mut u64> {
        let inside = usize::try_from(index).ok().filter(|_| index < self.count)?;
        Some(self.start.as_ptr().wrapping_add(inside))
    }

    fn atomic(self, index: u64) -> Option<&'m AtomicU64> {
        // SAFETY: `place` checked that it lies inside; it is aligned, and all other accesses to it are by single words.
        self.place(index).map(|place| unsafe { AtomicU64::from_ptr(place) })
    }

    /// The word at `index`; 0 outside.
    #[must_use]
    pub fn read(self, index: u64) -> u64 {
        // SAFETY: `place` checked that it lies inside, and is aligned.
        self.place(index).map_or(0, |place| unsafe { place.read_volatile() })
    }

    /// Writes the word at `index`; nothing outside.
    pub fn write(self, index: u64, value: u64) {
        if let Some(place) = self.place(index) {
            // SAFETY: as in `read`.
            unsafe { place.write_volatile(value) };
        }
    }

    /// Adds 1 at once, for processors and GPUs.
    pub fn increment(self, index: u64) {
        self.atomic(index).map(|word| word.fetch_add(1, Ordering::Relaxed));
    }

    /// Reads it before all that follows.
    #[must_use]
    pub fn acquire(self, index: u64) -> u64 {
        self.atomic(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes it after all that came before.
    pub fn release(self, index: u64, value: u64) {
        if let Some(word) = self.atomic(index) {
            word.store(value, Ordering::Release);
        }
    }

    /// Writes the pattern of `seed`.
    pub fn fill(self, seed: u64) {
        for index in 0..self.count {
            self.write(index, pattern(seed, index));
        }
    }

    /// Compares with the pattern of `seed`.
    #[must_use]
    pub fn compare(self, seed: u64) -> Option<Wrong> {
        let mut wrong: Option<Wrong> = None;
        for index in 0..self.count {
            let value = self.read(index);
            if value != pattern(seed, index) {
                let first = wrong.unwrap_or(Wrong { count: 0, index, value });
                wrong = Some(Wrong { count: first.count + 1, ..first });
            }
        }
        wrong
    }

    /// The sum of all.
    #[must_use]
    pub fn sum(self) -> u64 {
        (0..self.count).fold(0, |sum, index| sum.wrapping_add(self.read(index)))
    }
}
