//! The pattern of words: a function of a seed and a position, the same as in `kernels/egm.cu`. Pure.

/// Value of word `index` of memory that was filled with `seed`.
#[must_use]
pub const fn pattern(seed: u64, index: u64) -> u64 {
    let x = seed.wrapping_add(index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^ (x >> 29)
}

/// The sum of the first `words` of them.
#[must_use]
pub fn sum(seed: u64, words: u64) -> u64 {
    (0..words).fold(0, |sum, index| sum.wrapping_add(pattern(seed, index)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn neither_another_position_nor_another_seed_has_the_same_word() {
        let words: BTreeSet<u64> = (0..10_000).map(|index| pattern(7, index)).collect();
        assert_eq!(words.len(), 10_000);
        assert!((0..10_000).all(|index| !words.contains(&pattern(1 << 40, index))));
        assert_eq!(sum(7, 3), pattern(7, 0).wrapping_add(pattern(7, 1)).wrapping_add(pattern(7, 2)));
    }
}
