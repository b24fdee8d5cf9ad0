//! Scenario: a guest misuses its assigned functions. Its VMM survives with a short log, no device reached forbidden
//! memory, and the next guest drives the functions.

use std::fs;
use std::path::Path;

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::hosts::parts::{HUB, serve_network};
use crate::runner::steps::{Fault, Step, Steps};

/// The next guest uses all of them.
const NEXT: &str = "egm.checks=pci,nvme,passed_net egm.arg.nvme.drives=2 egm.arg.net.mac=52:54:00:e9:00:02 egm.arg.net.peer=192.168.101.1 \
                    egm.arg.net.addr=192.168.101.2/24 lapic=notscdeadline quiet";
/// Maximum size of the VMM's log: it counts a guest's mistakes and reports them once.
const WORDS: usize = 4096;

/// Runs the scenario with its functions.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &first, "");
    steps.no_faults("no-dma-faults");
    steps.step("few-words", || few_words(report));
    steps.free();
    serve_network(HUB)?;
    let expected = Expected { checks: &["pci", "nvme", "passed_net"], ..scenario.expected };
    let next = Scenario { words: NEXT, expected, ..*scenario };
    let folder = steps.folder("next")?;
    let machine = runner.machine(&next, &folder)?;
    let second = runner.boot(&next, &machine, &folder)?;
    steps.judge(expected, &second, " next");
    steps.no_faults("no-dma-faults next");
    Ok(())
}

fn few_words(report: &Path) -> Step {
    let said = fs::read(report.join("vmm.log"))?;
    if said.len() <= WORDS {
        return Ok(());
    }
    Err(Fault::Untrue(format!("the VMM wrote {} bytes: see vmm.log", said.len())))
}
