//! Claim: reads, writes and copies give the right bytes; how fast, by size. A figure is the median of its rounds, each
//! of many passes where the buffer is small. A copy's bytes are counted once. One thread, and at the largest size also
//! one on each of the nearest processors.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use egm_guest::findings::Figure;

use super::node_memory::{self, NodeMemory};
use super::sizes;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern;
use crate::validate::Setting;

/// Bytes that a round moves at most, where one pass is less.
const ROUND: usize = 32 << 20;
/// About how long a round takes at most, where one pass is shorter: on an emulated processor that is few bytes.
const LONG: Duration = Duration::from_millis(20);
/// Content of destinations before: no byte that is written.
const POISON: u8 = 0xa5;
const UNIT: &str = "GB/s";
const MOST_THREADS: usize = 256;

pub(super) fn run(setting: &Setting) -> Result<Finding, Broken> {
    let finding =
        node_memory::in_each(setting, |claim, place, rounds| of(claim, place, setting.seed, rounds))?;
    // Small buffers are in caches: what memory gives is at the largest size.
    let largest = finding.figures().iter().filter_map(|figure| figure.bytes).max();
    let of_memory = finding.figures().iter().filter(|figure| figure.bytes == largest);
    let best = of_memory.map(|figure| figure.value).max_by(f64::total_cmp);
    Ok(match best {
        Some(best) => finding.with_value(best, UNIT),
        None => finding,
    })
}

/// The figures of one place.
fn of(claim: &mut Claim, place: &NodeMemory, seed: u64, rounds: u32) -> Result<Vec<Figure>, Broken> {
    let mut figures = Vec::new();
    let (mut source, mut target) = (place.memory(place.size)?, place.memory(place.size)?);
    pattern::fill(source.bytes_mut(), seed, 0, 0);
    target.bytes_mut().fill(POISON);
    for size in sizes(place.size) {
        let parts = (source.bytes().get(..size), target.bytes_mut().get_mut(..size));
        let (Some(from), Some(to)) = parts else { continue };
        for (operation, mut speeds) in measure(claim, place, from, to, seed, rounds) {
            let series = format!("{operation}, {}", place.name());
            figures.push(Figure::of(series, Some(size as u64), UNIT, &mut speeds));
        }
    }
    let threads = threads(place);
    if threads > 1 {
        for (operation, mut speeds) in
            together(claim, place, source.bytes(), target.bytes_mut(), seed, rounds)
        {
            let series = format!("{operation}, {}, {threads} threads", place.name());
            figures.push(Figure::of(series, Some(place.size as u64), UNIT, &mut speeds));
        }
    }
    Ok(figures)
}

/// Speeds of the rounds of each operation.
pub(super) type Speeds = Vec<(&'static str, Vec<f64>)>;

/// Measures with one thread; `from` holds the pattern `seed`.
pub(super) fn measure(
    claim: &mut Claim,
    place: &NodeMemory,
    from: &[u8],
    to: &mut [u8],
    seed: u64,
    rounds: u32,
) -> Speeds {
    let (mut read, mut write, mut copy) = (Vec::new(), Vec::new(), Vec::new());
    let expected = pattern_sum(seed, from.len() as u64 / 8);
    for round in 0..rounds {
        let mut is = 0;
        read.push(speed(from.len(), || is = sum(black_box(from))));
        claim.holds(is == expected, || {
            format!("{}: {} bytes read add up to {is:#x}, not {expected:#x}", place.name(), from.len())
        });
        let value = u8::try_from(round % 128).unwrap_or(0); // never the poison
        write.push(speed(to.len(), || black_box(&mut *to).fill(value)));
        wrong_fill(claim, place, to, value);
        to.fill(POISON);
        copy.push(speed(to.len(), || black_box(&mut *to).copy_from_slice(black_box(from))));
        wrong_copy(claim, place, to, seed);
        to.fill(POISON);
    }
    vec![("read", read), ("write", write), ("copy", copy)]
}

fn wrong_fill(claim: &mut Claim, place: &NodeMemory, bytes: &[u8], value: u8) {
    if let Some(at) = bytes.iter().position(|byte| *byte != value) {
        claim.untrue(format!("{}: byte {at:#x} of {:#x} was not written", place.name(), bytes.len()));
    }
}

fn wrong_copy(claim: &mut Claim, place: &NodeMemory, bytes: &[u8], seed: u64) {
    if let Some(at) = pattern::difference(bytes, seed, 0, 0) {
        claim.untrue(format!("{}: byte {at:#x} of {:#x} was not copied", place.name(), bytes.len()));
    }
}

/// One thread for each of the nearest processors.
fn threads(place: &NodeMemory) -> usize {
    place.cpus.len().clamp(1, MOST_THREADS)
}

/// Measures with a thread for each of the nearest processors, each on its part, all at once.
fn together(
    claim: &mut Claim,
    place: &NodeMemory,
    from: &[u8],
    to: &mut [u8],
    seed: u64,
    rounds: u32,
) -> Speeds {
    let threads = threads(place);
    let part = from.len().div_ceil(threads).next_multiple_of(8);
    let (mut read, mut write, mut copy) = (Vec::new(), Vec::new(), Vec::new());
    let expected = pattern_sum(seed, from.len() as u64 / 8);
    for round in 0..rounds {
        let begun = Instant::now();
        let is = thread::scope(|scope| {
            let sums: Vec<_> = from.chunks(part).map(|chunk| scope.spawn(move || sum(chunk))).collect();
            sums.into_iter().fold(0u64, |all, sum| all.wrapping_add(sum.join().unwrap_or(0)))
        });
        read.push(rate(from.len(), begun));
        claim.holds(is == expected, || {
            format!("{}: {threads} threads read {is:#x}, not {expected:#x}", place.name())
        });
        let value = u8::try_from(round % 128).unwrap_or(0);
        let begun = Instant::now();
        thread::scope(|scope| {
            to.chunks_mut(part).for_each(|chunk| drop(scope.spawn(move || chunk.fill(value))))
        });
        write.push(rate(to.len(), begun));
        wrong_fill(claim, place, to, value);
        to.fill(POISON);
        let begun = Instant::now();
        thread::scope(|scope| {
            for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
                scope.spawn(move || to.copy_from_slice(from));
            }
        });
        copy.push(rate(to.len(), begun));
        wrong_copy(claim, place, to, seed);
        to.fill(POISON);
    }
    vec![("read", read), ("write", write), ("copy", copy)]
}

