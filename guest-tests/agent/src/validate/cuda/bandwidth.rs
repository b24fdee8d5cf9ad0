//! Speed at which copy engines and processors of the GPU move bytes, at every size.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Kind, Memory, Part, Shape, Stream, sum};

use super::each::on_family;
use super::gpu::{self, Family, Gpu};
use super::measure::{Clock, ROUND, ROUND_OF_GPUS, ROUNDS, ROUNDS_BOTH, bandwidth, repeats, rounds, sizes};
use super::turns::Turns;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Two buffers here and two on the GPU, so that two directions share none.
struct Buffers<'g> {
    gpu: &'g Gpu,
    side: Stream,
    host: [Memory; 2],
    device: [Memory; 2],
    sums: Memory,
    turns: Turns,
    seed: u64,
}

/// Direction of a transfer, and what moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostTransfer {
    CopyTo,
    CopyFrom,
    CopyBoth,
    Read,
    Write,
    KernelTo,
    KernelFrom,
    KernelBoth,
}

impl HostTransfer {
    const ALL: [Self; 8] = [
        Self::CopyTo,
        Self::CopyFrom,
        Self::CopyBoth,
        Self::Read,
        Self::Write,
        Self::KernelTo,
        Self::KernelFrom,
        Self::KernelBoth,
    ];

    /// Directions for memory of `kind`. Transfers of the GPU's own memory have it at both ends.
    fn of(kind: Kind) -> &'static [Self] {
        match kind {
            Kind::Device => &[Self::CopyTo, Self::Read, Self::Write, Self::KernelTo],
            _ => &Self::ALL,
        }
    }

    /// Its name in figures.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CopyTo => "copy engine to GPU",
            Self::CopyFrom => "copy engine from GPU",
            Self::CopyBoth => "copy engine both ways",
            Self::Read => "SM read",
            Self::Write => "SM write",
            Self::KernelTo => "SM copy to GPU",
            Self::KernelFrom => "SM copy from GPU",
            Self::KernelBoth => "SM copy both ways",
        }
    }

    fn both(self) -> bool {
        matches!(self, Self::CopyBoth | Self::KernelBoth)
    }
}

/// Every way at every size.
pub(super) fn check(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, false, |gpu, kind, claim| {
        let buffers = Buffers::new(gpu, kind, setting)?;
        let mut figures = Vec::new();
        for size in sizes(setting.most) {
            for way in HostTransfer::of(kind) {
                let way = *way;
                buffers.prepare(size)?;
                figures.push(buffers.figure(kind, way, size)?);
                buffers.verify(way, size, claim)?;
            }
        }
        let ways = HostTransfer::of(kind);
        let largest = figures.iter().skip(figures.len() - ways.len());
        let said =
            ways.iter().zip(largest).map(|(way, figure)| format!("{} {:.1}", way.name(), figure.value));
        claim.seen(format!("{kind}, GB/s: {}", said.collect::<Vec<_>>().join(", ")));
        Ok(figures)
    })
}

impl<'g> Buffers<'g> {
    fn new(gpu: &'g Gpu, kind: Kind, setting: &Setting) -> Result<Self, Broken> {
        let bytes = (setting.most & !0xfff).max(4096);
        let context = &gpu.context;
        let both = |kind| -> Result<[Memory; 2], Broken> {
            Ok([gpu.memory(kind, bytes)?, gpu.memory(kind, bytes)?])
        };
        let sums = gpu.sums()?;
        let side = Stream::new(context)?;
        let turns = Turns::of_gpu(setting, gpu)?;
        Ok(Self {
            gpu,
            side,
            host: both(kind)?,
            device: both(Kind::Device)?,
            sums,
            turns,
            seed: setting.seed,
        })
    }

