//! The story of a GPU with NVIDIA's id, a copy engine and a reset, which another process serves: not given while it does not get
//! ready, waited for after each reset, used to its last byte by the guest, by itself and by another function; it reports an error
//! and is lost, and the next guest has it.
//!
//! Here the host's IOMMU is a virtio-iommu, and the story ends with a fault of it, by which the check for faults is checked.

use std::fs;

use crate::error::LabError;
use crate::frame::{Fault, Frame, Step};
use crate::hand::{self, DECODE};
use crate::iommu;
use crate::judge::Expected;
use crate::passed::refused;
use crate::passed_error::{MARK, inject, times};
use crate::passed_fault::{found, transfer};
use crate::scenarios::Scenario;
use crate::slices::HOST_LACKS;

use super::gpu::in_place;

/// Registers of the function (`guest-tests/functions/src/registers.rs`): how many reads each word of readiness answers "not yet"
/// after a reset, and how many were.
const READS: u64 = 0x48;
const REFUSED: u64 = 0x50;
const NEVER: u64 = 0xffff_ffff;
/// What it has from the start, in each of two words.
const SOME: u64 = 3;
const WORDS: u64 = 2;

/// A guest that waits for the end of its function.
const LOST: &str = "egm.checks=function_lost";
/// The last guest resets itself.
const RESET: &str = "egm.checks=pci,functions egm.exit=reset";

/// Tells the story of the two functions of `scenario`, the GPU and an engine of QEMU's.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    let [gpu, engine] = scenario.passed else {
        return Err(LabError::Usage(format!("{} needs two functions", scenario.name)));
    };
    let folder = frame.folder("waits")?;
    let machine = runner.machine(scenario, &folder)?;
    frame.step("not-ready", || {
        set(gpu, NEVER)?;
        let refused = refused(&mut runner.command(&machine), HOST_LACKS, &[gpu, "is not ready", "C2C link"]);
        set(gpu, SOME)?;
        refused
    });
    let before = get(gpu, REFUSED);
    let boot = runner.boot(scenario, &machine, report)?;
    frame.judge(scenario.expected, &boot, "");
    frame.step("ready-after-reset", || trained(before?, get(gpu, REFUSED)?));
    frame.step("in-place", || in_place(gpu));
    lost(frame, gpu)?;
    let expected = Expected { exit: 1, summary: true, checks: &["pci", "functions"] };
    let last = Scenario { words: RESET, expected, ..*scenario };
    let folder = frame.folder("last")?;
    let machine = runner.machine(&last, &folder)?;
    let boot = runner.boot(&last, &machine, &folder)?;
    frame.judge(expected, &boot, " of the last");
    frame.free();
    frame.no_faults("no-dma-faults");
    let before = iommu::faults()?;
    frame.step("a fault is found", || {
        transfer(engine)?;
        found(before)
    });
    Ok(())
}

/// The GPU reports an error that it cannot correct while a guest has it: the guest loses it and goes on.
fn lost(frame: &mut Frame<'_>, gpu: &str) -> Result<(), LabError> {
    let Frame { runner, scenario, .. } = *frame;
    let expected = Expected { exit: 0, summary: true, checks: &["function_lost"] };
    let guest = Scenario { words: LOST, expected, ..*scenario };
    let folder = frame.folder("lost")?;
    let machine = runner.machine(&guest, &folder)?;
    let mut reported = Err(Fault::Undecided("the guest did not come to wait for it"));
    let boot = runner.boot_by(runner.command(&machine), &guest, &machine, &folder, |line| {
        if line.contains(MARK) {
            reported = inject(gpu);
        }
    })?;
    frame.judge(expected, &boot, "");
    frame.step("reported", || reported);
    frame.step("told", || times(&fs::read_to_string(folder.join("vmm.log"))?, 1));
    Ok(())
}

fn get(gpu: &str, register: u64) -> Result<u64, Fault> {
    Ok(hand::page(gpu, 0, register, DECODE)?.word(register).ok_or("no such register")?)
}

fn set(gpu: &str, reads: u64) -> Step {
    hand::page(gpu, 0, READS, DECODE)?.set_word(READS, reads).ok_or("no such register")?;
    Ok(())
}

/// Between two counts of words that read "not yet" the GPU was reset and waited for until it was ready.
fn trained(before: u64, after: u64) -> Step {
    match after.saturating_sub(before) {
        reads if reads >= WORDS * SOME => Ok(()),
        reads => Err(Fault::Untrue(format!(
            "its words said \"not yet\" {reads} times: nobody waited after a reset"
        ))),
    }
}
