//! A GPU to validate with, and the kinds of memory that it shares with processors.

use std::cell::OnceCell;
use std::ops::Range;

use egm_address::CpuSet;
use egm_vendor::cuda::{Attribute, Context, Device, Kernels, Kind, Memory, Shape, Stream, Words, Wrong};

use super::compare::Comparer;
use super::egm::Pieces;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;
use crate::validate::Setting;

/// The nodes that have memory.
pub(super) const NODES: &str = "/sys/devices/system/node/has_memory";
/// Most threads that fill or compare.
const THREADS: usize = 16;
/// Size of the writes that empty the cache, as a multiple of the cache's size.
const CACHES: u64 = 4;
/// Words that are worth a thread.
const WORTH: u64 = 1 << 20;

/// A GPU, ready for work.
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) kernels: Kernels,
    pub(crate) stream: Stream,
    /// Memory that it and processors see, for results: [`Gpu::result`].
    results: Memory,
    /// EGM devices, once they were looked for.
    pub(super) egm: OnceCell<Pieces>,
}

/// Kinds of memory that are validated alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Device,
    HostNuma,
    Pool,
    Pinned,
    Registered,
    EgmDevice,
    Managed,
    System,
}

impl Gpu {
    pub(crate) fn new(device: Device) -> Result<Self, Broken> {
        let context = Context::new(device)?;
        Ok(Self {
            kernels: Kernels::new(&context)?,
            stream: Stream::new(&context)?,
            results: Memory::new(&context, Kind::Pinned, 4096)?,
            egm: OnceCell::new(),
            context,
        })
    }

    /// At least `bytes` bytes of `kind` for this GPU, which no other memory has.
    pub(crate) fn memory(&self, kind: Kind, bytes: u64) -> Result<Memory, Broken> {
        match self.egm.get() {
            Some(pieces) if matches!(kind, Kind::EgmDevice(_)) => pieces.piece(&self.context, kind, bytes),
            _ => Ok(Memory::new(&self.context, kind, bytes)?),
        }
    }

    pub(crate) fn device(&self) -> Device {
        self.context.device()
    }

    /// The places of a family, or the finding that explains why there are none.
    pub(super) fn kinds(
        &self,
        setting: &Setting,
        family: Family,
    ) -> Result<Result<Vec<Kind>, Finding>, Broken> {
        let one = |kind| Ok(Ok(vec![kind]));
        match family {
            Family::Device => one(Kind::Device),
            Family::HostNuma => Ok(Ok(self.nodes()?.into_iter().map(Kind::HostNuma).collect())),
            Family::Pool => Ok(Ok(self.nodes()?.into_iter().map(Kind::Pool).collect())),
            Family::Pinned => one(Kind::Pinned),
            Family::Registered => one(Kind::Registered),
            Family::EgmDevice => Ok(Pieces::find(setting)?.map(|pieces| {
                let kinds = pieces.kinds();
                let _ = self.egm.set(pieces); // they were found before: the same ones
                kinds
            })),
            Family::Managed => one(Kind::Managed),
            Family::System => one(Kind::System),
        }
    }

    /// The NUMA nodes with memory of processors. A kernel without NUMA has one, which the driver names.
    pub(crate) fn nodes(&self) -> Result<Vec<i32>, Broken> {
        let near = self.context.attributes().get(Attribute::HOST_NUMA_ID).unwrap_or(0).max(0);
        if !std::path::Path::new(NODES).exists() {
            return Ok(vec![near]);
        }
        let gpus = self.device().driver().devices()?;
        let gpu_nodes: Vec<i32> = gpus.iter().filter_map(|gpu| gpu.attributes().own_node()).collect();
        Ok(host_nodes(&sysfs::list(NODES)?, &gpu_nodes))
    }

    /// Zeroed words, for kernels to write results in and for processors to read; `index` is 0 to 7.
    pub(crate) fn result(&self, index: u64) -> Result<(egm_vendor::cuda::Part<'_>, Words<'_>), Broken> {
        let words = self.results.words()?.part(index * 8, 8);
        for word in 0..words.count() {
            words.write(word, 0);
        }
        Ok((self.results.part(index * 64, 64)?, words))
    }

    /// Has the GPU write the pattern of `seed`, and waits for it.
    pub(crate) fn fill(&self, memory: &Memory, bytes: u64, seed: u64) -> Result<(), Broken> {
        let shape = Shape::whole(&self.context);
        self.kernels.fill(&self.stream, shape, memory.part(0, bytes)?, seed)?;
        Ok(self.stream.synchronize()?)
    }

    /// Has the GPU read the first `bytes` bytes of `memory` once; `sums` is for [`Kernels::read`].
    pub(crate) fn read_through(&self, memory: &Memory, bytes: u64, sums: &Memory) -> Result<(), Broken> {
        self.kernels.read(&self.stream, memory.part(0, bytes & !15)?, sums.whole())?;
        Ok(self.stream.synchronize()?)
    }

