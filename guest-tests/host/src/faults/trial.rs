//! One fault, planted: does its check turn red for it?

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egm_guest::findings::Outcome as Judged;

use crate::engine::error::LabError;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::results::ScenarioResult;
use crate::engine::scenario::FAULT_VARIABLE;
use crate::faults::binaries::{Binaries, Binary};
use crate::faults::table::{Finder, REACHED, Row};
use crate::faults::{Outcome, Verdict, files};
use crate::hosts::l1;
use crate::skips::{Site, Skips};

/// Silence after which a test that a fault keeps waiting has failed.
const SILENCE: Duration = Duration::from_secs(60);

/// Exit code of a test program with a failed test.
const FAILED: i32 = 101;

/// The result of a test program.
struct Run {
    ending: Ending,
    /// Whether it ran exactly one test.
    is_one: bool,
    /// Reason why that test was skipped, if it printed one.
    skipped: Option<String>,
    reached: bool,
}

/// Whether the test of `row` fails with its fault, and passes without.
pub(super) fn of_test(row: &Row, binaries: &Binaries, report: &Path) -> Result<Verdict, LabError> {
    let (Finder::Unit { test, .. } | Finder::Program { test, .. }) = &row.finder else {
        return Ok(Verdict::new(row, Outcome::Missed, "no test finds it"));
    };
    let Some(binary) = binaries.with_test_of(&row.finder) else {
        return Ok(Verdict::new(row, Outcome::Missed, "its test program was not built"));
    };
    let folder = report.join(&row.fault);
    fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
    let clean = start(&binary, test, None, &folder)?;
    if let Some(why) = &clean.skipped {
        let is_allowed = Skips::read()?.allows_test(test, why, Site::of_this_host(false, &[]));
        return Ok(if is_allowed {
            Verdict::new(row, Outcome::Skipped, why)
        } else {
            Verdict::new(
                row,
                Outcome::Missed,
                &format!("the test is skipped, and skips.json does not allow it: {why}"),
            )
        });
    }
    let Decision { outcome, reason } = decide(&clean, &start(&binary, test, Some(&row.fault), &folder)?);
    Ok(Verdict::new(row, outcome, &reason))
}

/// An outcome with its reason.
struct Decision {
    outcome: Outcome,
    reason: String,
}

impl Decision {
    fn caught(reason: &str) -> Self {
        Self { outcome: Outcome::Caught, reason: reason.to_owned() }
    }

    fn missed(reason: &str) -> Self {
        Self { outcome: Outcome::Missed, reason: reason.to_owned() }
    }
}

/// Decides on a test without its fault and with it.
fn decide(clean: &Run, faulty: &Run) -> Decision {
    match (clean.ending, faulty.ending) {
        _ if !clean.is_one || !faulty.is_one => Decision::missed("not exactly one test ran"),
        (ending, _) if ending != Ending::Exit(0) => Decision::missed("the test fails without the fault"),
        (_, Ending::Exit(0)) if !faulty.reached => Decision::missed("the test does not reach the fault"),
        (_, Ending::Exit(0)) => Decision::missed("the test passes with the fault"),
        _ if !faulty.reached => {
            Decision::missed("the test fails, but not for the fault, which it does not reach")
        }
        (_, Ending::Deadline) => Decision::caught("the test waits for ever"),
        (_, Ending::Exit(FAILED)) => Decision::caught("the test fails"),
        (_, ending) => Decision::caught(&format!("the test program ends with {ending:?}")),
    }
}

fn start(binary: &Binary<'_>, test: &str, fault: Option<&str>, folder: &Path) -> Result<Run, LabError> {
    let mut command = Command::new(binary.path);
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .current_dir(&binary.folder)
        .env_remove(FAULT_VARIABLE)
        // Proptest must not keep seeds of planted failures.
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
    let reports = std::path::absolute(folder.join("reached")).map_err(LabError::file("find", folder))?;
    if let Some(fault) = fault {
        make_for_all(&reports).map_err(LabError::file("make", &reports))?;
        command.env(FAULT_VARIABLE, fault).env(REACHED, &reports);
    }
    let mark = if fault.is_some() { "faulty" } else { "clean" };
    let (out, errors) = (folder.join(format!("{mark}.out")), folder.join(format!("{mark}.err")));
    let ending = watch(command, Limit::Silence(SILENCE), &out, &errors, |_| Reaction::Go)?;
    let said = |path: &Path| {
        fs::read(path)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .map_err(LabError::file("read", path))
    };
    let (out, errors) = (said(&out)?, said(&errors)?);
    let reports = if fault.is_some() { said(&reports)? } else { String::new() };
    let skipped = out.lines().chain(errors.lines()).find_map(|line| line.strip_prefix("skipped: "));
    Ok(Run {
        ending,
        is_one: out.lines().any(|line| line == "running 1 test"),
        skipped: skipped.map(str::to_owned),
        reached: fault.is_some_and(|fault| (reports + &errors).contains(&reached(fault))),
    })
}

/// Makes an empty `file` that all users may write: some tests start processes of other users.
fn make_for_all(file: &Path) -> io::Result<()> {
    File::create(file)?.set_permissions(Permissions::from_mode(0o666))
}

