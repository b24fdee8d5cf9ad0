//! Runs a scenario: boots of one machine, or the steps of its own.

use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::engine::boot::Boot;
use crate::engine::error::{LabError, chain};
use crate::engine::judge::{case, judge};
use crate::engine::logs;
use crate::engine::progress::Stage;
use crate::engine::results::{Count, ScenarioResult};
use crate::engine::scenario::{Runs, Scenario};
use crate::engine::step::millis;
use crate::runner::machine::{Runner, init_case};
use crate::runner::steps;
use crate::scenarios::steps::steps_of;
use crate::skips::Site;

/// Runs `scenario`; a failure of the lab is a result, too.
pub(crate) fn run(runner: &Runner, scenario: &Scenario) -> ScenarioResult {
    let stage = Stage::begin(&format!("{}: {}", scenario.name, scenario.summary));
    let begun = Instant::now();
    let mut result = carried_out(runner, scenario)
        .unwrap_or_else(|error| ScenarioResult::broken(scenario.name, &chain(&error)));
    result.cases.extend(scenario.page_size());
    runner.skips.judge(&mut result, Site::of_this_host(runner.in_lab, &runner.options));
    result.millis = millis(begun);
    stage.result(&format!("{}: {}", scenario.name, Count::of(std::slice::from_ref(&result))));
    result
}

fn carried_out(runner: &Runner, scenario: &Scenario) -> Result<ScenarioResult, LabError> {
    let report = runner.report.join(scenario.name);
    logs::clear(&report)?;
    fs::create_dir_all(&report).map_err(LabError::file("make", &report))?;
    match scenario.runs {
        Runs::Steps => steps::run(runner, scenario, &report, steps_of(scenario)?),
        Runs::Boots(count) => boots(runner, scenario, &report, count),
    }
}

/// Boots the scenario's machine `count` times; each boot keeps its logs.
fn boots(
    runner: &Runner,
    scenario: &Scenario,
    report: &Path,
    count: u32,
) -> Result<ScenarioResult, LabError> {
    let machine = runner.machine(scenario, report)?;
    let mut result =
        ScenarioResult { scenario: scenario.name.into(), cases: Vec::new(), init_millis: None, millis: 0 };
    for boot in 1..=count {
        if count > 1 {
            Stage::note(&format!("boot {boot} of {count}"));
        }
        let folder = logs::of_next_boot(report)?;
        let booted = runner.boot(scenario, &machine, &folder)?;
        let mut cases = judge(scenario.expected, &booted.collected);
        let Boot { init, signalled, disk, .. } = booted;
        cases.extend(disk.map(|fault| case("disk", fault, 0)));
        cases.extend(scenario.prints.map(|words| case("prints", missing(words, &folder), 0)));
        if scenario.terminate_on.is_some() {
            let fault = (!signalled).then(|| "the VMM ended before it was to be stopped".into());
            cases.push(case("stopped", fault, 0));
        }
        if count > 1 {
            cases.iter_mut().for_each(|case| case.name = format!("{} of boot {boot}", case.name));
        }
        if result.init_millis.is_none() {
            cases.extend(init.map(init_case));
            result.init_millis = init;
        }
        result.cases.extend(cases);
    }
    Ok(result)
}

/// A fault if the VMM's log in `folder` lacks `words`.
fn missing(words: &str, folder: &Path) -> Option<String> {
    let said = fs::read_to_string(folder.join(logs::VMM_LOG)).unwrap_or_default();
    (!said.contains(words)).then(|| format!("the VMM does not print \"{words}\""))
}
