//! The story of a network card: a guest drives it and resets itself, which ends its machine, the next drives it all the same,
//! and afterwards nobody holds it. The host's IOMMU must have nothing to complain of.

use crate::error::LabError;
use crate::frame::Frame;
use crate::host_parts::{HUB, serve_network};

/// Tells the story of the card of `scenario`.
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
