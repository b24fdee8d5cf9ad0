//! Scenario: a GPU with NVIDIA's id, a copy engine and a reset, served by another process. The VMM refuses it until it
//! is ready and waits for it after each reset. The guest, the GPU and another function use its memory to the last byte.
//! It reports an error and is lost, and the next guest gets it.
//!
//! Here the host's IOMMU is a virtio-iommu. The scenario ends with an IOMMU fault, which verifies the fault check.

use std::fs;

use crate::assigned::aer::{MARK, inject, times};
use crate::assigned::held::{self, DECODE};
use crate::assigned::iommu_fault::{found, transfer};
use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::hosts::iommu;
use crate::runner::refusal::{HOST_LACKS, refused};
use crate::runner::steps::{Fault, Step, Steps};

use super::gpu::in_place;

/// Registers of the function (`vfio/fixtures/src/function/registers.rs`): the number of "not yet" reads of each
/// readiness word after a reset, and the number of such reads so far.
const READS: u64 = 0x48;
const REFUSED: u64 = 0x50;
const NEVER: u64 = 0xffff_ffff;
/// Initial number of "not yet" reads of each of the two words.
const SOME: u64 = 3;
const WORDS: u64 = 2;

/// Kernel words of a guest that waits for its function to go.
const LOST: &str = "egm.checks=function_lost";
/// Kernel words of the last guest, which resets itself.
const RESET: &str = "egm.checks=pci,functions egm.exit=reset";

/// Runs the scenario with its two functions: the GPU, and an engine of QEMU's.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [gpu, engine] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs two functions", scenario.name)));
    };
    let folder = steps.folder("waits")?;
    let machine = runner.machine(scenario, &folder)?;
    steps.step("not-ready", || {
        set(gpu, NEVER)?;
        let refused = refused(&mut runner.command(&machine), HOST_LACKS, &[gpu, "is not ready", "C2C link"]);
        set(gpu, SOME)?;
        refused
    });
    let before = get(gpu, REFUSED);
    let boot = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &boot, "");
    steps.step("ready-after-reset", || trained(before?, get(gpu, REFUSED)?));
    steps.step("in-place", || in_place(gpu));
    lost(steps, gpu)?;
    let expected = Expected::reset(&["pci", "functions"]);
    let last = Scenario { words: RESET, expected, ..*scenario };
    let folder = steps.folder("last")?;
    let machine = runner.machine(&last, &folder)?;
    let boot = runner.boot(&last, &machine, &folder)?;
    steps.judge(expected, &boot, " of the last");
    steps.free();
    steps.no_faults("no-dma-faults");
    let before = iommu::faults()?;
    steps.step("a fault is found", || {
        transfer(engine)?;
        found(before)
    });
    Ok(())
}

/// The GPU reports an uncorrectable error while a guest has it: the guest loses it and goes on.
fn lost(steps: &mut Steps<'_>, gpu: &str) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    let expected = Expected::power_off(&["function_lost"]);
    let guest = Scenario { words: LOST, expected, ..*scenario };
    let folder = steps.folder("lost")?;
    let machine = runner.machine(&guest, &folder)?;
    let mut reported = Err(Fault::Undecided("the guest did not come to wait for it"));
    let boot = runner.boot_by(runner.command(&machine), &guest, &machine, &folder, |line| {
        if line.contains(MARK) {
            reported = inject(gpu);
        }
    })?;
    steps.judge(expected, &boot, "");
    steps.step("reported", || reported);
    steps.step("noted", || times(&fs::read_to_string(folder.join("vmm.log"))?, 1));
    Ok(())
}

fn get(gpu: &str, register: u64) -> Result<u64, Fault> {
    Ok(held::page(gpu, 0, register, DECODE)?.word(register).ok_or("no such register")?)
}

fn set(gpu: &str, reads: u64) -> Step {
    held::page(gpu, 0, READS, DECODE)?.set_word(READS, reads).ok_or("no such register")?;
    Ok(())
}

/// Between two counts of "not yet" reads the GPU was reset, and then read until it was ready.
fn trained(before: u64, after: u64) -> Step {
    match after.saturating_sub(before) {
        reads if reads >= WORDS * SOME => Ok(()),
        reads => Err(Fault::Untrue(format!(
            "its words said \"not yet\" {reads} times: the VMM did not wait after a reset"
        ))),
    }
}
