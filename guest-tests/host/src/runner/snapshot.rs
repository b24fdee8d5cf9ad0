//! Scenario of a machine that is saved while its guest uses the disk, and restored in another process.
//!
//! ```text
//!  guest: ready ─► pause, snapshot, shutdown ─► the disk gets a text ─► run --restore ─► guest: reads the text, further checks
//! ```

use crate::engine::disk;
use crate::engine::error::LabError;
use crate::engine::process::Ending;
use crate::hosts::parts::{HostParts, Plan};
use crate::runner::control::Control;
use crate::runner::steps::{Fault, Step, Steps};

/// The guest prints this once it uses the disk without end.
pub(super) const READY: &str = "egm-restored ready";
/// Text that ends this, as the guest's argument has it.
pub(super) const TEXT: &str = "egm-lab-restored";

/// Runs the scenario: the second boot begins with the snapshot of the first.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    let mut machine = runner.machine(scenario, steps.report)?;
    // Disk and tap stay over both processes.
    let plan = machine.plan.take();
    let _parts = HostParts::make(plan.iter().flat_map(Plan::parts), None)?;
    let image = plan.as_ref().and_then(Plan::disk);
    let image = image.ok_or_else(|| LabError::Usage(format!("{} has no disk", scenario.name)))?;
    let (control, folder) = (Control::of(runner, scenario), runner.work.join(scenario.name).join("saved"));
    let _ = std::fs::remove_dir_all(&folder); // of an earlier run
    let mut saved: Option<Step> = None;
    let command = control.start(runner, &machine);
    let first = runner.boot_by(command, scenario, &machine, &steps.folder("saved")?, |line| {
        if line.contains(READY) && saved.is_none() {
            saved = Some(control.save(&folder));
        }
    })?;
    steps.step("saved", || {
        saved.unwrap_or_else(|| Err(Fault::Untrue(format!("the guest did not print \"{READY}\""))))?;
        match first.collected.ending {
            Ending::Exit(0) => Ok(disk::sign(image, TEXT)?),
            ending => Err(Fault::Untrue(format!("the machine that was saved ended by {ending:?}"))),
        }
    });
    let restored = runner.boot_by(runner.tools.restore(&folder), scenario, &machine, steps.report, |_| {})?;
    steps.judge(scenario.expected, &restored, "");
    Ok(())
}
