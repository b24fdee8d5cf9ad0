//! The processor reaches GPU memory through its BAR: by a dma-buf that the driver lets be mapped, or by GDRCopy.
//! GDRCopy's own test programs, where they are installed, are a second opinion.

mod access;
mod programs;

use std::time::Instant;

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Kind, Memory, pattern};
use egm_vendor::gdr::Window;

use super::{Setting, Validation};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::validate::cuda::each::on_each_gpu;
use crate::validate::cuda::gpu::{Gpu, note};
use access::{AccessMethod, DMA_BUF, GDRAPI, bytes_of, fill};

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "gdr.dmabuf",
        claim: "through a mapped dma-buf, processor and GPU see each other's bytes, at any alignment",
        run: |setting| bytes(setting, DMA_BUF),
    },
    Validation {
        name: "gdr.gdrapi",
        claim: "through GDRCopy, processor and GPU see each other's bytes, at any alignment",
        run: |setting| bytes(setting, GDRAPI),
    },
    Validation {
        name: "gdr.bandwidth",
        claim: "how fast the processor writes and reads GPU memory, by size",
        run: bandwidth,
    },
    Validation {
        name: "gdr.latency",
        claim: "how long a small write and a small read take the processor",
        run: latency,
    },
    Validation { name: "gdr.sanity", claim: "gdrcopy_sanity passes", run: programs::sanity },
    Validation { name: "gdr.copybw", claim: "gdrcopy_copybw measures", run: programs::copybw },
    Validation { name: "gdr.copylat", claim: "gdrcopy_copylat measures", run: programs::copylat },
];

/// Largest window that is compared byte by byte: reads are slow (hundreds of MB a second).
const MOST: u64 = 8 << 20;
/// Unaligned writes and reads.
const PIECES: usize = 200;
/// Rounds of which the median is taken; one more comes before them.
const ROUNDS: usize = 7;
/// Times that something small is done in a round.
const TIMES: u32 = 2000;
/// Sizes for measurements of latency, in bytes.
const SMALL: [usize; 7] = [1, 4, 8, 64, 256, 1024, 4096];

/// Runs `what` on a window of `most` bytes of a GPU's memory at most by `way`, unless there is none.
fn with(
    gpu: &Gpu,
    setting: &Setting,
    way: AccessMethod,
    most: u64,
    what: impl FnOnce(&Memory, &dyn Window) -> Result<Finding, Broken>,
) -> Result<Finding, Broken> {
    if let Some(attribute) = gpu.context.attributes().denied(Kind::Device) {
        return Ok(Finding::skipped(format!("this GPU reports 0 for {attribute}")));
    }
    // GDRCopy pins pages of 64 KiB; whole ones of 2 MiB suit every way.
    let memory = Memory::new(&gpu.context, Kind::Device, setting.most.clamp(1 << 16, most))?;
    way.with(&memory, |window| what(&memory, window))
}

/// `gdr.dmabuf` and `gdr.gdrapi`: whole writes, whole reads and unaligned pieces, on each GPU.
fn bytes(setting: &Setting, way: AccessMethod) -> Result<Finding, Broken> {
    on_each_gpu(|gpu| {
        with(gpu, setting, way, MOST, |memory, window| {
            let mut claim = Claim::default();
            processor_writes(setting, gpu, memory, window, &mut claim)?;
            processor_reads(setting, gpu, memory, window, &mut claim)?;
            pieces(setting, gpu, memory, window, &mut claim)?;
            claim.seen(format!("{:#x} bytes both ways, {PIECES} pieces at any alignment", window.bytes()));
            Ok(claim.finish())
        })
    })
}

/// The processor writes all of it over the GPU's poison; a kernel compares.
fn processor_writes(
    setting: &Setting,
    gpu: &Gpu,
    memory: &Memory,
    window: &dyn Window,
    claim: &mut Claim,
) -> Result<(), Broken> {
    fill(gpu, memory, setting.seed ^ POISON)?;
    window.write(0, &pattern_bytes(setting.seed, window.bytes()))?;
    let wrong = gpu.compare(memory, memory.bytes(), setting.seed)?;
    note(claim, "the processor wrote, the GPU read", wrong, setting.seed);
    Ok(())
}

/// The GPU writes all of it; the processor reads it into a poisoned buffer.
fn processor_reads(
    setting: &Setting,
    gpu: &Gpu,
    memory: &Memory,
    window: &dyn Window,
    claim: &mut Claim,
) -> Result<(), Broken> {
    let seed = setting.seed.wrapping_add(1 << 40);
    fill(gpu, memory, seed)?;
    let mut is = pattern_bytes(setting.seed ^ POISON, window.bytes());
    window.read(0, &mut is)?;
    let should = pattern_bytes(seed, window.bytes());
    if let Some(at) = is.iter().zip(&should).position(|(is, should)| is != should) {
        claim.untrue(format!("the processor reads byte {at:#x} wrong that the GPU wrote"));
    }
    Ok(())
}

