//! HOST_NUMA memory is as fast as pinned memory, measured in turns.

use egm_guest::findings::Figure;
use egm_vendor::cuda::{Attribute, Kind, Memory};

use super::each::on_family;
use super::gpu::{Family, Gpu};
use super::measure::Clock;
use super::transfer::{Transfer, TransferKind};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::Setting;

/// Minimum of the median of the rounds' ratios.
const LEAST: f64 = 0.99;
/// Rounds, in each of which both are measured, first the one and next time first the other.
const TURNS: usize = 21;
/// Most bytes of a copy.
const MOST: u64 = 1 << 30;
/// Bytes that a turn moves at least: less would measure how copies begin.
const TURN: u64 = 256 << 20;
/// Most copies of a turn.
const MOST_REPEATS: u64 = 16;

/// Compares every node with pinned memory.
pub(super) fn check(setting: &Setting) -> Result<Finding, Broken> {
    on_family(setting, Family::HostNuma, false, |gpu, kind, claim| {
        // -1: no node is nearer than another, so all count.
        let near = gpu.context.attributes().get(Attribute::HOST_NUMA_ID).filter(|near| *near >= 0);
        let bytes = (setting.most.min(MOST) & !0xfff).max(4096);
        let buffers = Buffers {
            gpu,
            bytes,
            sums: gpu.sums()?,
            device: Memory::new(&gpu.context, Kind::Device, bytes)?,
            pair: [Memory::new(&gpu.context, kind, bytes)?, Memory::new(&gpu.context, Kind::Pinned, bytes)?],
        };
        let mut figures = Vec::new();
        for way in TransferKind::ALL {
            let figure = buffers.ratio(way, setting.seed, claim)?;
            // Another node may be farther away; that is no fault of the memory.
            let counts = near.is_none_or(|near| kind == Kind::HostNuma(near));
            claim.holds(!counts || figure.value >= LEAST, || {
                format!("{kind}: {way}: {:.4} of pinned memory, {LEAST} needed", figure.value)
            });
            claim.seen(format!("{way} {:.4}", figure.value));
            figures.push(Figure { series: format!("{kind} of pinned: {way}"), ..figure });
        }
        Ok(figures)
    })
    .map(|finding| match finding.figures().iter().map(|figure| figure.value).min_by(f64::total_cmp) {
        Some(value) => finding.with_value(value, "of pinned"),
        None => finding,
    })
}

struct Buffers<'g> {
    gpu: &'g Gpu,
    bytes: u64,
    sums: Memory,
    device: Memory,
    /// HOST_NUMA memory first, then pinned memory.
    pair: [Memory; 2],
}

impl Buffers<'_> {
    /// The ratios of the turns: bandwidth of HOST_NUMA memory by that of pinned memory.
    fn ratio(&self, way: TransferKind, seed: u64, claim: &mut Claim) -> Result<Figure, Broken> {
        let clock = Clock::new(&self.gpu.context, None)?;
        let mut ratios = Vec::new();
        for turn in 0..=TURNS {
            let mut seconds = [0.0; 2];
            for place in if turn.is_multiple_of(2) { [0, 1] } else { [1, 0] } {
                // A pattern of its own: what the measurement before left is wrong.
                let seed = seed.wrapping_add(((2 * turn + place) as u64) << 32);
                let transfer = self.transfer(&self.pair[place]);
                transfer.prepare(way, seed)?;
                seconds[place] = clock.seconds(&self.gpu.stream, None, || {
                    (0..TURN.div_ceil(self.bytes).min(MOST_REPEATS))
                        .try_for_each(|_| transfer.launch(way, seed))
                })?;
                transfer.verify(way, seed, &way.to_string(), claim)?;
            }
            if turn > 0 {
                ratios.push(seconds[1] / seconds[0]);
            }
        }
        Ok(Figure::of(way.to_string(), Some(self.bytes), "of pinned", &mut ratios))
    }

    fn transfer<'m>(&'m self, host: &'m Memory) -> Transfer<'m> {
        Transfer { gpu: self.gpu, host, device: &self.device, sums: &self.sums, bytes: self.bytes }
    }
}
