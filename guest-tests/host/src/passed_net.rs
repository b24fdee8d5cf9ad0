//! The story of a network card: a guest drives it and resets itself, which ends its machine, the next drives it all the same,
//! and afterwards nobody holds it. The host's IOMMU must have nothing to complain of.

use std::path::Path;
use std::time::Instant;

use crate::error::LabError;
use crate::host_parts::{HUB, serve_network};
use crate::judge::judge;
use crate::passed::{dmar_faults, free, missing, no_faults_since};
use crate::results::ScenarioResult;
use crate::run::Runner;
use crate::scenarios::Scenario;
use crate::slices::timed;

/// Tells the story of the card of `scenario`.
pub(crate) fn run(runner: &Runner, scenario: &Scenario, report: &Path) -> Result<ScenarioResult, LabError> {
    if let Some(why) = missing(scenario) {
        return Ok(ScenarioResult::skipped(scenario.name, &why));
    }
    let begun = Instant::now();
    let faults = dmar_faults()?;
    serve_network(HUB)?;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    let mut cases = judge(scenario.expected, &first.collected);
    let second = runner.boot(scenario, &machine, report)?;
    let mut after = judge(scenario.expected, &second.collected);
    after.iter_mut().for_each(|case| case.name = format!("{} again", case.name));
    cases.append(&mut after);
    cases.push(timed("free", || scenario.passed.iter().try_for_each(|function| free(function))));
    cases.push(timed("no-dma-faults", || no_faults_since(faults)));
    let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ScenarioResult { scenario: scenario.name.into(), cases, init_millis: first.init, millis })
}
