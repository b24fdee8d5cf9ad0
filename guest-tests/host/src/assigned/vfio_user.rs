//! Scenario: a function behind a vfio-user server. Its DMA engine and a host function's reach the guest's memory, slice
//! and BARs at guest addresses. When the server dies, the guest reads all ones and goes on.

use std::fs;
use std::path::Path;

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::hosts::served::{Card, GPU, Server, start};
use crate::runner::machine::Runner;
use crate::runner::steps::{Fault, Step, Steps};

/// A GPU for a host with little memory.
const SMALL: Card = Card { bar: 1 << 10, memory: 16, ..GPU };
/// Kernel words of the second guest, which loses its function.
const LOST: &str = "egm.checks=function_lost quiet";
/// The guest prints this when the server may die.
const MARK: &str = "egm-lost waits";
/// The VMM prints this when the server is gone.
const WORDS: &str = "is gone: it is taken from the guest";

/// Runs the scenario with its servers.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let mut servers = serve(runner, scenario)?;
    let machine = runner.machine(scenario, report)?;
    let boot = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &boot, "");
    let expected = Expected { checks: &["function_lost"], ..scenario.expected };
    let next = Scenario { words: LOST, expected, ..*scenario };
    let folder = steps.folder("lost")?;
    let machine = runner.machine(&next, &folder)?;
    let second = runner.boot_watched(&next, &machine, &folder, &mut |line| {
        if line.contains(MARK) {
            servers.clear();
        }
    })?;
    steps.judge(expected, &second, "");
    steps.step("noted", || noted(&folder));
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// A GPU at each socket.
fn serve(runner: &Runner, scenario: &Scenario) -> Result<Vec<Server>, LabError> {
    scenario.servers.iter().map(|socket| start(&runner.tools.function, SMALL, Path::new(socket))).collect()
}

/// The VMM reported the loss exactly once.
fn noted(report: &Path) -> Step {
    let said = fs::read_to_string(report.join("vmm.log"))?;
    match said.matches(WORDS).count() {
        1 => Ok(()),
        count => Err(Fault::Untrue(format!("the VMM reports {count} times that {WORDS}: {said}"))),
    }
}
