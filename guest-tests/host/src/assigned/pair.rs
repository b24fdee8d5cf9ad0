//! Scenario: a group of two functions. While the host uses one of them, the VMM refuses the other and names the first;
//! afterwards a guest gets both.

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::functions::{bind, group};
use crate::runner::refusal::refused;
use crate::runner::steps::Steps;

/// A host driver that binds any function it is assigned.
const DRIVER: &str = "uio_pci_generic";
const VFIO: &str = "vfio-pci";
/// The VMM's exit code when the host forbids something.
const HOST_FORBIDS: i32 = 3;

/// Runs the scenario with its two functions.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [first, second] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs two functions", scenario.name)));
    };
    if group(first).is_none() || group(first) != group(second) {
        steps.skip(&format!("this host has no {first} and {second} in one IOMMU group"));
        return Ok(());
    }
    let alone = Scenario { assigned: std::slice::from_ref(first), ..*scenario };
    let machine = runner.machine(&alone, report)?;
    bind(second, DRIVER)?;
    let holder = format!("{second} by {DRIVER}");
    steps.step("refused", || refused(&mut runner.command(&machine), HOST_FORBIDS, &[&holder]));
    bind(second, VFIO)?;
    let machine = runner.machine(scenario, report)?;
    let boot = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &boot, "");
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}
