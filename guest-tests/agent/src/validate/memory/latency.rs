//! Claim: a chain of addresses leads through every cache line of a buffer once and back; time of one step, by size. The
//! order is random, so that no prefetcher knows the next one; where the buffer is larger than what small pages' TLB
//! reaches, misses of that are in the figure too.

use std::hint::black_box;
use std::time::Instant;

use egm_guest::findings::Figure;

use super::{node_memory, sizes};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::validate::Setting;

/// Bytes between two places of the chain.
const LINE: usize = 64;
/// Steps of a round at least.
const STEPS: usize = 1 << 17;

pub(super) fn run(setting: &Setting) -> Result<Finding, Broken> {
    node_memory::in_each(setting, |claim, place, rounds| {
        let mut memory = place.memory(place.size)?;
        let mut figures = Vec::new();
        for size in sizes(place.size) {
            let Some(bytes) = memory.bytes_mut().get_mut(..size) else { continue };
            let mut times = times(claim, &place.name(), bytes, setting.seed, rounds);
            figures.push(Figure::of(format!("step, {}", place.name()), Some(size as u64), "ns", &mut times));
        }
        Ok(figures)
    })
}

/// Nanoseconds of one step, in each round.
pub(super) fn times(claim: &mut Claim, name: &str, bytes: &mut [u8], seed: u64, rounds: u32) -> Vec<f64> {
    let lines = write_chain(bytes, seed);
    along(claim, name, bytes, lines, rounds)
}

/// The same over a chain that is there.
fn along(claim: &mut Claim, name: &str, bytes: &[u8], lines: usize, rounds: u32) -> Vec<f64> {
    let once = follow(bytes, 0, lines);
    claim.holds(once == 0, || {
        format!("{name}: after {lines} steps the chain is at line {once}, not where it began")
    });
    let early = follow(bytes, 0, lines / 2);
    claim.holds(early != 0 || lines < 2, || {
        format!("{name}: the chain is back after half of its {lines} steps")
    });
    let steps = lines.max(STEPS);
    let mut at = 0;
    let round = |_| {
        let begun = Instant::now();
        at = black_box(follow(bytes, at, steps));
        #[expect(clippy::cast_precision_loss, reason = "a figure")]
        let time = begun.elapsed().as_nanos() as f64 / steps as f64;
        time
    };
    (0..rounds).map(round).collect()
}

/// Writes a random cycle through all lines (Sattolo's algorithm) and returns how many there are.
fn write_chain(bytes: &mut [u8], seed: u64) -> usize {
    let lines = (bytes.len() / LINE).min(1 << 31);
    let mut next: Vec<u32> = (0..u32::try_from(lines).unwrap_or(0)).collect();
    let mut random = Random::new(seed);
    for index in (1..next.len()).rev() {
        let other = random.below(index);
        next.swap(index, other);
    }
    for (line, next) in bytes.chunks_exact_mut(LINE).zip(&next) {
        line[..8].copy_from_slice(&u64::from(*next).to_le_bytes());
    }
    lines
}

/// The chain's line, `steps` after `line`.
fn follow(bytes: &[u8], mut line: usize, steps: usize) -> usize {
    let words = bytes.as_chunks::<8>().0;
    for _ in 0..steps {
        let word = words.get(line * (LINE / 8)).map_or(0, |word| u64::from_le_bytes(*word));
        line = usize::try_from(word).unwrap_or(0);
    }
    line
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_chain_that_is_broken_fails() {
        let (mut bytes, mut claim) = (vec![0; 1 << 14], Claim::default());
        assert_eq!(times(&mut claim, "node 1", &mut bytes, 3, 2).len(), 2);
        assert_eq!(claim.finish().outcome, Outcome::Passed);
        let lines = write_chain(&mut bytes, 3);
        for line in [1, 100, 255] {
            let (mut broken, mut claim) = (bytes.clone(), Claim::default());
            broken[LINE * line] ^= 1;
            along(&mut claim, "node 1", &broken, lines, 1);
            let finding = claim.finish();
            assert_eq!(finding.outcome, Outcome::Failed, "line {line}");
            assert!(
                finding.reason.contains("node 1: after 256 steps the chain is at line"),
                "{}",
                finding.reason
            );
        }
    }

    proptest! {
        #[test]
        fn the_chain_meets_every_line_once(lines in 2usize..200, seed: u64) {
            let mut bytes = vec![0; lines * LINE];
            prop_assert_eq!(write_chain(&mut bytes, seed), lines);
            let mut met: Vec<usize> = (0..lines).map(|steps| follow(&bytes, 0, steps)).collect();
            met.sort_unstable();
            prop_assert_eq!(met, (0..lines).collect::<Vec<_>>());
        }
    }
}