/// GB/s of passes over `size` bytes: one that is not counted shows how many fit in a round.
fn speed(size: usize, mut pass: impl FnMut()) -> f64 {
    let begun = Instant::now();
    pass();
    let fit = LONG.as_nanos() / begun.elapsed().as_nanos().max(1);
    let most = (ROUND / size.max(1)).max(1);
    let passes = usize::try_from(fit).unwrap_or(most).clamp(1, most);
    let begun = Instant::now();
    for _ in 0..passes {
        pass();
    }
    rate(size.saturating_mul(passes), begun)
}

#[expect(clippy::cast_precision_loss, reason = "a figure")]
fn rate(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_nanos().max(1) as f64
}

/// The sum of all words.
fn sum(bytes: &[u8]) -> u64 {
    bytes.as_chunks::<8>().0.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

/// Sum of the first `count` words of the pattern `seed`, without looking at one.
fn pattern_sum(seed: u64, count: u64) -> u64 {
    let step = pattern::word(0, 1);
    // n (n - 1) / 2, halved before it can overflow.
    let pairs = if count.is_multiple_of(2) {
        (count / 2).wrapping_mul(count.wrapping_sub(1))
    } else {
        (count / 2).wrapping_mul(count)
    };
    count.wrapping_mul(seed).wrapping_add(step.wrapping_mul(pairs))
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;
    use proptest::prelude::*;

    use super::*;

    fn place() -> NodeMemory {
        NodeMemory { node: Some(1), size: 4096, cpus: "0-2".parse().unwrap(), has_cpus: true }
    }

    #[test]
    fn every_operation_has_its_rounds_and_right_bytes() {
        let (mut from, mut to, mut claim) = (vec![0; 1 << 16], vec![POISON; 1 << 16], Claim::default());
        pattern::fill(&mut from, 9, 0, 0);
        let one = measure(&mut claim, &place(), &from, &mut to, 9, 2);
        let many = together(&mut claim, &place(), &from, &mut to, 9, 2);
        for (operation, speeds) in one.iter().chain(&many) {
            assert!(speeds.len() == 2 && speeds.iter().all(|speed| *speed > 0.0), "{operation} {speeds:?}");
        }
        assert_eq!(claim.finish().outcome, Outcome::Passed);
    }

    #[test]
    fn a_byte_that_was_lost_fails() {
        let (mut from, mut to, mut claim) = (vec![0; 1 << 16], vec![POISON; 1 << 16], Claim::default());
        pattern::fill(&mut from, 9, 0, 0);
        from[777] ^= 4;
        measure(&mut claim, &place(), &from, &mut to, 9, 1);
        let reason = claim.finish().reason;
        assert!(
            reason.contains("bytes read add up") && reason.contains("byte 0x309 of 0x10000 was not copied"),
            "{reason}"
        );
    }

    proptest! {
        #[test]
        fn the_sum_of_a_pattern_is_known_without_looking(seed: u64, words in 0usize..600) {
            let mut bytes = vec![0; words * 8];
            pattern::fill(&mut bytes, seed, 0, 0);
            prop_assert_eq!(sum(&bytes), pattern_sum(seed, words as u64));
        }
    }
}
