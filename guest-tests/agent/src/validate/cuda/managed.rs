//! Managed memory: pages move to the processor or GPU that touches them. Speed of the moves, and speed after them.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Kind, Memory, Shape, sum};

use super::each::on_family;
use super::gpu::{self, Family, Gpu};
use super::measure::{Clock, ROUND_OF_GPUS, ROUNDS, bandwidth, repeats, rounds, sizes};
use super::turns::Turns;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Most managed memory that is asked for, in bytes.
const MOST: u64 = 256 << 20;
/// A part of what the GPU has free, at most: more managed memory than that can hang a GPU for all its programs.
const PART: u64 = 8;

/// Bytes that may be asked for where `most` may be otherwise: of managed memory a small part of what the GPU has free.
pub(super) fn bounded(gpu: &Gpu, kind: Kind, most: u64) -> Result<u64, Broken> {
    if kind != Kind::Managed {
        return Ok(most);
    }
    Ok(most.min(MOST).min(gpu.context.free_memory()? / PART).max(4096))
}

/// `cuda.managed.bandwidth`: of pages that arrive while the GPU reads, and of pages that are there already.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, false, |gpu, kind, claim| {
        let most = bounded(gpu, kind, setting.most)?;
        let pages = Pages {
            gpu,
            memory: gpu.memory(kind, most & !0xfff)?,
            sums: gpu.sums()?,
            turns: Turns::of_gpu(setting, gpu)?,
            seed: setting.seed,
        };
        let mut figures = Vec::new();
        for size in sizes(most) {
            figures.push(pages.arriving(kind, size, claim)?);
            figures.extend(pages.there(kind, size, claim)?);
        }
        let last = figures.iter().rev().take(3).rev();
        let said = last.map(|figure| format!("{} {:.1}", figure.series, figure.value));
        claim.seen(format!("GB/s: {}", said.collect::<Vec<_>>().join(", ")));
        Ok(figures)
    })
}

struct Pages<'g> {
    gpu: &'g Gpu,
    memory: Memory,
    sums: Memory,
    turns: Turns,
    seed: u64,
}

impl Pages<'_> {
    /// Each round reads what processors have just written: the pages come while the kernel runs.
    fn arriving(&self, kind: Kind, size: u64, claim: &mut Claim) -> Result<Figure, Broken> {
        let words = self.memory.words()?.part(0, size / 8);
        let clock = Clock::new(&self.gpu.context, None)?;
        let mut seconds = Vec::new();
        for round in 0..=ROUNDS {
            gpu::fill(words, self.seed.wrapping_add(round as u64));
            let took = clock.seconds(&self.gpu.stream, None, || self.read(size))?;
            self.read_right(size, round as u64, claim)?;
            if round > 0 {
                seconds.push(took);
            }
        }
        Ok(bandwidth(format!("{kind}: SM read of pages that processors wrote"), size, size, seconds))
    }

    /// The GPU touched all of it before.
    fn there(&self, kind: Kind, size: u64, claim: &mut Claim) -> Result<[Figure; 2], Broken> {
        let (gpu, clock) = (self.gpu, Clock::new(&self.gpu.context, None)?);
        let (times, shape) = (repeats(size, ROUND_OF_GPUS), Shape::whole(&gpu.context));
        gpu.fill(&self.memory, size, self.seed)?;
        let series = ["SM read", "SM write"].map(|what| format!("{kind}: {what}"));
        let read = rounds(&self.turns, &series[0], size, ROUNDS, || {
            clock.round(&gpu.stream, None, times, || self.read(size))
        })?;
        self.read_right(size, 0, claim)?;
        gpu.fill(&self.memory, size, !self.seed)?;
        let write = rounds(&self.turns, &series[1], size, ROUNDS, || {
            let part = self.memory.part(0, size)?;
            clock.round(&gpu.stream, None, times, || {
                Ok(gpu.kernels.write(&gpu.stream, shape, part, self.seed)?)
            })
        })?;
        let words = self.memory.words()?.part(0, size / 8);
        gpu::note(claim, "the GPU wrote, a processor read", gpu::compare(words, self.seed), self.seed);
        let [of_read, of_write] = series;
        let figure = |series, seconds| bandwidth(series, size, size * times, seconds);
        Ok([figure(of_read, read), figure(of_write, write)])
    }

    fn read(&self, size: u64) -> Result<(), Broken> {
        let gpu = self.gpu;
        Ok(gpu.kernels.read(&gpu.stream, self.memory.part(0, size)?, self.sums.whole())?)
    }

    /// The last kernel read the pattern, of the seed so many later.
    fn read_right(&self, size: u64, later: u64, claim: &mut Claim) -> Result<(), Broken> {
        let is = self.gpu.total(&self.sums)?;
        let right = sum(self.seed.wrapping_add(later), size / 8);
        claim.holds(is == right, || {
            format!(
                "the sum of the words that the GPU read is {is:#x} instead of {right:#x} ({size:#x} bytes)"
            )
        });
        Ok(())
    }
}
