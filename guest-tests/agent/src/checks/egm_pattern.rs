//! Claim: the memory of an EGM node keeps what is written to it. What the node has free (at least 90 %) is bound to the
//! node, filled with words that are different at every place, read back, and both again with all bits inverted; each
//! page must lie on the node. The rest belongs to the guest's kernel and is not tested: the finding reports how much of
//! the planned node was.
//!
//! Everything is written before anything is read, so two addresses that lead to one byte are found too.

use std::fs;
use std::num::NonZero;
use std::thread;

use super::Context;
use super::memory_map::mebibytes;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;
use crate::{pattern, sysfs};

/// Seeds of the two passes: the second pattern is the first with all bits inverted.
const SEED: u64 = 0x4547_4d20_7061_6765;
/// A multiple of every page size in use, so that threads do not share pages.
const GRAIN: usize = 2 << 20;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let _reserve = Reserve::shrink();
    let cpus = thread::available_parallelism().map_or(1, NonZero::get);
    let mut tested = 0;
    for node in context.plan.egm_nodes() {
        let Some(number) = context.plan.linux_node(node.id) else { continue };
        let free = super::free_memory(number)?;
        let kept = low_watermark(&sysfs::text("/proc/zoneinfo")?, number);
        let size = portion(free, kept, cpus);
        tested += one_node(&mut claim, number, size)?;
        claim.holds(percent(size, free) >= 90, || {
            format!(
                "only {} % of node {number}'s {free:#x} free bytes can be taken: the kernel keeps {kept:#x} ({})",
                percent(size, free),
                Reserve::FILE
            )
        });
        let planned = usize::try_from(context.plan.usable(Some(node.id)).size()).unwrap_or(usize::MAX);
        claim.seen(format!(
            "node {number}: {size} of {planned} bytes ({} %; {} % of what is free), all pages on it",
            percent(size, planned),
            percent(size, free)
        ));
    }
    if tested == 0 && claim.is_true() {
        return Ok(Finding::skipped("no EGM memory node is planned"));
    }
    Ok(claim.finish().with_value(mebibytes(u64::try_from(tested).unwrap_or(u64::MAX)), "MiB"))
}

/// `part` of `whole`, rounded down.
fn percent(part: usize, whole: usize) -> usize {
    part.saturating_mul(100) / whole.max(1)
}

/// The memory that the kernel keeps free, made small while this lives. For large pages Linux keeps up to 5 % of all
/// memory (`set_recommended_min_free_kbytes`), shared out by zone size, and wakes reclaim a quarter above that.
struct Reserve(Option<String>);

impl Reserve {
    const FILE: &str = "/proc/sys/vm/min_free_kbytes";

    fn shrink() -> Self {
        let before = sysfs::text(Self::FILE).ok();
        // Without privilege the test takes less memory and may say so.
        Self(before.filter(|_| fs::write(Self::FILE, "2048").is_ok()))
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = fs::write(Self::FILE, before);
        }
    }
}

/// How much of `free` bytes to take: the rest is for the watermark below which the kernel begins to reclaim, for page
/// tables and other allocations meanwhile, and for the free pages that each of `cpus` processors keeps for itself:
/// those of another processor are out of reach, and a thread that finds nothing else is killed.
fn portion(free: usize, watermark: usize, cpus: usize) -> usize {
    let lists = (cpus << 20).min(free / 100 * 3);
    let left = watermark + watermark / 8 + free / 100 + lists + GRAIN;
    free.saturating_sub(left) / GRAIN * GRAIN
}

/// Bytes below which the kernel reclaims memory of `node`, from `/proc/zoneinfo`.
fn low_watermark(text: &str, node: u32) -> usize {
    let prefix = format!("Node {node},");
    let mut here = false;
    let mut pages = 0usize;
    for line in text.lines() {
        if line.starts_with("Node ") {
            here = line.starts_with(&prefix);
        } else if let Some(count) = line.trim().strip_prefix("low ").filter(|_| here) {
            pages = pages.saturating_add(count.trim().parse().unwrap_or(0));
        }
    }
    pages.saturating_mul(rustix::param::page_size())
}

