//! The story of a DMA engine: it writes to memory, to a slice of each kind that the host has, and to a peer's BAR.

use std::fs;
use std::path::Path;
use std::time::Instant;

use egm_report::{Check, Outcome};

use crate::error::LabError;
use crate::judge::{case, judge};
use crate::passed::{dmar_faults, free, missing, no_faults_since};
use crate::progress::Stage;
use crate::results::ScenarioResult;
use crate::run::Runner;
use crate::scenarios::Scenario;
use crate::slices::{self, Pool, timed};

/// Kinds of slices that iommufd maps: files, pages of a pool, pages of persistent memory.
const WITH_PAGES: [&str; 3] = ["local", "hugetlb", "dax0.0"];
/// A kind that the host's kernel has no pages of, which type 1 maps by address.
const WITHOUT: &str = "memmap";

/// Tells the story of the engine of `scenario` and the memory beside it.
pub(crate) fn run(runner: &Runner, scenario: &Scenario, report: &Path) -> Result<ScenarioResult, LabError> {
    if let Some(why) = missing(scenario) {
        return Ok(ScenarioResult::skipped(scenario.name, &why));
    }
    let begun = Instant::now();
    let _pool = Pool::fill()?;
    let faults = dmar_faults()?;
    let mut cases = Vec::new();
    for region in WITH_PAGES.iter().chain((!scenario.iommufd).then_some(&WITHOUT)) {
        Stage::note(&format!("{}: a slice of {region}", scenario.name));
        cases.extend(reaches(runner, scenario, region, report)?);
    }
    cases.push(timed("no-dma-faults", || no_faults_since(faults)));
    cases.push(timed("free", || scenario.passed.iter().try_for_each(|function| free(function))));
    let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ScenarioResult { scenario: scenario.name.into(), cases, init_millis: None, millis })
}

/// The engine reaches all there is in a guest with a slice of `region`.
fn reaches(
    runner: &Runner,
    scenario: &Scenario,
    region: &'static str,
    report: &Path,
) -> Result<Vec<Check>, LabError> {
    if let Some(why) = slices::missing(runner, region)? {
        return Ok(vec![Check { outcome: Outcome::Waived, reason: why, ..case(region, None, 0) }]);
    }
    let one = Scenario { region: Some(region), ..*scenario };
    let folder = report.join(region);
    fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
    let machine = runner.machine(&one, &folder)?;
    let boot = runner.boot(&one, &machine, &folder)?;
    let mut cases = judge(one.expected, &boot.collected);
    cases.iter_mut().for_each(|case| case.name = format!("{} of {region}", case.name));
    Ok(cases)
}
