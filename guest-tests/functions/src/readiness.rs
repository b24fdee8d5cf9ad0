//! The two words by which a Grace GPU reports that its memory is usable. Pure.
//!
//! Linux' nvgrace-gpu waits for both when it binds the GPU, and again at the first access after a reset
//! (`drivers/vfio/pci/nvgrace-gpu/main.c`). Time here is counted in reads, independent of a machine's speed.

use crate::registers::{LINK, TRAINING};

/// A number of reads that means: never ready.
pub const NEVER: u32 = u32::MAX;
/// Value of a word once its part is trained, and until then.
const TRAINED: u32 = 0xff;
const UNTRAINED: u32 = 0;

/// The state of both words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    reads: u32,
    /// Remaining reads of the link's word and of the memory's that return "not yet".
    left: [u32; 2],
    refused: u32,
}

impl Readiness {
    /// A GPU that was just switched on: each word returns "not yet" for `reads` reads, or for all ([`NEVER`]).
    #[must_use]
    pub const fn new(reads: u32) -> Self {
        Self { reads, left: [reads; 2], refused: 0 }
    }

    /// Number of reads that each word takes after a reset.
    #[must_use]
    pub const fn reads(&self) -> u32 {
        self.reads
    }

    /// Changes that number from the next reset on.
    pub const fn set_reads(&mut self, reads: u32) {
        self.reads = reads;
    }

    /// Number of "not yet" reads since the GPU was switched on.
    #[must_use]
    pub const fn refused(&self) -> u32 {
        self.refused
    }

    /// Makes both untrained.
    pub const fn reset(&mut self) {
        self.left = [self.reads; 2];
    }

    /// Reads the word at `offset` of BAR 0; `None` where there is no such word. The memory is trained over the link:
    /// its word counts no reads before the link is ready.
    pub fn read(&mut self, offset: u64) -> Option<u32> {
        let [link, memory] = &mut self.left;
        let waits = *link > 0;
        let left = match offset {
            LINK => link,
            TRAINING => memory,
            _ => return None,
        };
        if *left == 0 {
            return Some(TRAINED);
        }
        let counts = offset == LINK || !waits;
        if counts && *left != NEVER {
            *left -= 1;
        }
        self.refused = self.refused.saturating_add(1);
        Some(UNTRAINED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(gpu: &mut Readiness) -> [Option<u32>; 2] {
        [LINK, TRAINING].map(|offset| gpu.read(offset))
    }

    #[test]
    fn the_link_comes_first_and_each_reset_begins_anew() {
        let mut gpu = Readiness::new(2);
        let [not, yes] = [UNTRAINED, TRAINED].map(Some);
        for round in 0..2 {
            assert_eq!([both(&mut gpu), both(&mut gpu)], [[not, not]; 2], "{round}");
            // The second time the link was ready when the memory was read.
            assert_eq!(both(&mut gpu), [yes, not]);
            assert_eq!(both(&mut gpu), [yes, yes]);
            assert_eq!(gpu.refused(), 5 * (round + 1));
            gpu.reset();
        }
        assert_eq!(gpu.read(LINK + 4), None);
    }

    #[test]
    fn another_number_of_reads_counts_from_the_next_reset_on() {
        let mut gpu = Readiness::new(0);
        assert_eq!(both(&mut gpu), [Some(TRAINED); 2]);
        gpu.set_reads(NEVER);
        assert_eq!((both(&mut gpu), gpu.reads()), ([Some(TRAINED); 2], NEVER));
        gpu.reset();
        for _ in 0..1000 {
            assert_eq!(both(&mut gpu), [Some(UNTRAINED); 2]);
        }
        gpu.set_reads(1);
        assert_eq!(gpu.read(LINK), Some(UNTRAINED), "not before it is reset");
        gpu.reset();
        gpu.read(LINK);
        gpu.read(TRAINING);
        assert_eq!(both(&mut gpu), [Some(TRAINED); 2]);
    }
}