/// Tests `size` bytes of `node`; returns how many were tested.
fn one_node(claim: &mut Claim, node: u32, size: usize) -> Result<usize, Broken> {
    if size == 0 {
        claim.untrue(format!("node {node} has too little free memory to test"));
        return Ok(0);
    }
    let mut memory =
        Mapping::on_node(size, node).map_err(Broken::system(format!("cannot bind memory to node {node}")))?;
    for invert in [0, u64::MAX] {
        parallel(memory.bytes_mut(), |bytes, first| {
            pattern::fill(bytes, SEED, first, invert);
            None
        });
        if let Some(offset) =
            parallel(memory.bytes_mut(), |bytes, first| pattern::difference(bytes, SEED, first, invert))
        {
            claim.untrue(format!("byte {offset:#x} of {size:#x} on node {node} reads back wrong"));
        }
    }
    let page = rustix::param::page_size();
    let nodes = memory.nodes(page).map_err(Broken::system("cannot ask where pages are"))?;
    let elsewhere = nodes.iter().filter(|n| u32::try_from(**n) != Ok(node)).count();
    claim.holds(elsewhere == 0, || format!("{elsewhere} of {} pages are not on node {node}", nodes.len()));
    Ok(size)
}

/// Gives each processor a part of `bytes` with the index of its first word; returns the lowest offset that any reports.
fn parallel(bytes: &mut [u8], work: impl Fn(&mut [u8], u64) -> Option<usize> + Sync) -> Option<usize> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let part = bytes.len().div_ceil(threads).next_multiple_of(GRAIN);
    let work = &work;
    thread::scope(|scope| {
        let workers: Vec<_> = bytes
            .chunks_mut(part)
            .enumerate()
            .map(|(index, chunk)| {
                let start = index * part;
                let first = u64::try_from(start / 8).unwrap_or(u64::MAX);
                scope.spawn(move || work(chunk, first).map(|offset| start + offset))
            })
            .collect();
        // A worker that panicked has tested nothing: its first byte counts as wrong.
        workers.into_iter().enumerate().filter_map(|(i, w)| w.join().unwrap_or(Some(i * part))).min()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_low_watermark_is_summed_over_the_zones_of_a_node() {
        let text = include_str!("../../fixtures/q35/zoneinfo");
        assert_eq!(low_watermark(text, 0), (237 + 7041 + 32) * 4096);
        assert_eq!(low_watermark(text, 2), 0);
    }

    #[test]
    fn nearly_all_free_memory_is_taken_in_whole_grains() {
        let free = 246_264 * 1024;
        let size = portion(free, 2000 * 4096, 2);
        assert!(size.is_multiple_of(GRAIN) && size * 100 / free >= 90);
        assert_eq!(portion(GRAIN, 0, 1), 0);
    }

    #[test]
    fn a_slice_of_128_mib_needs_the_small_reserve() {
        // A guest of 1 GiB with four nodes: what its kernel had free on the slice, and the low watermarks of the
        // reserves of 51 563 KiB that it chooses and of 2048 KiB.
        let free = 0x753_0000;
        assert!(percent(portion(free, 2025 * 4096, 4), free) < 90);
        assert!(percent(portion(free, 80 * 4096, 4), free) >= 90);
    }

    #[test]
    fn parts_continue_one_pattern_and_one_wrong_byte_is_found() {
        let mut memory = vec![0; 3 * GRAIN];
        parallel(&mut memory, |bytes, first| {
            pattern::fill(bytes, SEED, first, 0);
            None
        });
        let check =
            |memory: &mut [u8]| parallel(memory, |bytes, first| pattern::difference(bytes, SEED, first, 0));
        assert_eq!(pattern::difference(&memory, SEED, 0, 0), None);
        assert_eq!(check(&mut memory), None);
        memory[2 * GRAIN + 5] ^= 1;
        assert_eq!(check(&mut memory), Some(2 * GRAIN + 5));
    }
}