/// The line that a program prints when it reaches its fault.
fn reached(fault: &str) -> String {
    format!("fault {fault} reached\n")
}

/// Whether the check that `row` names passes in `clean`, the scenario without the fault, and fails in `result` for the fault.
pub(super) fn of_scenario(
    row: &Row,
    clean: Option<&ScenarioResult>,
    result: Option<&ScenarioResult>,
    report: &Path,
) -> Verdict {
    let Finder::Scenario { check, .. } = &row.finder else {
        return Verdict::new(row, Outcome::Missed, "no scenario finds it");
    };
    let (Some(clean), Some(result)) = (clean, result) else {
        return Verdict::new(row, Outcome::Missed, "the scenario has no result");
    };
    if let Some(skipped) =
        result.cases.iter().find(|case| case.name == "run" && case.outcome == Judged::Skipped)
    {
        return Verdict::new(row, Outcome::Skipped, &skipped.reason);
    }
    let is_reached = || {
        let words = reached(&row.fault);
        let has = |path: &Path| {
            fs::read(path).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(words.trim_end()))
        };
        let mut logs = files(&report.join(&result.scenario));
        logs.extend(l1::consoles(report));
        logs.iter().any(|path| has(path))
    };
    let red: Vec<_> =
        result.cases.iter().filter(|case| matches!(case.outcome, Judged::Failed | Judged::Error)).collect();
    let names =
        red.iter().map(|case| format!("{}: {}", case.name, case.reason)).collect::<Vec<_>>().join("; ");
    let is_clean = clean.cases.iter().all(|case| matches!(case.outcome, Judged::Passed | Judged::Skipped));
    match red.iter().find(|case| case.name == *check) {
        _ if !is_clean => Verdict::new(row, Outcome::Missed, "the scenario fails without the fault"),
        _ if red.is_empty() => Verdict::new(row, Outcome::Missed, "every check passes with the fault"),
        None => {
            Verdict::new(row, Outcome::Missed, &format!("other checks fail, and not \"{check}\": {names}"))
        }
        Some(_) if !is_reached() => {
            Verdict::new(row, Outcome::Missed, &format!("the fault was not reached: {names}"))
        }
        Some(case) => Verdict::new(row, Outcome::Caught, &case.reason),
    }
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Check;

    use super::*;

    #[test]
    fn a_fault_is_caught_by_one_test_that_passes_without_it_and_reaches_it() {
        let run = |ending, reached| Run { ending, is_one: true, skipped: None, reached };
        let passed = || run(Ending::Exit(0), false);
        for (clean, faulty, outcome) in [
            (passed(), run(Ending::Exit(FAILED), true), Outcome::Caught),
            (passed(), run(Ending::Deadline, true), Outcome::Caught),
            (passed(), run(Ending::Exit(0), true), Outcome::Missed),
            (passed(), run(Ending::Exit(FAILED), false), Outcome::Missed),
            (run(Ending::Exit(FAILED), false), run(Ending::Exit(FAILED), true), Outcome::Missed),
            (passed(), Run { is_one: false, ..run(Ending::Exit(FAILED), true) }, Outcome::Missed),
        ] {
            assert_eq!(decide(&clean, &faulty).outcome, outcome);
        }
    }

    #[test]
    fn a_scenario_catches_a_fault_by_the_named_check_alone_and_where_it_passes_without() {
        let row = &crate::faults::table::read().unwrap();
        let row = row.iter().find(|row| matches!(row.finder, Finder::Scenario { .. })).unwrap();
        let Finder::Scenario { name, check } = &row.finder else { unreachable!() };
        let case = |name: &str, outcome| Check {
            name: name.to_owned(),
            outcome,
            ..ScenarioResult::broken(name, "x").cases.remove(0)
        };
        let of = |name: &str, outcome| ScenarioResult {
            scenario: format!("{name}-of-test"),
            cases: vec![case(name, outcome)],
            ..ScenarioResult::broken(name, "x")
        };
        let folder = tempfile::tempdir().unwrap();
        let judge = |clean: &ScenarioResult, faulty: &ScenarioResult| {
            of_scenario(row, Some(clean), Some(faulty), folder.path()).outcome
        };
        let (clean, red) = (of(check, Judged::Passed), of(check, Judged::Failed));
        assert_eq!(judge(&clean, &red), Outcome::Missed, "{name}: not reached");
        let log = folder.path().join(&red.scenario);
        fs::create_dir(&log).unwrap();
        fs::write(log.join("vmm.log"), reached(&row.fault)).unwrap();
        assert_eq!(judge(&clean, &red), Outcome::Caught);
        assert_eq!(judge(&red, &red), Outcome::Missed, "it fails without the fault");
        assert_eq!(judge(&clean, &clean), Outcome::Missed);
        let other = ScenarioResult { scenario: red.scenario.clone(), ..of("another check", Judged::Failed) };
        assert_eq!(judge(&clean, &other), Outcome::Missed);
        assert_eq!(of_scenario(row, None, Some(&red), folder.path()).outcome, Outcome::Missed);
    }
}
