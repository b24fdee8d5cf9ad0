//! Scenario: a guest drives a network card and resets itself, which ends its machine; the next guest drives it as well,
//! and afterwards the card is free. The host's IOMMU must log no fault.

use crate::engine::error::LabError;
use crate::hosts::parts::{HUB, serve_network};
use crate::runner::steps::Steps;

/// Runs the scenario with its card.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    serve_network(HUB)?;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &first, "");
    let second = runner.boot(scenario, &machine, &steps.folder("again")?)?;
    steps.judge(scenario.expected, &second, " again");
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}
