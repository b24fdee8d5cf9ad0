//! Claim: EGM memory can be read and written; its bandwidth is reported beside that of ordinary memory.
//!
//! The same thread fills and sums buffers of the same size on both nodes in turn; medians of the rounds are compared. The
//! ratio is a figure: a benchmark on a quiet machine decides whether it is good enough, not a test.

use std::hint::black_box;
use std::time::Instant;

use super::Context;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern;
use crate::sys::Mapping;

/// Largest buffer on each node, in bytes.
const MOST: usize = 64 << 20;
/// Measured rounds, odd so that one is the median.
const ROUNDS: usize = 5;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let ordinary = plan.nodes.iter().find(|n| !n.egm && plan.memory.iter().any(|m| m.node == n.id));
    let (Some(egm), Some(ordinary)) = (plan.egm_nodes().next(), ordinary) else {
        return Ok(Finding::skipped("no EGM memory node is planned"));
    };
    let numbers = [egm.id, ordinary.id].map(|id| plan.linux_node(id).unwrap_or(id));
    let least = super::free_memory(numbers[0])?.min(super::free_memory(numbers[1])?);
    let size = (least / 4).min(MOST) & !4095;
    if size == 0 {
        return Ok(Finding::skipped("a node has no free memory to measure with"));
    }
    let buffer = |node| {
        Mapping::on_node(size, node).map_err(Broken::system(format!("cannot bind memory to node {node}")))
    };
    let mut buffers = [buffer(numbers[0])?, buffer(numbers[1])?];
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (buffer, figures) in buffers.iter_mut().zip(&mut rounds) {
            let figure = fill_and_sum(buffer.bytes_mut());
            if round > 0 {
                figures.push(figure); // the first round takes the pages
            }
        }
    }
    let [egm, ordinary] = rounds.map(median);
    Ok(judge(egm, ordinary))
}

/// GB/s of one pass of writes and one of reads.
fn fill_and_sum(bytes: &mut [u8]) -> f64 {
    let begun = Instant::now();
    pattern::fill(bytes, 1, 0, 0);
    let words = black_box(&*bytes).as_chunks::<8>().0;
    black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word))));
    let nanoseconds = begun.elapsed().as_nanos().max(1);
    2.0 * bytes.len() as f64 / nanoseconds as f64
}

pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}

fn judge(egm: f64, ordinary: f64) -> Finding {
    let mut claim = Claim::default();
    claim.holds(egm > 0.0 && ordinary > 0.0, || format!("nothing was measured: {egm} and {ordinary} GB/s"));
    claim.seen(format!("EGM {egm:.3} GB/s, ordinary {ordinary:.3} GB/s, median of {ROUNDS}"));
    let finding = claim.finish();
    if ordinary > 0.0 { finding.with_value(egm / ordinary, "of ordinary") } else { finding }
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;

    #[test]
    fn the_figure_is_the_ratio_of_medians_and_no_verdict() {
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        let slow = judge(1.0, 4.0).into_check("egm_bandwidth", 0);
        assert_eq!((slow.outcome, slow.value), (Outcome::Passed, Some(0.25)));
        assert_eq!(judge(0.0, 4.0).outcome, Outcome::Failed);
        assert!(fill_and_sum(&mut [0; 4096]) > 0.0);
    }
}