/// Pieces of any length at any place, written and read; what lies beside them stays. The GPU's copy engine brings
/// everything back at the end.
fn pieces(
    setting: &Setting,
    gpu: &Gpu,
    memory: &Memory,
    window: &dyn Window,
    claim: &mut Claim,
) -> Result<(), Broken> {
    let mut random = Random::new(setting.seed);
    let seed = setting.seed.wrapping_add(2 << 40);
    fill(gpu, memory, seed)?;
    let mut model = pattern_bytes(seed, window.bytes());
    for _ in 0..PIECES {
        let (at, bytes) = piece(&mut random, window.bytes());
        let new: Vec<u8> = (0..bytes).map(|_| random.next_u32().to_le_bytes()[0]).collect();
        window.write(at, &new)?;
        if let Some(place) = model.get_mut(at..at + bytes) {
            place.copy_from_slice(&new);
        }
        let (at, bytes) = piece(&mut random, window.bytes());
        let mut is = vec![0xa5; bytes];
        window.read(at, &mut is)?;
        let should = model.get(at..at + bytes).unwrap_or_default();
        if let Some(wrong) = is.iter().zip(should).position(|(is, should)| is != should) {
            claim.untrue(format!("{bytes} bytes read at {at:#x}: byte {:#x} is wrong", at + wrong));
            return Ok(());
        }
    }
    let is = bytes_of(gpu, memory, memory.bytes())?;
    if let Some(at) = is.iter().zip(&model).position(|(is, should)| is != should) {
        claim.untrue(format!("after {PIECES} unaligned writes, byte {at:#x} of GPU memory is wrong"));
    }
    Ok(())
}

/// A place and a length, mostly short.
fn piece(random: &mut Random, within: usize) -> (usize, usize) {
    let most = if random.below(8) == 0 { 20_000 } else { 200 };
    let bytes = (1 + random.below(most)).min(within);
    (random.below(within - bytes + 1), bytes)
}

/// Makes of a seed one for poison.
const POISON: u64 = 0xdead_0000_0000_0000;

fn pattern_bytes(seed: u64, bytes: usize) -> Vec<u8> {
    (0..(bytes / 8) as u64).flat_map(|index| pattern(seed, index).to_ne_bytes()).collect()
}

/// The first `bytes` bytes of the pattern, which need not be whole words.
fn head(seed: u64, bytes: usize) -> Vec<u8> {
    let mut head = pattern_bytes(seed, bytes.next_multiple_of(8));
    head.truncate(bytes);
    head
}

/// `gdr.bandwidth`: writes and reads of 4 KiB and more, in GB/s.
fn bandwidth(setting: &Setting) -> Result<Finding, Broken> {
    by_any_way(setting, |timed, figures, claim| {
        let most = usize::try_from(setting.most).unwrap_or(usize::MAX).min(timed.window.bytes());
        let sizes = std::iter::successors(Some(4096_usize), |size| Some(size * 4));
        for bytes in sizes.take_while(|size| *size <= most) {
            // A read is some thirty times slower than a write.
            let writes = (most.saturating_mul(16).min(64 << 20) / bytes).clamp(1, 4096);
            let reads = (most.min(4 << 20) / bytes).clamp(1, 256);
            for (is_write, times) in [(true, writes), (false, reads)] {
                let rate = |seconds: f64| (bytes * times) as f64 / seconds / 1e9;
                let round = Round { is_write, bytes, times, unit: "GB/s", of_seconds: &rate };
                figures.push(timed.figure(&round, claim)?);
            }
        }
        Ok(())
    })
}

/// `gdr.latency`: writes and reads of the sizes [`SMALL`], in ns each.
fn latency(setting: &Setting) -> Result<Finding, Broken> {
    by_any_way(setting, |timed, figures, claim| {
        for bytes in SMALL.into_iter().filter(|bytes| *bytes <= timed.window.bytes()) {
            for is_write in [true, false] {
                let each = |seconds: f64| seconds * 1e9 / f64::from(TIMES);
                let round = Round { is_write, bytes, times: TIMES as usize, unit: "ns", of_seconds: &each };
                figures.push(timed.figure(&round, claim)?);
            }
        }
        Ok(())
    })
}

/// GPU memory that writes and reads of processors are timed in.
struct Timed<'t> {
    gpu: &'t Gpu,
    memory: &'t Memory,
    window: &'t dyn Window,
    /// For series of figures.
    name: &'static str,
    seed: u64,
}

