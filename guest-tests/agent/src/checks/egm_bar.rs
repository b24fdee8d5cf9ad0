//! Claim: a slice behind a PCI function's BAR can be read and written; its bandwidth is reported beside that of a slice
//! that is memory.
//!
//! The same loop goes over the BAR, as a program maps it, and over a file of a tmpfs that has its pages on the EGM
//! node: both are mapped files, in pages of 4 KiB. The ways take turns, a piece each; a round's figure is the median of
//! its pieces. All rounds are reported, for a benchmark to judge and not for a test.

use std::fs::{self, File};
use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

use rustix::mount::MountFlags;

use super::Context;
use super::egm_bandwidth::median;
use crate::egm_function;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::Registers;

/// Mount point of the tmpfs on the EGM node.
const PLACE: &str = "/run/egm-node";
/// Most bytes of a round.
const MOST: usize = 32 << 20;
/// Bytes of a turn: a few milliseconds, which others seldom interrupt.
const PIECE: usize = 1 << 20;
/// Measured rounds, odd so that one is the median.
const ROUNDS: usize = 15;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let found = egm_function::all()?;
    let (Some(function), Some(node)) = (found.first(), plan.egm_nodes().next()) else {
        return Ok(Finding::skipped("there is no slice of each kind: one a device, one memory"));
    };
    let node = plan.linux_node(node.id).unwrap_or(node.id);
    let bar = function.map()?;
    let size = super::free_memory(node)?.min(usize::try_from(bar.size()).unwrap_or(MOST)) / 2;
    let size = size.min(MOST) / PIECE * PIECE;
    if size == 0 {
        return Ok(Finding::skipped("a slice is too small to measure with"));
    }
    let map =
        |file: &File| Registers::map(file, size).map_err(Broken::system("cannot map a slice".to_owned()));
    let ways = [("bar", map(bar.file())?), ("memory", map(&file_on(node, size)?)?)];
    let mut rounds = ways.each_ref().map(|_| [Vec::new(), Vec::new()]);
    for round in 0..=ROUNDS {
        let mut pieces = ways.each_ref().map(|_| [Vec::new(), Vec::new()]);
        for start in (0..size).step_by(PIECE) {
            // Each begins every other time.
            let first = start / PIECE % 2;
            for way in [first, 1 - first] {
                let ((_, memory), [writes, reads]) = (&ways[way], &mut pieces[way]);
                let (write, read) = turn(memory, start..start + PIECE);
                writes.push(write);
                reads.push(read);
            }
        }
        // The first round takes the pages.
        for (all, pieces) in rounds.iter_mut().zip(pieces).filter(|_| round > 0) {
            all.iter_mut().zip(pieces).for_each(|(all, figures)| all.push(median(figures)));
        }
    }
    let mut claim = Claim::default();
    for ((name, _), [writes, reads]) in ways.iter().zip(&rounds) {
        claim.seen(format!("{name}-write {}; {name}-read {}", text(writes), text(reads)));
    }
    Ok(claim.finish())
}

/// A file of `size` bytes, all of them from `node`.
fn file_on(node: u32, size: usize) -> Result<File, Broken> {
    let options = std::ffi::CString::new(format!("mpol=bind:{node},size={size}")).unwrap_or_default();
    fs::create_dir_all(PLACE).map_err(Broken::file("make", PLACE))?;
    rustix::mount::mount(c"tmpfs", PLACE, c"tmpfs", MountFlags::NOSUID, options.as_c_str())
        .map_err(Broken::system(format!("cannot mount a tmpfs of node {node}")))?;
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(format!("{PLACE}/memory"));
    let file = file.map_err(Broken::file("make", PLACE))?;
    file.set_len(size as u64).map_err(Broken::file("enlarge", PLACE))?;
    Ok(file)
}

/// MB/s of writing `bytes` and of reading them.
fn turn(memory: &Registers, bytes: Range<usize>) -> (f64, f64) {
    let words = || bytes.clone().step_by(8);
    let speed = |begun: Instant| bytes.len() as f64 * 1e3 / begun.elapsed().as_nanos().max(1) as f64;
    let begun = Instant::now();
    words().for_each(|at| memory.write(at, at as u64));
    let write = speed(begun);
    let begun = Instant::now();
    black_box(words().fold(0u64, |sum, at| sum.wrapping_add(memory.read(at))));
    (write, speed(begun))
}

fn text(figures: &[f64]) -> String {
    figures.iter().map(|figure| format!("{figure:.1}")).collect::<Vec<_>>().join(" ")
}
