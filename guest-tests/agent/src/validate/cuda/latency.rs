//! Time that the GPU waits for a word, by a chain in which each word names the next.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Kind, Memory};

use super::each::on_family;
use super::gpu::{Family, Gpu};
use super::managed;
use super::measure::{Clock, ROUNDS, rounds, sizes};
use super::turns::Turns;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::validate::Setting;

/// Bytes from link to link: no two in one line of any cache.
const DISTANCE: u64 = 512;
/// Words from link to link.
const STRIDE: u64 = DISTANCE / 8;
/// Most bytes of a chain.
const MOST: u64 = 1 << 30;
/// Links that a round follows.
const STEPS: u64 = 8192;
// From 36 MiB on no round reaches a link of another round; in turn with another program, where uncounted rounds come
// before, from 256 MiB on. A shorter chain shows what the GPU's caches do.

/// A word of this memory takes so long, at every size.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, false, |gpu, kind, claim| {
        let sizes = chains(managed::bounded(gpu, kind, setting.most)?);
        let memory = gpu.memory(kind, sizes.iter().copied().max().unwrap_or(DISTANCE))?;
        let turns = Turns::of_gpu(setting, gpu)?;
        let what = kind.to_string();
        let chase = Chase { gpu, home: gpu, memory: &memory, what: &what, turns: &turns };
        chase.by_size(&sizes, setting.seed, claim)
    })
}

/// Bytes of the chains that are measured where `most` bytes may be used.
pub(crate) fn chains(most: u64) -> Vec<u64> {
    sizes(most.min(MOST))
}

/// Chains in memory of one GPU that a GPU follows.
pub(crate) struct Chase<'c> {
    /// The GPU that follows them.
    pub(crate) gpu: &'c Gpu,
    /// The GPU of the memory.
    pub(crate) home: &'c Gpu,
    pub(crate) memory: &'c Memory,
    /// Name of the memory, for series of figures.
    pub(crate) what: &'c str,
    pub(crate) turns: &'c Turns,
}

impl Chase<'_> {
    /// A figure of each size.
    pub(crate) fn by_size(&self, sizes: &[u64], seed: u64, claim: &mut Claim) -> Result<Vec<Figure>, Broken> {
        let mut figures = Vec::new();
        for bytes in sizes {
            let chain = Chain::new(*bytes, seed);
            chain.put(self.home, self.memory)?;
            self.home.empty_cache(&self.home.cache_filler()?)?;
            figures.push(chain.follow(self, claim)?);
        }
        if let Some(last) = figures.last() {
            let bytes = last.bytes.unwrap_or(0);
            claim.seen(format!("{}: {:.0} ns in {bytes:#x} bytes", self.what, last.value));
        }
        Ok(figures)
    }
}

/// One circle through all links, in an order that looks random.
pub(crate) struct Chain {
    /// By link, the next one.
    next: Vec<u32>,
}

impl Chain {
    /// Of `bytes` bytes, two links at least.
    fn new(bytes: u64, seed: u64) -> Self {
        let links = usize::try_from((bytes / DISTANCE).max(2)).unwrap_or(usize::MAX);
        let mut next: Vec<u32> = (0..u32::try_from(links).unwrap_or(u32::MAX)).collect();
        let mut random = Random::new(seed);
        // Sattolo's shuffle makes one circle of all.
        for last in (1..next.len()).rev() {
            next.swap(last, random.below(last));
        }
        Self { next }
    }

    /// Bytes that it takes.
    fn bytes(&self) -> u64 {
        self.next.len() as u64 * DISTANCE
    }

    /// Writes it to `memory`, by pinned memory where processors do not reach it.
    fn put(&self, gpu: &Gpu, memory: &Memory) -> Result<(), Broken> {
        let pinned;
        let words = if let Ok(words) = memory.words() {
            pinned = None;
            words
        } else {
            pinned = Some(Memory::new(&gpu.context, Kind::Pinned, self.bytes())?);
            pinned.as_ref().map_or_else(|| memory.words(), Memory::words)?
        };
        for (link, next) in (0_u64..).zip(&self.next) {
            words.write(link * STRIDE, u64::from(*next) * STRIDE);
        }
        if let Some(pinned) = &pinned {
            gpu.stream.copy(memory.part(0, self.bytes())?, pinned.part(0, self.bytes())?)?;
            gpu.stream.synchronize()?;
        }
        Ok(())
    }

    /// Has the GPU follow it, and compares where that ends. Nothing of it is in a cache of the GPU when that begins;
    /// the code that puts it into another GPU's memory empties that GPU's cache.
    fn follow(&self, chase: &Chase<'_>, claim: &mut Claim) -> Result<Figure, Broken> {
        let Chase { gpu, memory, what, turns, .. } = *chase;
        // Addresses are translated, links awake, and pages that move are here: those of the chain alone, because others take the
        // places of translations. What this takes is kept until the end: memory that goes takes all translations with it.
        let (sums, filler) = (gpu.sums()?, gpu.cache_filler()?);
        gpu.read_through(memory, self.bytes(), &sums)?;
        gpu.empty_cache(&filler)?;
        let (end, found) = gpu.result(0)?;
        let (clock, chain) = (Clock::new(&gpu.context, None)?, memory.part(0, self.bytes())?);
        let (mut at, series) = (0, format!("{what}: latency"));
        let seconds = rounds(turns, &series, self.bytes(), ROUNDS, || {
            let start = u64::from(at) * STRIDE;
            let seconds = clock.seconds(&gpu.stream, None, || {
                Ok(gpu.kernels.chase(&gpu.stream, chain, start, STEPS, end)?)
            })?;
            at = self.after(at);
            let (is, right) = (found.read(0), u64::from(at) * STRIDE);
            claim.holds(is == right, || {
                format!("{what}: a chain ended at word {is:#x} instead of {right:#x}")
            });
            Ok(seconds)
        })?;
        #[expect(clippy::cast_precision_loss, reason = "8192")]
        let mut words: Vec<f64> = seconds.iter().map(|seconds| seconds * 1e9 / STEPS as f64).collect();
        Ok(Figure::of(series, Some(self.bytes()), "ns", &mut words))
    }

    /// The link that a round from link `at` ends at.
    fn after(&self, at: u32) -> u32 {
        (0..STEPS).fold(at, |at, _| self.next.get(at as usize).copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_one_circle_of_the_bytes_that_were_asked_for() {
        let chain = Chain::new(1 << 20, 7);
        let links = chain.next.len();
        let (mut at, mut steps) = (0_u32, 0);
        loop {
            at = chain.next[at as usize];
            steps += 1;
            if at == 0 {
                break;
            }
        }
        assert_eq!(steps, links);
        assert_eq!(chain.bytes(), 1 << 20);
        assert_ne!(chain.next, Chain::new(1 << 20, 8).next);
        assert_eq!(Chain::new(0, 7).next, [1, 0]);
    }

    #[test]
    fn a_long_chain_is_new_to_the_caches_in_every_round() {
        let largest = chains(u64::MAX).into_iter().max().unwrap();
        assert!(Chain::new(largest, 7).next.len() as u64 >= STEPS * (ROUNDS as u64 + 1));
    }
}
