//! Broadcast, fcollect, alltoall and reductions, on the stream.

use egm_vendor::cuda::pattern;
use egm_vendor::nvshmem::Memory;

use super::element::{Element, POISON, first_difference};
use crate::error::Broken;

/// Bytes of one PE's block: one that fits into a message of the library, one that needs many.
const BLOCKS: [usize; 2] = [256, 96 << 10];

/// `nvshmem.collectives`: broadcast, fcollect, alltoall and reductions, with each size of [`BLOCKS`].
pub(super) fn collectives(element: &mut Element<'_>) -> Result<(), Broken> {
    for (round, block) in (0..).zip(BLOCKS) {
        let memory = Buffers::new(element, block)?;
        broadcast(element, &memory, round * 64)?;
        fcollect(element, &memory, round * 64 + 32)?;
        alltoall(element, &memory, round * 64 + 33)?;
        reduce(element, &memory, round * 64 + 34)?;
        element.pe.barrier();
        memory.free(element)?;
    }
    element.found.seen.push(format!("blocks of {} and {} bytes", BLOCKS[0], BLOCKS[1]));
    Ok(())
}

/// Memory with a block for each PE, to read from and to write to.
struct Buffers<'p> {
    to: Memory<'p>,
    from: Memory<'p>,
    block: usize,
}

impl<'p> Buffers<'p> {
    fn new(element: &Element<'p>, block: usize) -> Result<Self, Broken> {
        let bytes = block * element.count();
        Ok(Self { to: element.pe.allocate(bytes)?, from: element.pe.allocate(bytes)?, block })
    }

    fn free(self, element: &Element<'_>) -> Result<(), Broken> {
        element.pe.free(self.to)?;
        Ok(element.pe.free(self.from)?)
    }

    fn words(&self) -> u64 {
        (self.block / 8) as u64
    }

    /// Everybody's source is its pattern of `round`, everybody's destination poison.
    fn prepare(&self, element: &Element<'_>, round: u16) -> Result<(), Broken> {
        element.fill(&self.from, element.seed_of(element.me(), round))?;
        element.fill(&self.to, element.seed_of(element.me(), POISON))?;
        element.pe.barrier();
        Ok(())
    }

    /// These `words` of what PE `of` has as its source.
    fn source(element: &Element<'_>, of: i32, round: u16, words: std::ops::Range<u64>) -> Vec<u64> {
        let seed = element.seed_of(of, round);
        words.map(|index| pattern(seed, index)).collect()
    }

    /// Compares the destination's first words.
    fn compare(&self, element: &mut Element<'_>, what: &str, should: &[u64]) -> Result<(), Broken> {
        element.stream.synchronize()?;
        let is = element.read(&self.to)?;
        if let Some(at) = first_difference(&is, should) {
            element.untrue(format!("{what} with blocks of {} bytes: byte {at:#x} is wrong", self.block));
        }
        element.pe.barrier();
        Ok(())
    }
}

/// From each PE in turn. What the root's own destination gets is not the same in all versions of OpenSHMEM.
fn broadcast(element: &mut Element<'_>, memory: &Buffers<'_>, round: u16) -> Result<(), Broken> {
    for root in 0..element.pe.count() {
        memory.prepare(element, round)?;
        let (to, from) = (memory.to.range(0, memory.block)?, memory.from.range(0, memory.block)?);
        element.pe.broadcast_on(to, from, root, &element.stream)?;
        let should = Buffers::source(element, root, round, 0..memory.words());
        let should = if root == element.me() { &[] } else { &should[..] };
        memory.compare(element, &format!("broadcast from PE {root}"), should)?;
    }
    Ok(())
}

fn fcollect(element: &mut Element<'_>, memory: &Buffers<'_>, round: u16) -> Result<(), Broken> {
    memory.prepare(element, round)?;
    let (to, from) = (memory.to.range(0, memory.to.len())?, memory.from.range(0, memory.block)?);
    element.pe.fcollect_on(to, from, &element.stream)?;
    let blocks =
        (0..element.pe.count()).flat_map(|pe| Buffers::source(element, pe, round, 0..memory.words()));
    let should: Vec<u64> = blocks.collect();
    memory.compare(element, "fcollect", &should)
}

fn alltoall(element: &mut Element<'_>, memory: &Buffers<'_>, round: u16) -> Result<(), Broken> {
    memory.prepare(element, round)?;
    let (to, from) = (memory.to.range(0, memory.to.len())?, memory.from.range(0, memory.from.len())?);
    element.pe.alltoall_on(to, from, memory.block, &element.stream)?;
    let (words, me) = (memory.words(), u64::from(element.me().unsigned_abs()));
    let block = |pe| Buffers::source(element, pe, round, me * words..(me + 1) * words);
    let should: Vec<u64> = (0..element.pe.count()).flat_map(block).collect();
    memory.compare(element, "alltoall", &should)
}

fn reduce(element: &mut Element<'_>, memory: &Buffers<'_>, round: u16) -> Result<(), Broken> {
    let (to, from) = (memory.to.range(0, memory.block)?, memory.from.range(0, memory.block)?);
    let of_all = |element: &Element<'_>, fold: fn(u64, u64) -> u64| -> Vec<u64> {
        let all = (0..element.pe.count()).map(|pe| Buffers::source(element, pe, round, 0..memory.words()));
        all.reduce(|sums, words| sums.iter().zip(words).map(|(sum, word)| fold(*sum, word)).collect())
            .unwrap_or_default()
    };
    memory.prepare(element, round)?;
    element.pe.sum_reduce_on(to, from, &element.stream)?;
    let should = of_all(element, u64::wrapping_add);
    memory.compare(element, "sum reduction", &should)?;
    memory.prepare(element, round)?;
    element.pe.max_reduce_on(to, from, &element.stream)?;
    let should = of_all(element, u64::max);
    memory.compare(element, "max reduction", &should)
}
