//! Runs a scenario's steps. It skips the scenario where the host lacks its prerequisite, keeps the cases in order, and
//! provides the common checks: functions are free at the end, and the IOMMU refused no access.

use std::fs;
use std::path::{Path, PathBuf};

use egm_guest::findings::Check;

use crate::engine::boot::Boot;
use crate::engine::error::{LabError, chain};
use crate::engine::judge::{Expected, judge};
use crate::engine::results::ScenarioResult;
use crate::engine::scenario::Scenario;
use crate::hosts::functions;
use crate::hosts::iommu;
use crate::hosts::pool::Pool;
use crate::runner::machine::{Runner, init_case};

pub(crate) use crate::engine::step::{Fault, Step, timed};
use crate::runner::regions;

/// A function that runs the steps of a scenario.
pub(crate) type StepsOf = fn(&mut Steps<'_>) -> Result<(), LabError>;

/// A scenario that is running.
pub(crate) struct Steps<'a> {
    pub(crate) runner: &'a Runner,
    pub(crate) scenario: &'a Scenario,
    /// Region of its slice; empty without one.
    pub(crate) region: &'a str,
    /// Folder for its logs.
    pub(crate) report: &'a Path,
    /// The pool of its slice, if that has hugetlb pages.
    pub(crate) pool: Option<Pool>,
    /// Results so far, in order.
    pub(crate) cases: Vec<Check>,
    /// Milliseconds until init, of the first boot that was judged.
    init: Option<u64>,
    /// Interrupts for accesses that the IOMMU had refused before.
    faults: u64,
}

/// Runs `scenario` by its function; logs go to `report`.
pub(crate) fn run(
    runner: &Runner,
    scenario: &Scenario,
    report: &Path,
    run: StepsOf,
) -> Result<ScenarioResult, LabError> {
    let pool = (scenario.region == Some("hugetlb")).then(regions::pool).transpose()?;
    let region = scenario.region.unwrap_or_default();
    let mut steps =
        Steps { runner, scenario, region, report, pool, cases: Vec::new(), init: None, faults: 0 };
    match steps.missing()? {
        Some(why) => steps.skip(&why),
        None => {
            if !scenario.assigned.is_empty() {
                steps.faults = iommu::faults()?;
            }
            if let Err(error) = run(&mut steps) {
                // Earlier results stay.
                steps.cases.extend(ScenarioResult::broken(scenario.name, &chain(&error)).cases);
            }
        }
    }
    Ok(ScenarioResult {
        scenario: scenario.name.into(),
        cases: steps.cases,
        init_millis: steps.init,
        millis: 0,
    })
}

impl Steps<'_> {
    /// The scenario's prerequisite that this host lacks, if any.
    fn missing(&self) -> Result<Option<String>, LabError> {
        let function = functions::missing(self.scenario);
        if function.is_some() || self.region.is_empty() {
            return Ok(function);
        }
        regions::missing(self.runner, self.region)
    }

    /// Marks the scenario as skipped, for the reason `why`.
    pub(crate) fn skip(&mut self, why: &str) {
        self.cases = ScenarioResult::skipped(self.scenario.name, why).cases;
    }

    /// Runs a step and records its result.
    pub(crate) fn step(&mut self, name: &str, step: impl FnOnce() -> Step) {
        self.cases.push(timed(name, step));
    }

    /// Judges a boot; `mark` follows the names of its cases.
    pub(crate) fn judge(&mut self, expected: Expected, boot: &Boot, mark: &str) {
        let mut cases = judge(expected, &boot.collected);
        if self.init.is_none() {
            self.init = boot.init;
            cases.extend(boot.init.map(init_case));
        }
        cases.iter_mut().for_each(|case| case.name.push_str(mark));
        self.cases.append(&mut cases);
    }

    /// Checks that the scenario's functions are free.
    pub(crate) fn free(&mut self) {
        let assigned = self.scenario.assigned;
        self.step("free", || assigned.iter().try_for_each(|function| functions::free(function)));
    }

    /// Checks that the IOMMU has refused nothing since the scenario began.
    pub(crate) fn no_faults(&mut self, name: &str) {
        let before = self.faults;
        self.step(name, || iommu::no_faults_since(before));
    }

    /// A folder for the logs of one of several machines.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf, LabError> {
        let folder = self.report.join(name);
        fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
        Ok(folder)
    }
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;
    use crate::engine::judge::Collected;
    use crate::engine::process::Ending;
    use crate::runner::machine::tests::nowhere;
    use crate::scenarios::select;

    /// Names and outcomes of a scenario with the functions `assigned`, run by `steps`, and its first init.
    fn results(assigned: &'static [&'static str], steps: StepsOf) -> (Vec<(String, Outcome)>, Option<u64>) {
        let runner = nowhere();
        let scenario =
            Scenario { assigned, region: None, ..select(&["demo".into()], false).unwrap().remove(0) };
        let result = run(&runner, &scenario, Path::new("/nonexistent"), steps).unwrap();
        let cases = result.cases.into_iter().map(|case| (case.name, case.outcome));
        (cases.collect(), result.init_millis)
    }

    fn names(cases: &[(&str, Outcome)]) -> Vec<(String, Outcome)> {
        cases.iter().map(|(name, outcome)| ((*name).to_owned(), *outcome)).collect()
    }

    #[test]
    fn a_scenario_of_a_function_that_the_host_lacks_is_skipped_before_its_first_step() {
        let (cases, _) = results(&["ffff:1f:1f.7"], |_| panic!("a step was taken"));
        assert_eq!(cases, names(&[("run", Outcome::Skipped)]));
    }

    #[test]
    fn cases_stay_in_order_with_marks_and_the_first_init() {
        let (cases, init) = results(&[], |steps| {
            let expected = Expected { exit: 0, summary: false, checks: &[] };
            let ended = || Collected { lines: Vec::new(), ending: Ending::Exit(0), millis: 1 };
            steps.step("shown", || Ok(()));
            steps.judge(expected, &Boot::of(ended(), Some(7)), "");
            steps.judge(expected, &Boot::of(ended(), Some(8)), " again");
            steps.step("untrue", || Err(Fault::Untrue(String::new())));
            steps.step("undecided", || Err(Fault::Undecided("")));
            steps.free();
            Ok(())
        });
        let passed = Outcome::Passed;
        let judged = ["report", "ending", "start", "report again", "ending again"].map(|name| (name, passed));
        let ends = [("untrue", Outcome::Failed), ("undecided", Outcome::Skipped), ("free", passed)];
        assert_eq!(cases, names(&[&[("shown", passed)], &judged[..], &ends].concat()));
        assert_eq!(init, Some(7));
    }

    #[test]
    fn results_before_an_error_of_the_lab_stay() {
        let (cases, _) = results(&[], |steps| {
            steps.step("shown", || Ok(()));
            Err(LabError::Usage("broken".into()))
        });
        assert_eq!(cases, names(&[("shown", Outcome::Passed), ("run", Outcome::Error)]));
    }

    #[test]
    fn a_scenario_that_is_skipped_has_no_other_result() {
        let (cases, _) = results(&[], |steps| {
            steps.skip("no reason");
            Ok(())
        });
        assert_eq!(cases, names(&[("run", Outcome::Skipped)]));
    }
}
