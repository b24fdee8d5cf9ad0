//! Memory of nodes without processors, which EGM is, and that of the nearest node with some, in turns: ratios, no
//! verdict, because the owner decides what is fast enough (`--min-ratio`).

use egm_guest::findings::Figure;

use super::node_memory::{self, NodeMemory};
use super::{bandwidth, latency};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern;
use crate::tree::Tree;
use crate::validate::Setting;

const UNIT: &str = "of ordinary";

pub(super) fn run(setting: &Setting) -> Result<Finding, Broken> {
    let (places, _) = node_memory::places(&Tree::live(), setting)?;
    let rounds = node_memory::rounds(setting)?;
    let (mut claim, mut figures) = (Claim::default(), Vec::new());
    let mut worst = f64::MAX;
    for far in places.iter().filter(|place| !place.has_cpus) {
        let Some(near) = places.iter().find(|place| place.has_cpus && place.cpus == far.cpus) else {
            continue;
        };
        far.run_near();
        let size = near.size.min(far.size);
        for mut figure in against(&mut claim, near, far, size, setting.seed, rounds)? {
            worst = worst.min(figure.value);
            figure.bytes = Some(size as u64);
            figures.push(figure);
        }
        claim.seen(format!("{} beside {}, {size} bytes", far.name(), near.name()));
    }
    if figures.is_empty() {
        return Ok(Finding::skipped(
            "no NUMA node has memory and no processors beside one that has both: EGM is such a node when the VMM's \
             configuration makes it one (in egm-vmm \"egm\" with a node of its own)",
        ));
    }
    Ok(claim.finish().with_value(worst, UNIT).with_figures(figures))
}

/// Ratios of each operation: far by near, of latency near by far, so that less is always worse.
fn against(
    claim: &mut Claim,
    near: &NodeMemory,
    far: &NodeMemory,
    size: usize,
    seed: u64,
    rounds: u32,
) -> Result<Vec<Figure>, Broken> {
    let mut ratios: [Vec<f64>; 4] = Default::default();
    let mut buffers = [near, far].map(|place| Ok::<_, Broken>((place.memory(size)?, place.memory(size)?)));
    let [Ok(near_buffers), Ok(far_buffers)] = &mut buffers else {
        return buffers.into_iter().find_map(Result::err).map_or(Ok(Vec::new()), Err);
    };
    for (source, target) in [&mut *near_buffers, &mut *far_buffers] {
        pattern::fill(source.bytes_mut(), seed, 0, 0);
        target.bytes_mut().fill(0);
    }
    for _ in 0..rounds {
        let mut speeds =
            |place: &NodeMemory, (source, target): &mut (crate::sys::Mapping, crate::sys::Mapping)| {
                bandwidth::measure(claim, place, source.bytes(), target.bytes_mut(), seed, 1)
            };
        let (one, other) = (speeds(near, near_buffers), speeds(far, far_buffers));
        for (ratio, ((_, near), (_, far))) in ratios.iter_mut().zip(one.into_iter().zip(other)) {
            ratio.extend(far.into_iter().zip(near).map(|(far, near)| far / near));
        }
        let mut times = |place: &NodeMemory, target: &mut crate::sys::Mapping| {
            latency::times(claim, &place.name(), target.bytes_mut(), seed, 1)
        };
        let (one, other) = (times(near, &mut near_buffers.1), times(far, &mut far_buffers.1));
        let [.., step] = &mut ratios;
        step.extend(one.into_iter().zip(other).map(|(near, far)| near / far));
    }
    let figure = |(operation, ratios): (&str, &mut Vec<f64>)| {
        Figure::of(format!("{operation}, {} against {}", far.name(), near.name()), None, UNIT, ratios)
    };
    Ok(["read", "write", "copy", "step"].into_iter().zip(&mut ratios).map(figure).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_beside_itself_has_a_ratio_for_each_operation() {
        let cpus = "0".parse().unwrap();
        let place = NodeMemory { node: None, size: 1 << 16, cpus, has_cpus: true };
        let mut claim = Claim::default();
        let figures = against(&mut claim, &place, &place, 1 << 16, 5, 2).unwrap();
        assert!(claim.is_true(), "{:?}", claim.finish());
        let series: Vec<&str> = figures.iter().map(|figure| figure.series.as_str()).collect();
        assert_eq!(series[0], "read, all memory against all memory");
        assert!(figures.len() == 4 && figures.iter().all(|f| f.rounds == 2 && f.value > 0.0), "{figures:?}");
    }
}
