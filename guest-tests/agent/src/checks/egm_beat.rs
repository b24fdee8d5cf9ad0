//! Claim: none of the guest's own. A page of the first EGM node beats, so that the host can look for it at its planned
//! place.
//!
//! The page, and with `beat.pages` as many, is filled with `beat.mark` (default [`MARK`]); then `egm-beat ADDRESS` goes to the
//! console, with the first page's guest physical address, and its first word counts until the host ends the machine, or for
//! `beat.seconds` (default 60; 0 is for ever).

use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use super::Context;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;

/// Word that fills the page behind its counter, unless the argument `beat.mark` sets another.
const MARK: u64 = 0x6d67_652d_7461_6562;
const PAGE: usize = 4096;
/// Counts between two pauses.
const TURNS: u64 = 1 << 16;
/// Pause for other programs on the lab's one processor.
const PAUSE: Duration = Duration::from_millis(10);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut nodes = context.plan.egm_nodes();
    let Some(node) = nodes.find_map(|node| context.plan.linux_node(node.id)) else {
        return Ok(Finding::skipped("no EGM memory node is planned"));
    };
    let seconds = context.args.get("beat.seconds", 60)?;
    let (pages, mark) = (context.args.get("beat.pages", 1usize)?, context.args.get("beat.mark", MARK)?);
    let size = pages.saturating_mul(PAGE);
    let mut page = Mapping::on_node(size, node).map_err(Broken::system("no page of the EGM node"))?;
    for word in page.bytes_mut().as_chunks_mut::<8>().0 {
        *word = mark.to_le_bytes();
    }
    let address = physical(&page)?;
    // Standard error is the console; standard output is the report.
    let _ = std::io::stderr().write_all(format!("egm-beat {address:#x}\n").as_bytes());
    let (begun, mut count) = (Instant::now(), 0u64);
    while seconds == 0 || begun.elapsed() < Duration::from_secs(seconds) {
        for _ in 0..TURNS {
            count += 1;
            if let Some(first) = black_box(&mut page).bytes_mut().first_chunk_mut() {
                *first = count.to_le_bytes();
            }
        }
        thread::sleep(PAUSE);
    }
    let mut claim = Claim::default();
    claim.holds(count > 0, || "it never beat");
    Ok(claim.finish())
}

/// The guest physical address of the page, from `/proc/self/pagemap` (as root): bits 0 to 54 are the page's number.
pub(super) fn physical(page: &Mapping) -> Result<u64, Broken> {
    const PATH: &str = "/proc/self/pagemap";
    let mut entry = [0; 8];
    let index = page.bytes().as_ptr().addr() / PAGE;
    File::open(PATH)
        .and_then(|file| file.read_exact_at(&mut entry, 8 * index as u64))
        .map_err(Broken::system(format!("cannot read {PATH}")))?;
    match u64::from_le_bytes(entry) & ((1 << 55) - 1) {
        0 => Err(Broken::text(PATH, "0", "a page number, which only root can read")),
        number => Ok(number * PAGE as u64),
    }
}
