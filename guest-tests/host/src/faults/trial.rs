//! One fault, planted: does its check turn red for it?

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egm_report::Outcome as Judged;

use crate::error::LabError;
use crate::faults::binaries::{Binaries, Binary};
use crate::faults::table::{Finder, Row};
use crate::faults::{Outcome, VARIABLE, Verdict, files};
use crate::process::{Ending, Limit, Reaction, watch};
use crate::results::ScenarioResult;

/// Silence after which a test that a fault keeps waiting has failed.
const SILENCE: Duration = Duration::from_secs(60);

/// What a test program came to.
struct Run {
    ending: Ending,
    /// Whether it ran exactly one test.
    is_one: bool,
    /// Why that test decided nothing, if it said so.
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
    if let Some(why) = clean.skipped {
        return Ok(Verdict::new(row, Outcome::Skipped, &why));
    }
    let faulty = start(&binary, test, Some(&row.fault), &folder)?;
    let (outcome, reason) = match (clean.ending, faulty.ending) {
        _ if !clean.is_one || !faulty.is_one => (Outcome::Missed, "not exactly one test ran"),
        (ending, _) if ending != Ending::Exit(0) => (Outcome::Missed, "the test fails without the fault"),
        (_, Ending::Exit(0)) if !faulty.reached => (Outcome::Missed, "the test does not reach the fault"),
        (_, Ending::Exit(0)) => (Outcome::Missed, "the test passes with the fault"),
        _ if !faulty.reached => {
            (Outcome::Missed, "the test fails, but not for the fault, which it does not reach")
        }
        (_, Ending::Deadline) => (Outcome::Caught, "the test waits for ever"),
        _ => (Outcome::Caught, "the test fails"),
    };
    Ok(Verdict::new(row, outcome, reason))
}

fn start(binary: &Binary<'_>, test: &str, fault: Option<&str>, folder: &Path) -> Result<Run, LabError> {
    let mut command = Command::new(binary.path);
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .current_dir(&binary.folder)
        .env_remove(VARIABLE)
        // Seeds of failures that are planted are no seeds of failures.
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
    command.envs(fault.map(|fault| (VARIABLE, fault)));
    let mark = if fault.is_some() { "faulty" } else { "clean" };
    let (out, errors) = (folder.join(format!("{mark}.out")), folder.join(format!("{mark}.err")));
    let ending = watch(command, Limit::Silence(SILENCE), &out, &errors, |_| Reaction::Go)?;
    let said = |path: &Path| {
        fs::read(path)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .map_err(LabError::file("read", path))
    };
    let (out, errors) = (said(&out)?, said(&errors)?);
    let skipped = out.lines().chain(errors.lines()).find_map(|line| line.split_once("skipped: "));
    Ok(Run {
        ending,
        is_one: out.lines().any(|line| line == "running 1 test"),
        skipped: skipped.map(|(_, why)| why.to_owned()),
        reached: fault.is_some_and(|fault| errors.contains(&reached(fault))),
    })
}

/// The line that a program prints when it reaches its fault.
fn reached(fault: &str) -> String {
    format!("fault {fault} reached\n")
}

/// Whether the check that `row` names failed in `result`, and for its fault.
pub(super) fn of_scenario(row: &Row, result: Option<&ScenarioResult>, report: &Path) -> Verdict {
    let Finder::Scenario { check, .. } = &row.finder else {
        return Verdict::new(row, Outcome::Missed, "no scenario finds it");
    };
    let Some(result) = result else {
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
        files(&report.join(&result.scenario)).iter().any(|path| has(path))
            || has(&report.join(crate::l1::LOG))
    };
    let red: Vec<_> =
        result.cases.iter().filter(|case| matches!(case.outcome, Judged::Failed | Judged::Error)).collect();
    let names =
        red.iter().map(|case| format!("{}: {}", case.name, case.reason)).collect::<Vec<_>>().join("; ");
    match red.iter().find(|case| case.name == *check) {
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