/// Accesses that are timed together, for one value of a figure.
struct Round<'r> {
    is_write: bool,
    /// Bytes of an access.
    bytes: usize,
    /// Number of accesses, one after the other.
    times: usize,
    /// Unit of the value.
    unit: &'static str,
    /// The value of a round that took so many seconds.
    of_seconds: &'r dyn Fn(f64) -> f64,
}

impl Timed<'_> {
    /// The figure of such rounds; what is there after the last one is compared.
    fn figure(&self, round: &Round<'_>, claim: &mut Claim) -> Result<Figure, Broken> {
        let Round { is_write, bytes, times, unit, of_seconds } = *round;
        let series = format!("{} by {}", if is_write { "write" } else { "read" }, self.name);
        fill(self.gpu, self.memory, if is_write { self.seed ^ POISON } else { self.seed })?;
        let right = head(self.seed, bytes);
        let mut buffer = if is_write { right.clone() } else { vec![0xa5; bytes] };
        let mut rounds = Vec::new();
        for round in 0..=ROUNDS {
            if !is_write {
                // What the round before read is right.
                buffer.fill(0xa5);
            }
            let begun = Instant::now();
            for _ in 0..times {
                if is_write { self.window.write(0, &buffer)? } else { self.window.read(0, &mut buffer)? }
            }
            if round > 0 {
                rounds.push(of_seconds(begun.elapsed().as_secs_f64()));
            }
        }
        if is_write {
            self.compare(bytes, &right, &series, claim)?;
        } else {
            claim.holds(buffer == right, || format!("{series}, {bytes} bytes: what was read last is wrong"));
        }
        let figure = Figure::of(series, Some(bytes as u64), unit, &mut rounds);
        let measured = usize::try_from(figure.rounds) == Ok(ROUNDS) && figure.least > 0.0;
        claim.holds(measured, || format!("{} of {bytes} bytes took no time", figure.series));
        Ok(figure)
    }

    /// Has the GPU look at `bytes` bytes that were written last, which are `right`.
    fn compare(&self, bytes: usize, right: &[u8], series: &str, claim: &mut Claim) -> Result<(), Broken> {
        let what = format!("{series}, {bytes} bytes: what was written last");
        if bytes.is_multiple_of(8) {
            note(claim, &what, self.gpu.compare(self.memory, bytes as u64, self.seed)?, self.seed);
            return Ok(());
        }
        let is = bytes_of(self.gpu, self.memory, bytes.next_multiple_of(8) as u64)?;
        claim.holds(is.starts_with(right), || format!("{what} is wrong"));
        Ok(())
    }
}

/// Measures each GPU by every way that there is; skipped with both reasons where there is none.
fn by_any_way(
    setting: &Setting,
    measure: impl Fn(&Timed<'_>, &mut Vec<Figure>, &mut Claim) -> Result<(), Broken>,
) -> Result<Finding, Broken> {
    on_each_gpu(|gpu| {
        let (mut figures, mut reasons, mut claim) = (Vec::new(), Vec::new(), Claim::default());
        for way in [DMA_BUF, GDRAPI] {
            let finding = with(gpu, setting, way, setting.most.max(1 << 16), |memory, window| {
                let timed = Timed { gpu, memory, window, name: way.name, seed: setting.seed };
                measure(&timed, &mut figures, &mut claim)?;
                Ok(Claim::default().finish())
            })?;
            match finding.outcome {
                egm_guest::findings::Outcome::Skipped => reasons.push(finding.reason),
                egm_guest::findings::Outcome::Passed => claim.seen(format!("by {}", way.name)),
                _ => return Ok(finding),
            }
        }
        if figures.is_empty() {
            reasons.dedup();
            return Ok(Finding::skipped(reasons.join("; ")));
        }
        Ok(claim.finish().with_figures(figures))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_stay_inside_and_a_seed_repeats_them() {
        let list = |seed| -> Vec<(usize, usize)> {
            let mut random = Random::new(seed);
            (0..500).map(|_| piece(&mut random, 65_536)).collect()
        };
        assert_eq!(list(3), list(3));
        assert_ne!(list(3), list(4));
        assert!(list(3).iter().all(|(at, bytes)| *bytes > 0 && at + bytes <= 65_536));
        assert!(list(3).iter().any(|(_, bytes)| *bytes > 1000));
    }

    #[test]
    fn the_patterns_head_may_end_within_a_word() {
        let whole = pattern_bytes(5, 64);
        for bytes in [1, 4, 8, 63, 64] {
            assert_eq!(head(5, bytes), whole[..bytes]);
        }
    }
}
