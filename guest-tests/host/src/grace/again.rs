//! Scenario: one machine with a slice of an EGM device is started again and again: refused while another program has
//! the device open, after its guest reset itself, and after it was killed.

use std::fs::File;

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::hosts::parts::Plan;
use crate::runner::machine::{Machine, Runner};
use crate::runner::refusal::{HOST_LACKS, refused};
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::host_words::zeros;

/// The guest that is killed prints this when it uses its slice.
const BEAT: &str = "egm-beat 0x";

/// Runs the scenario of a slice of an EGM device.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    let resets = Scenario { words: "egm.checks=egm_pattern egm.exit=reset", ..*scenario };
    let machine = runner.machine(&resets, report)?;
    steps.step("busy", || busy(runner, &machine, region));
    let boot = runner.boot(&resets, &machine, report)?;
    steps.judge(Expected::reset(&["egm_pattern"]), &boot, " of the first");

    let beats = Scenario { words: "egm.checks=egm_beat egm.arg.beat.seconds=0", ..*scenario };
    let machine = runner.machine(&beats, report)?;
    let logs = [report.join("beat-console.log"), report.join("beat-vmm.log")];
    let [console, said] = &logs;
    let ending = watch(runner.command(&machine), Limit::Total(scenario.deadline), console, said, |line| {
        if line.contains(BEAT) { Reaction::Kill } else { Reaction::Go }
    })?;
    steps.step("killed", || match ending {
        Ending::Signal(9) => Ok(()),
        other => Err(Fault::Untrue(format!("{other:?}, not killed while its guest used the slice"))),
    });

    let last = Scenario { words: "egm.checks=numa,egm_pattern", ..*scenario };
    let folder = steps.folder("last")?;
    let machine = runner.machine(&last, &folder)?;
    let boot = runner.boot(&last, &machine, &folder)?;
    steps.judge(Expected::power_off(&["numa", "egm_pattern"]), &boot, " of the last");
    steps.step("returned", || zeros(machine.plan.as_ref().and_then(Plan::slice)));
    Ok(())
}

/// While this process has the device of `region` open without a ledger entry, a machine is refused with its process ID.
fn busy(runner: &Runner, machine: &Machine, region: &str) -> Step {
    let device = format!("/dev/{region}");
    let held = File::options().read(true).write(true).open(&device)?;
    let owner = format!("({})", std::process::id());
    let step = refused(&mut runner.command(machine), HOST_LACKS, &[&device, &owner]);
    drop(held);
    step
}
