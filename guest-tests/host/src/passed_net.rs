//! Scenario: a guest drives a network card and resets itself, which ends its machine; the next guest drives it as well,
//! and afterwards the card is free. The host's IOMMU must log no fault.

use crate::error::LabError;
use crate::frame::Frame;
use crate::host_parts::{HUB, serve_network};

/// Runs the scenario with its card.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    serve_network(HUB)?;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    frame.judge(scenario.expected, &first, "");
    let second = runner.boot(scenario, &machine, report)?;
    frame.judge(scenario.expected, &second, " again");
    frame.free();
    frame.no_faults("no-dma-faults");
    Ok(())
}
