//! Speed at which GPUs move bytes to and from each other.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Memory, Part, Shape, Stream, sum};

use super::{on_pairs, pair};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;
use crate::validate::cuda::gpu::{Gpu, note};
use crate::validate::cuda::measure::{
    Clock, ROUND_OF_GPUS, ROUNDS, ROUNDS_BOTH, bandwidth, repeats, rounds, sizes,
};
use crate::validate::cuda::turns::Turns;

/// Direction of a transfer, seen from the first GPU, and what moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerTransfer {
    CopyTo,
    CopyFrom,
    CopyBoth,
    Read,
    Write,
    KernelBoth,
}

const WAYS: [(PeerTransfer, &str); 6] = [
    (PeerTransfer::CopyTo, "copy engine write"),
    (PeerTransfer::CopyFrom, "copy engine read"),
    (PeerTransfer::CopyBoth, "copy engine both ways"),
    (PeerTransfer::Read, "SM read"),
    (PeerTransfer::Write, "SM write"),
    (PeerTransfer::KernelBoth, "SM write both ways"),
];

/// Memory of both GPUs, mapped for both.
struct Buffers<'g> {
    from: &'g Gpu,
    to: &'g Gpu,
    near: [Memory; 2],
    far: [Memory; 2],
    sums: Memory,
    turns: Turns,
    seed: u64,
}

/// Every pair, way and size.
pub(super) fn check(setting: &Setting) -> Result<Finding, Broken> {
    on_pairs(|from, to, claim| {
        let bytes = (setting.most & !0xfff).max(4096);
        let of = |gpu: &Gpu, other: &Gpu| -> Result<[Memory; 2], Broken> {
            let one = || Memory::for_peers(&gpu.context, bytes, &[&other.context]);
            Ok([one()?, one()?])
        };
        let sums = from.sums()?;
        let turns = Turns::new(setting, String::new())?;
        let (near, far, seed) = (of(from, to)?, of(to, from)?, setting.seed);
        let buffers = Buffers { from, to, near, far, sums, turns, seed };
        let mut figures = Vec::new();
        for size in sizes(setting.most) {
            for (way, name) in WAYS {
                buffers.prepare(size)?;
                let series = format!("{}: {name}", pair(from, to));
                let figure = buffers.figure(series, way, size)?;
                if size == sizes(setting.most).into_iter().max().unwrap_or(0) {
                    claim.seen(format!("{} {:.1} GB/s", figure.series, figure.value));
                }
                figures.push(figure);
                buffers.verify(way, size, name, claim)?;
            }
        }
        Ok(figures)
    })
}

impl Buffers<'_> {
    /// Sources hold the pattern, targets another one.
    fn prepare(&self, size: u64) -> Result<(), Broken> {
        self.from.fill(&self.near[0], size, self.seed)?;
        self.from.fill(&self.near[1], size, !self.seed)?;
        self.to.fill(&self.far[0], size, self.seed)?;
        self.to.fill(&self.far[1], size, !self.seed)
    }

    fn figure(&self, series: String, way: PeerTransfer, size: u64) -> Result<Figure, Broken> {
        let both = matches!(way, PeerTransfer::CopyBoth | PeerTransfer::KernelBoth);
        let side = both.then_some(&self.to.stream);
        let clock = Clock::new(&self.from.context, side.map(Stream::context))?;
        let times = repeats(size, ROUND_OF_GPUS);
        let count = if both { ROUNDS_BOTH } else { ROUNDS };
        let seconds = rounds(&self.turns, &series, size, count, || {
            clock.round(&self.from.stream, side, times, || self.once(way, size))
        })?;
        Ok(bandwidth(series, size, size * times * if both { 2 } else { 1 }, seconds))
    }

    /// Has the GPUs do it once.
    fn once(&self, way: PeerTransfer, size: u64) -> Result<(), Broken> {
        let [near, near_target] = [self.near[0].part(0, size)?, self.near[1].part(0, size)?];
        let [far, far_target] = [self.far[0].part(0, size)?, self.far[1].part(0, size)?];
        let write = |gpu: &Gpu, to: Part<'_>| {
            gpu.kernels.write(&gpu.stream, Shape::whole(&gpu.context), to, self.seed)
        };
        match way {
            PeerTransfer::CopyTo => self.from.stream.copy(far_target, near)?,
            PeerTransfer::CopyFrom => self.from.stream.copy(near_target, far)?,
            PeerTransfer::CopyBoth => {
                self.from.stream.copy(far_target, near)?;
                self.to.stream.copy(near_target, far)?;
            }
            PeerTransfer::Read => {
                self.from.kernels.read(&self.from.stream, far, self.sums.whole())?;
            }
            PeerTransfer::Write => write(self.from, far_target)?,
            PeerTransfer::KernelBoth => {
                write(self.from, far_target)?;
                write(self.to, near_target)?;
            }
        }
        Ok(())
    }

    /// Checks the bytes that were written, by the GPU that has the memory.
    fn verify(&self, way: PeerTransfer, size: u64, name: &str, claim: &mut Claim) -> Result<(), Broken> {
        let at = |place: &str| format!("{}, {name}, {size:#x} bytes, {place}", pair(self.from, self.to));
        if matches!(
            way,
            PeerTransfer::CopyTo | PeerTransfer::CopyBoth | PeerTransfer::Write | PeerTransfer::KernelBoth
        ) {
            note(claim, &at("there"), self.to.compare(&self.far[1], size, self.seed)?, self.seed);
        }
        if matches!(way, PeerTransfer::CopyFrom | PeerTransfer::CopyBoth | PeerTransfer::KernelBoth) {
            note(claim, &at("here"), self.from.compare(&self.near[1], size, self.seed)?, self.seed);
        }
        if way == PeerTransfer::Read {
            let read = self.from.total(&self.sums)?;
            let right = sum(self.seed, size / 8);
            claim.holds(read == right, || {
                format!("{}: a sum of {read:#x} instead of {right:#x}", at("there"))
            });
        }
        Ok(())
    }
}
