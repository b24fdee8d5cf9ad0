//! Memory on every node keeps what is written, and how fast it is.

use std::time::Instant;

use egm_report::Figure;

use super::{Setting, Validation};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::{pattern, sys, sysfs};

/// The group's validations.
pub(super) static ALL: &[Validation] = &[Validation {
    name: "memory.pattern",
    claim: "memory of every node keeps what is written",
    run: pattern_on_every_node,
}];

fn pattern_on_every_node(setting: &Setting) -> Result<Finding, Broken> {
    let rounds = setting.args.get("memory.rounds", 3u32)?.clamp(1, 100);
    let size = usize::try_from(setting.most.next_multiple_of(8)).unwrap_or(usize::MAX);
    let (mut claim, mut figures) = (Claim::default(), Vec::new());
    let nodes = sysfs::list("/sys/devices/system/node/has_memory")?;
    for node in nodes.iter() {
        let mut memory = sys::Mapping::on_node(size, node)
            .map_err(Broken::system(format!("cannot allocate {size} bytes on node {node}")))?;
        let mut speeds = Vec::new();
        for round in 0..rounds {
            let seed = setting.seed.wrapping_add(u64::from(round));
            let begun = Instant::now();
            pattern::fill(memory.bytes_mut(), seed, 0, 0);
            speeds.push(size as f64 / begun.elapsed().as_nanos().max(1) as f64);
            if let Some(offset) = pattern::difference(memory.bytes(), seed, 0, 0) {
                claim.untrue(format!("node {node} lost byte {offset:#x} of {size:#x}"));
            }
        }
        figures.push(Figure::of(format!("fill, node {node}"), Some(setting.most), "GB/s", &mut speeds));
    }
    claim.seen(format!("{size} bytes on nodes {nodes}"));
    Ok(claim.finish().with_figures(figures))
}
