//! HOST_NUMA memory used by all GPUs at once, beside each GPU alone.
//!
//! The host's clock measures both: the time from the first launch until every GPU is done. A round measures each GPU
//! alone and then all together, so that both share the same conditions of the host's memory.

use std::time::Instant;

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Attribute, Kind, Memory};

use super::each::devices;
use super::gpu::Gpu;
use super::measure::ROUNDS;
use super::transfer::{Transfer, TransferKind};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Most bytes of one buffer.
const MOST: u64 = 1 << 30;
/// Bytes that each GPU moves in a round, at least: small beside it is the time to launch.
const ROUND: u64 = 8 << 30;
/// Most transfers of a round.
const MOST_REPEATS: u64 = 64;

/// One GPU with HOST_NUMA memory of the node that is near to it.
struct Lane {
    gpu: Gpu,
    bytes: u64,
    host: Memory,
    device: Memory,
    sums: Memory,
}

/// Every way, each GPU alone and all at once.
pub(super) fn check(setting: &Setting) -> Result<Finding, Broken> {
    let devices = match devices()? {
        Ok(devices) if devices.len() < 2 => {
            return Ok(Finding::skipped("this machine has one GPU: its rate is that of all GPUs"));
        }
        Ok(devices) => devices,
        Err(finding) => return Ok(finding),
    };
    let gpus = devices.into_iter().map(Gpu::new).collect::<Result<Vec<_>, _>>()?;
    let denied = |gpu: &Gpu| gpu.context.attributes().denied(Kind::HostNuma(0));
    if let Some(attribute) = gpus.iter().find_map(denied) {
        return Ok(Finding::skipped(format!("a GPU reports 0 for {attribute}")));
    }
    let bytes = (setting.most.min(MOST) & !0xfff).max(4096);
    let lanes = gpus.into_iter().map(|gpu| Lane::new(gpu, bytes)).collect::<Result<Vec<_>, _>>()?;
    let (mut claim, mut figures) = (Claim::default(), Vec::new());
    for (number, way) in (0..).zip(TransferKind::ALL) {
        let seed = setting.seed.wrapping_add(number << 32);
        figures.extend(rounds(&lanes, way, seed, &mut claim)?);
    }
    Ok(claim.finish().with_figures(figures))
}

/// Rates of each GPU alone, of all at once, and what that is of the sum.
fn rounds(lanes: &[Lane], way: TransferKind, seed: u64, claim: &mut Claim) -> Result<Vec<Figure>, Broken> {
    let mut alone = vec![Vec::new(); lanes.len()];
    let (mut together, mut parts) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let mut sum = 0.0;
        for (lane, rates) in lanes.iter().zip(&mut alone) {
            let rate = rate(std::slice::from_ref(lane), way, seed, claim)?;
            sum += rate;
            rates.push(rate);
        }
        let all = rate(lanes, way, !seed, claim)?;
        together.push(all);
        parts.push(all / sum);
        if round == 0 {
            // The first round warms up.
            alone.iter_mut().chain([&mut together, &mut parts]).for_each(Vec::clear);
        }
    }
    let bytes = lanes.first().map(|lane| lane.bytes);
    let mut figures: Vec<Figure> = Vec::new();
    for (lane, rates) in lanes.iter().zip(&mut alone) {
        let series = format!("GPU {} alone: {way}", lane.gpu.device().ordinal);
        figures.push(Figure::of(series, bytes, "GB/s", rates));
    }
    let all = Figure::of(format!("{} GPUs at once: {way}", lanes.len()), bytes, "GB/s", &mut together);
    let part = Figure::of(format!("at once: {way}"), bytes, "of the sum", &mut parts);
    claim.seen(format!("{way}: {:.1} GB/s, {:.3} of the sum", all.value, part.value));
    figures.extend([all, part]);
    Ok(figures)
}

/// The rate of `lanes` at work at the same time, in GB/s, and that what they moved is right.
fn rate(lanes: &[Lane], way: TransferKind, seed: u64, claim: &mut Claim) -> Result<f64, Broken> {
    lanes.iter().try_for_each(|lane| lane.transfer().prepare(way, seed))?;
    let begun = Instant::now();
    let mut moved = 0;
    let repeats = lanes.first().map_or(0, |lane| ROUND.div_ceil(lane.bytes).min(MOST_REPEATS));
    for _ in 0..repeats {
        for lane in lanes {
            lane.transfer().launch(way, seed)?;
            moved += lane.bytes;
        }
    }
    lanes.iter().try_for_each(|lane| lane.gpu.stream.synchronize())?;
    let seconds = begun.elapsed().as_secs_f64();
    for lane in lanes {
        let at = format!("GPU {}, {way}", lane.gpu.device().ordinal);
        lane.transfer().verify(way, seed, &at, claim)?;
    }
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let bytes = moved as f64;
    Ok(bytes / seconds / 1e9)
}

impl Lane {
    fn new(gpu: Gpu, bytes: u64) -> Result<Self, Broken> {
        let near = gpu.context.attributes().get(Attribute::HOST_NUMA_ID).unwrap_or(0).max(0);
        let (host, device) = (Kind::HostNuma(near), Kind::Device);
        Ok(Self {
            host: Memory::new(&gpu.context, host, bytes)?,
            device: Memory::new(&gpu.context, device, bytes)?,
            sums: gpu.sums()?,
            bytes,
            gpu,
        })
    }

    fn transfer(&self) -> Transfer<'_> {
        let Self { gpu, bytes, host, device, sums } = self;
        Transfer { gpu, host, device, sums, bytes: *bytes }
    }
}
