//! The blocks of a zeroed chunk that are read back. Pure: randomness comes in.
//!
//! The first block, the last one, and one at a random place in every [`EACH`] blocks: no program can foresee the
//! places, and a share of memory that did not take the zeroes is found after a number of chunks inverse to that share.

use egm_address::{InRegion, Span};

use super::CHUNK;

/// Bytes that are read back in one piece.
pub(super) const BLOCK: usize = 64 << 10;
const BLOCK_BYTES: u64 = BLOCK as u64;
/// At least one of this many blocks is read back. One random byte chooses it.
const EACH: u64 = 256;
/// Random bytes for a chunk.
pub(super) const RANDOM: usize = 4;
const _: () = assert!(RANDOM as u64 * EACH * BLOCK_BYTES >= CHUNK);

/// The blocks of `chunk` that are read back, ascending; the last may be shorter than [`BLOCK`].
pub(super) fn sample(chunk: Span<InRegion>, random: [u8; RANDOM]) -> Vec<Span<InRegion>> {
    let blocks = chunk.size().div_ceil(BLOCK_BYTES);
    let mut chosen = vec![0, blocks.saturating_sub(1)];
    for (first, random) in (0..blocks).step_by(256).zip(random) {
        let of = blocks.saturating_sub(first).min(EACH);
        let inside = u64::from(random).checked_rem(of).unwrap_or(0);
        chosen.push(first.saturating_add(inside));
    }
    chosen.sort_unstable();
    chosen.dedup();
    let block = |number: u64| {
        let start = chunk.start().checked_add(number.checked_mul(BLOCK_BYTES)?)?;
        let end = start.checked_add(BLOCK_BYTES).filter(|end| *end < chunk.end());
        Span::between(start, end.unwrap_or_else(|| chunk.end()))
    };
    chosen.into_iter().filter_map(block).collect()
}

#[cfg(test)]
mod tests {
    use egm_address::{Offset, SpanSet};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn first_last_and_one_of_each_256_blocks_are_read_back(
            start in 0u64..1 << 40, size in 1..=CHUNK, random: [u8; RANDOM],
        ) {
            let chunk = Span::new(Offset::new(start), size).unwrap();
            let blocks = sample(chunk, random);
            prop_assert_eq!(blocks.first().unwrap().start(), chunk.start());
            prop_assert_eq!(blocks.last().unwrap().end(), chunk.end());
            prop_assert!(blocks.windows(2).all(|pair| pair[0].end() <= pair[1].start()));
            prop_assert!(blocks.iter().all(|block| block.size() <= BLOCK_BYTES));
            for first in (0..size).step_by(16 << 20) {
                let all = Span::new(Offset::new(start + first), (256 * BLOCK_BYTES).min(size - first)).unwrap();
                prop_assert!(blocks.iter().any(|block| all.intersection(*block).is_some()));
            }
            prop_assert!(SpanSet::from_iter(blocks).size() <= size);
        }
    }

    #[test]
    fn every_block_of_a_chunk_may_be_read_back() {
        let chunk = Span::new(Offset::new(0), CHUNK).unwrap();
        let all: SpanSet<_> = (0..=u8::MAX).flat_map(|random| sample(chunk, [random; RANDOM])).collect();
        assert_eq!(all, SpanSet::from_iter([chunk]));
    }
}