    /// Room for the sums that all of the GPU's threads read.
    pub(crate) fn sums(&self) -> Result<Memory, Broken> {
        Ok(Memory::new(&self.context, Kind::Device, Shape::whole(&self.context).count() * 8)?)
    }

    /// So much of the GPU's memory that nothing else is left in its cache once [`Self::fill`] filled it.
    pub(crate) fn cache_filler(&self) -> Result<Memory, Broken> {
        let cache =
            self.context.attributes().get(Attribute::L2_BYTES).and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = CACHES * cache.unwrap_or(0).clamp(1 << 20, 1 << 30);
        Ok(Memory::new(&self.context, Kind::Device, bytes)?)
    }

    /// Displaces what the GPU's cache holds: fills all of `filler` ([`Self::cache_filler`]) and waits.
    pub(crate) fn empty_cache(&self, filler: &Memory) -> Result<(), Broken> {
        self.fill(filler, filler.bytes() & !7, 0)
    }

    /// Sum of what the last [`Kernels::read`] read, of the sums that it left in the GPU's own memory.
    pub(crate) fn total(&self, sums: &Memory) -> Result<u64, Broken> {
        let bytes = Shape::whole(&self.context).warps(&self.context) * 8;
        let host = Memory::new(&self.context, Kind::Pinned, bytes)?;
        self.stream.copy(host.part(0, bytes)?, sums.part(0, bytes)?)?;
        self.stream.synchronize()?;
        Ok(host.words()?.part(0, bytes / 8).sum())
    }

    /// Has the GPU compare with the pattern of `seed`.
    pub(crate) fn compare(&self, memory: &Memory, bytes: u64, seed: u64) -> Result<Option<Wrong>, Broken> {
        self.compare_at(memory, 0..bytes, seed)
    }

    /// The same for these `bytes`, the first of which is the pattern's first.
    pub(crate) fn compare_at(
        &self,
        memory: &Memory,
        bytes: Range<u64>,
        seed: u64,
    ) -> Result<Option<Wrong>, Broken> {
        self.comparer().compare(memory, bytes, seed)
    }

    /// Shows, after the GPU found no difference, that it would have reported one.
    pub(crate) fn check_reports(&self, memory: &Memory, bytes: Range<u64>, seed: u64) -> Result<(), Broken> {
        self.comparer().check_reports(memory, bytes, seed)
    }

    fn comparer(&self) -> Comparer<'_> {
        Comparer {
            context: &self.context,
            kernels: &self.kernels,
            stream: &self.stream,
            results: &self.results,
        }
    }
}

/// Has processors write the pattern of `seed`.
pub(crate) fn fill(words: Words<'_>, seed: u64) {
    in_pieces(words, |first, piece| piece.fill(seed.wrapping_add(first)));
}

/// Has processors compare with the pattern of `seed`.
pub(crate) fn compare(words: Words<'_>, seed: u64) -> Option<Wrong> {
    let found = in_pieces(words, |first, piece| {
        piece.compare(seed.wrapping_add(first)).map(|wrong| Wrong { index: wrong.index + first, ..wrong })
    });
    found.into_iter().flatten().reduce(|first, next| Wrong { count: first.count + next.count, ..first })
}

/// Does `work` on pieces of `words`, each in a thread; it is given the index of its first word.
fn in_pieces<T: Send>(words: Words<'_>, work: impl Fn(u64, Words<'_>) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let piece = words.count().div_ceil(threads as u64).max(WORTH);
    std::thread::scope(|scope| {
        let firsts = (0..words.count()).step_by(usize::try_from(piece).unwrap_or(usize::MAX));
        let work = &work;
        let threads: Vec<_> =
            firsts.map(|first| scope.spawn(move || work(first, words.part(first, piece)))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

/// Records a difference, if there is one.
pub(crate) fn note(claim: &mut Claim, what: &str, wrong: Option<Wrong>, seed: u64) {
    if let Some(Wrong { count, index, value }) = wrong {
        let right = egm_vendor::cuda::pattern(seed, index);
        claim.untrue(format!(
            "{what}: {count} words differ, for instance at byte {:#x} {value:#x} instead of {right:#x}",
            index * 8
        ));
    }
}

/// The nodes without `gpu_nodes`: coherent GPU memory is a node too, but not one of processors.
fn host_nodes(nodes: &CpuSet, gpu_nodes: &[i32]) -> Vec<i32> {
    let nodes = nodes.iter().filter_map(|node| i32::try_from(node).ok());
    nodes.filter(|node| !gpu_nodes.contains(node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_gpus_are_not_those_of_processors() {
        let nodes = "0-2,10,18".parse().unwrap();
        assert_eq!(host_nodes(&nodes, &[]), [0, 1, 2, 10, 18]);
        assert_eq!(host_nodes(&nodes, &[10, 18]), [0, 1, 2], "two coherent GPUs");
    }
}
