//! Bytes that are different at every place, and numbers that look random but repeat.

/// Distance of neighbouring words; odd, so that no two of the 2^64 words of a pattern are equal.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The word at `index` of the pattern `seed`.
pub(crate) const fn word(seed: u64, index: u64) -> u64 {
    seed.wrapping_add(index.wrapping_mul(STEP))
}

/// Fills whole words of `bytes` with the pattern from word `first` on, each word exclusive-or `flip`.
pub(crate) fn fill(bytes: &mut [u8], seed: u64, first: u64, flip: u64) {
    let mut value = word(seed, first);
    for chunk in bytes.as_chunks_mut::<8>().0 {
        *chunk = (value ^ flip).to_le_bytes();
        value = value.wrapping_add(STEP);
    }
}

/// The offset of the first byte that is not as [`fill`] left it.
pub(crate) fn difference(bytes: &[u8], seed: u64, first: u64, flip: u64) -> Option<usize> {
    let mut value = word(seed, first);
    for (index, chunk) in bytes.as_chunks::<8>().0.iter().enumerate() {
        let wrong = u64::from_le_bytes(*chunk) ^ value ^ flip;
        if wrong != 0 {
            return Some(index * 8 + usize::try_from(wrong.trailing_zeros() / 8).unwrap_or(0));
        }
        value = value.wrapping_add(STEP);
    }
    None
}

/// Numbers that look random and are the same for the same seed (Vigna, `SplitMix64`).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// The next 32 bits.
    pub(crate) const fn next_u32(&mut self) -> u32 {
        let [a, b, c, d, ..] = self.next().to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// A number below `limit`, 0 when that is 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.next() % limit).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_page_and_every_word_is_different() {
        let mut bytes = vec![0; 1 << 16];
        fill(&mut bytes, 1, 0, 0);
        assert_eq!(bytes.chunks(8).collect::<HashSet<_>>().len(), (1 << 16) / 8);
        assert_eq!(bytes.chunks(4096).collect::<HashSet<_>>().len(), 16);
    }

    proptest! {
        #[test]
        fn one_wrong_byte_is_found_where_it_is(seed: u64, first: u64, at in 0usize..4096, flip in 1u8..) {
            let mut bytes = vec![0; 4096];
            fill(&mut bytes, seed, first, !0);
            prop_assert_eq!(difference(&bytes, seed, first, !0), None);
            bytes[at] ^= flip;
            prop_assert_eq!(difference(&bytes, seed, first, !0), Some(at));
        }
        #[test]
        fn a_part_of_a_pattern_continues_it(seed: u64, words in 1usize..64) {
            let mut whole = vec![0; 1024];
            fill(&mut whole, seed, 0, 0);
            prop_assert_eq!(difference(&whole[words * 8..], seed, u64::try_from(words).unwrap(), 0), None);
        }
        #[test]
        fn random_numbers_stay_below_their_limit(seed: u64, limit: usize) {
            prop_assert!(Random::new(seed).below(limit) < limit.max(1));
        }
    }
}
