//! The story of a guest that maltreats its passed functions: its VMM lives and has little to say, no device reached what it may not,
//! and the next guest drives them.

use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::error::LabError;
use crate::host_parts::{HUB, serve_network};
use crate::judge::{Expected, judge};
use crate::passed::{dmar_faults, free, missing, no_faults_since};
use crate::results::ScenarioResult;
use crate::run::Runner;
use crate::scenarios::Scenario;
use crate::slices::{Fault, Step, timed};

/// The next guest uses all of them.
const NEXT: &str = "egm.checks=pci,nvme,passed_net egm.arg.net.mac=52:54:00:e9:00:02 egm.arg.net.peer=192.168.101.1 \
                    egm.arg.net.addr=192.168.101.2/24 lapic=notscdeadline quiet";
/// Most bytes that the VMM writes of a guest's mistakes: they are counted, and told once.
const WORDS: usize = 4096;

/// Tells the story of the functions of `scenario`.
pub(crate) fn run(runner: &Runner, scenario: &Scenario, report: &Path) -> Result<ScenarioResult, LabError> {
    if let Some(why) = missing(scenario) {
        return Ok(ScenarioResult::skipped(scenario.name, &why));
    }
    let begun = Instant::now();
    let faults = dmar_faults()?;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    let mut cases = judge(scenario.expected, &first.collected);
    cases.push(timed("no-dma-faults", || no_faults_since(faults)));
    cases.push(timed("few-words", || few_words(report)));
    cases.push(timed("free", || scenario.passed.iter().try_for_each(|function| free(function))));
    serve_network(HUB)?;
    let expected = Expected { checks: &["pci", "nvme", "passed_net"], ..scenario.expected };
    let next = Scenario { words: NEXT, expected, ..*scenario };
    let folder = report.join("next");
    fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
    let machine = runner.machine(&next, &folder)?;
    let second = runner.boot(&next, &machine, &folder)?;
    let mut after = judge(expected, &second.collected);
    after.iter_mut().for_each(|case| case.name = format!("{} next", case.name));
    cases.append(&mut after);
    cases.push(timed("no-dma-faults next", || no_faults_since(faults)));
    let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ScenarioResult { scenario: scenario.name.into(), cases, init_millis: first.init, millis })
}

fn few_words(report: &Path) -> Step {
    let said = fs::read(report.join("vmm.log"))?;
    if said.len() <= WORDS {
        return Ok(());
    }
    Err(Fault::Untrue(format!("the VMM wrote {} bytes: see vmm.log", said.len())))
}
