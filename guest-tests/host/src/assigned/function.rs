//! Scenario: a guest drives a host function. The device keeps the data that the guest wrote, a guest that resets itself
//! leaves the function usable, and afterwards the function is free. The host's IOMMU must log no fault.

use std::path::Path;

use crate::engine::disk::{self, Proof};
use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::engine::step::{Fault, Step};
use crate::runner::steps::Steps;

/// The image of the first NVMe drive, where the emulated host sees it.
const IMAGE: &str = "/share/nvme0.img";

/// Runs the scenario with its functions.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &first, "");
    if scenario.disk.is_some() {
        steps.step("written", written);
        again(steps)?;
    }
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// The drive in a second guest, which does the same and resets itself.
fn again(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    let expected = Expected { exit: 1, ..scenario.expected };
    let again = Scenario { end: "egm.exit=reset", expected, ..*scenario };
    let folder = steps.folder("again")?;
    let machine = runner.machine(&again, &folder)?;
    let boot = runner.boot(&again, &machine, &folder)?;
    steps.judge(again.expected, &boot, " again");
    Ok(())
}

/// The guest's signature is in the image.
fn written() -> Step {
    disk::fault(Proof::Signature, Path::new(IMAGE), None).map_or(Ok(()), |fault| Err(Fault::Untrue(fault)))
}