    /// Sources hold the pattern, what is written holds another one.
    fn prepare(&self, size: u64) -> Result<(), Broken> {
        let ([source, target], [from, to]) = (&self.host, &self.device);
        self.gpu.fill(source, size, self.seed)?;
        self.gpu.fill(from, size, self.seed)?;
        self.gpu.fill(target, size, !self.seed)?;
        self.gpu.fill(to, size, !self.seed)
    }

    /// Has the GPU do it once.
    fn once(&self, way: HostTransfer, size: u64) -> Result<(), Broken> {
        let ([source, target], [from, to]) = (&self.host, &self.device);
        let (source, target) = (source.part(0, size)?, target.part(0, size)?);
        let (from, to) = (from.part(0, size)?, to.part(0, size)?);
        let (gpu, context) = (self.gpu, &self.gpu.context);
        let (main, side, kernels) = (&gpu.stream, &self.side, &gpu.kernels);
        let (whole, half) = (Shape::whole(context), Shape::half(context));
        let kernel =
            |stream: &Stream, shape, to: Part<'_>, from: Part<'_>| kernels.copy(stream, shape, to, from);
        match way {
            HostTransfer::CopyTo => main.copy(to, source)?,
            HostTransfer::CopyFrom => main.copy(target, from)?,
            HostTransfer::CopyBoth => {
                main.copy(to, source)?;
                side.copy(target, from)?;
            }
            HostTransfer::Read => kernels.read(main, source, self.sums.whole())?,
            HostTransfer::Write => kernels.write(main, whole, target, self.seed)?,
            HostTransfer::KernelTo => kernel(main, whole, to, source)?,
            HostTransfer::KernelFrom => kernel(main, whole, target, from)?,
            HostTransfer::KernelBoth => {
                kernel(main, half, to, source)?;
                kernel(side, half, target, from)?;
            }
        }
        Ok(())
    }

    fn figure(&self, kind: Kind, way: HostTransfer, size: u64) -> Result<Figure, Broken> {
        let side = way.both().then_some(&self.side);
        let clock = Clock::new(&self.gpu.context, side.map(Stream::context))?;
        let times = repeats(size, if kind == Kind::Device { ROUND_OF_GPUS } else { ROUND });
        let count = if way.both() { ROUNDS_BOTH } else { ROUNDS };
        let series = format!("{kind}: {}", way.name());
        let seconds = rounds(&self.turns, &series, size, count, || {
            clock.round(&self.gpu.stream, side, times, || self.once(way, size))
        })?;
        let moved = size * times * if way.both() { 2 } else { 1 };
        Ok(bandwidth(series, size, moved, seconds))
    }

    /// Checks the bytes that were written.
    fn verify(&self, way: HostTransfer, size: u64, claim: &mut Claim) -> Result<(), Broken> {
        let ([_, target], [_, to]) = (&self.host, &self.device);
        let at = |what: &str| format!("{what}, {}, {size:#x} bytes", way.name());
        if matches!(
            way,
            HostTransfer::CopyTo | HostTransfer::CopyBoth | HostTransfer::KernelTo | HostTransfer::KernelBoth
        ) {
            gpu::note(claim, &at("on the GPU"), self.gpu.compare(to, size, self.seed)?, self.seed);
        }
        if matches!(
            way,
            HostTransfer::CopyFrom
                | HostTransfer::CopyBoth
                | HostTransfer::Write
                | HostTransfer::KernelFrom
                | HostTransfer::KernelBoth
        ) {
            let wrong = match target.words() {
                Ok(words) => gpu::compare(words.part(0, size / 8), self.seed),
                Err(_) => self.gpu.compare(target, size, self.seed)?,
            };
            gpu::note(claim, &at("in the other memory"), wrong, self.seed);
        }
        if way == HostTransfer::Read {
            let read = self.gpu.total(&self.sums)?;
            let right = sum(self.seed, size / 8);
            claim.holds(read == right, || {
                format!("the sum of the words that the GPU read is {read:#x} instead of {right:#x} ({size:#x} bytes)")
            });
        }
        Ok(())
    }
}
