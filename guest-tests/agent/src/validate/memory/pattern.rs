//! Claim: memory of every node keeps what several processors write. Each part is written by one thread and read by
//! another, so that bytes which stayed in one processor's caches alone would be seen; every word is different, and the
//! second round inverts each bit.

use std::thread;

use super::node_memory;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::{difference, fill};
use crate::tree::Tree;
use crate::validate::Setting;

const MOST_THREADS: usize = 64;

pub(super) fn run(setting: &Setting) -> Result<Finding, Broken> {
    let (places, left_out) = node_memory::places(&Tree::live(), setting)?;
    if places.is_empty() {
        return Ok(Finding::skipped(left_out.join("; ")));
    }
    let cpus = thread::available_parallelism().map_or(2, |count| count.get().max(2));
    let threads = setting.args.get("memory.threads", cpus)?.clamp(2, MOST_THREADS);
    let mut claim = Claim::default();
    for place in &places {
        let mut memory = place.memory(place.size)?;
        for (round, flip) in [0, u64::MAX].into_iter().enumerate() {
            let seed = setting.seed.wrapping_add(round as u64);
            write(memory.bytes_mut(), threads, seed, flip);
            for offset in wrong(memory.bytes(), threads, seed, flip) {
                claim.untrue(format!(
                    "{} did not keep the byte at {offset:#x} of {:#x}",
                    place.name(),
                    place.size
                ));
            }
        }
        claim.seen(format!("{}: {} bytes", place.name(), place.size));
    }
    claim.seen(format!("{threads} threads"));
    left_out.into_iter().for_each(|left| claim.seen(left));
    Ok(claim.finish())
}

/// Bytes of each thread's part, a multiple of a word.
fn part(size: usize, threads: usize) -> usize {
    size.div_ceil(threads).next_multiple_of(8)
}

fn write(bytes: &mut [u8], threads: usize, seed: u64, flip: u64) {
    let part = part(bytes.len(), threads);
    thread::scope(|scope| {
        for (index, chunk) in bytes.chunks_mut(part).enumerate() {
            scope.spawn(move || fill(chunk, seed, (index * part / 8) as u64, flip));
        }
    });
}

/// Where each thread's part is not as it was written: each thread starts one part further than the one that wrote it.
fn wrong(bytes: &[u8], threads: usize, seed: u64, flip: u64) -> Vec<usize> {
    let part = part(bytes.len(), threads);
    let mut parts: Vec<(usize, &[u8])> = bytes.chunks(part).enumerate().collect();
    parts.rotate_left(1);
    thread::scope(|scope| {
        let read = |(index, chunk): (usize, &'_ [u8])| {
            difference(chunk, seed, (index * part / 8) as u64, flip).map(|offset| index * part + offset)
        };
        let reads: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || read(part))).collect();
        // A thread that panicked has found something, too.
        reads.into_iter().filter_map(|read| read.join().unwrap_or(Some(0))).collect()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_wrong_byte_is_found_whatever_the_parts(threads in 2usize..9, at in 0usize..8000, flip: bool) {
            let mut bytes = vec![0; 8000];
            let flip = if flip { u64::MAX } else { 0 };
            write(&mut bytes, threads, 7, flip);
            prop_assert_eq!(wrong(&bytes, threads, 7, flip), Vec::<usize>::new());
            prop_assert_eq!(difference(&bytes, 7, 0, flip), None, "the parts are one pattern");
            bytes[at] ^= 1;
            prop_assert_eq!(wrong(&bytes, threads, 7, flip), vec![at]);
        }
    }
}
