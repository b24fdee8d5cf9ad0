//! Planted faults: the table `guest-tests/faults.json`, and whether each fault turns its test or scenario red.

mod binaries;
mod table;
mod trial;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use egm_report::show::{Screen, hanging};
use serde::Serialize;

use crate::commands::session;
use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::engine::results::ScenarioResult;
use crate::faults::binaries::Binaries;
use crate::faults::table::{Finder, Row};

/// Folder for logs of faults. Not `target/faults`: that is cargo's folder for the profile `faults`.
const REPORT: &str = "target/fault-logs";

/// Arguments of `egm-lab faults`.
#[derive(Debug, Args)]
pub(crate) struct FaultsArguments {
    /// Faults to plant [default: all of guest-tests/faults.json].
    faults: Vec<String>,
    /// Plant only faults of unit tests, which need no other build than the tests.
    #[arg(long)]
    unit: bool,
    /// List the faults and what finds each.
    #[arg(long)]
    list: bool,
    /// Print the verdicts as JSON.
    #[arg(long)]
    json: bool,
}

/// Outcome of one fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    /// Its check failed, and passes without the fault.
    Caught,
    /// Its check passed, or the fault was not reached: a hole in the tests.
    Missed,
    /// The check cannot be decided on this host.
    Skipped,
}

/// The verdict on one fault.
#[derive(Debug, Serialize)]
struct Verdict {
    fault: String,
    finder: String,
    outcome: Outcome,
    reason: String,
}

impl Verdict {
    fn new(row: &Row, outcome: Outcome, reason: &str) -> Self {
        Self { fault: row.fault.clone(), finder: row.finder.to_string(), outcome, reason: reason.into() }
    }
}

/// How to provide what the checks of skipped faults lack.
const REMEDY: &str = "scripts/lab/packages --yes test installs Debian packages (iasl: acpica-tools), \
                      egm-lab kernel guest and egm-lab kernel built obtain the lab's kernels";

/// Runs planted faults; exit code 1 when one stays unnoticed, or, without `--unit`, undecided.
pub(crate) fn run(arguments: &FaultsArguments) -> Result<ExitCode, LabError> {
    let rows = chosen(arguments)?;
    if arguments.list {
        let screen = Screen::of_stdout();
        for row in &rows {
            let (finder, what) = (row.finder.to_string(), format!("{}: {}", row.place, row.what));
            println!("{:<34} {}", row.fault, hanging(&finder, 35, screen));
            println!("    {}", hanging(&what, 4, screen));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let report = Path::new(REPORT);
    // A log of an earlier run must not count as evidence that this run reached a fault.
    if report.exists() {
        fs::remove_dir_all(report).map_err(LabError::file("remove", report))?;
    }
    fs::create_dir_all(report).map_err(LabError::file("make", report))?;
    let mut verdicts = of_tests(&rows, report)?;
    verdicts.extend(of_scenarios(&rows, report)?);
    if arguments.json {
        let json = serde_json::to_string_pretty(&verdicts)
            .map_err(|error| LabError::Content { what: "verdicts".into(), problem: error.to_string() })?;
        println!("{json}");
    }
    Ok(conclude(&verdicts, arguments))
}

fn chosen(FaultsArguments { faults, unit, .. }: &FaultsArguments) -> Result<Vec<Row>, LabError> {
    let mut rows = table::read()?;
    if let Some(name) = faults.iter().find(|name| !rows.iter().any(|row| row.fault == **name)) {
        return Err(LabError::Usage(format!("no fault \"{name}\"; egm-lab faults --list shows them all")));
    }
    rows.retain(|row| faults.is_empty() || faults.contains(&row.fault));
    rows.retain(|row| !unit || matches!(row.finder, Finder::Unit { .. }));
    Ok(rows)
}

fn of_tests(rows: &[Row], report: &Path) -> Result<Vec<Verdict>, LabError> {
    let mut verdicts = Vec::new();
    let is_unit = |row: &&Row| matches!(row.finder, Finder::Unit { .. });
    let is_program = |row: &&Row| matches!(row.finder, Finder::Program { .. });
    let units: Vec<_> = rows.iter().filter(is_unit).collect();
    let programs: Vec<_> = rows.iter().filter(is_program).collect();
    for rows in [units, programs].iter().filter(|rows| !rows.is_empty()) {
        let binaries = Binaries::of(rows)?;
        for row in rows {
            let verdict = trial::of_test(row, &binaries, report)?;
            Stage::note(&line(&verdict));
            verdicts.push(verdict);
        }
    }
    Ok(verdicts)
}

fn of_scenarios(rows: &[Row], report: &Path) -> Result<Vec<Verdict>, LabError> {
    let rows: Vec<_> =
        rows.iter().filter_map(|row| Some((row, row.finder.scenario_with(&row.fault)?))).collect();
    if rows.is_empty() {
        return Ok(Vec::new());
    } else if !cfg!(feature = "planted-faults") {
        return Err(LabError::Usage(
            "cannot plant faults in programs that have none: run scripts/test --faults".into(),
        ));
    }
    // Each scenario runs once without a fault: a check that is red anyway catches nothing.
    let clean: BTreeSet<_> = rows.iter().filter_map(|(row, _)| row.finder.scenario()).collect();
    let clean = clean.into_iter().map(str::to_owned);
    let names: Vec<_> = clean.chain(rows.iter().map(|(_, name)| name.clone())).collect();
    let results: Vec<ScenarioResult> = session::run_named(&names, report)?;
    let of = |name: &str| results.iter().find(|result| result.scenario == name);
    let verdicts = rows
        .iter()
        .map(|(row, name)| trial::of_scenario(row, row.finder.scenario().and_then(of), of(name), report));
    Ok(verdicts.inspect(|verdict| Stage::note(&line(verdict))).collect())
}

fn line(Verdict { fault, finder, outcome, reason }: &Verdict) -> String {
    match outcome {
        Outcome::Caught => format!("{fault}: caught by {finder}: {reason}"),
        Outcome::Missed => format!("{fault}: NOT caught by {finder}: {reason}"),
        Outcome::Skipped => format!("{fault}: skipped: {reason}"),
    }
}

/// Prints the closing line, after every fault that was not caught; with `--json` on standard error.
fn conclude(verdicts: &[Verdict], arguments: &FaultsArguments) -> ExitCode {
    let Closing { text, failed } = Closing::of(verdicts, arguments.unit);
    if arguments.json {
        eprintln!("{text}");
    } else {
        println!("{text}");
    }
    ExitCode::from(u8::from(failed))
}

/// The end of a run.
struct Closing {
    /// Each fault that was not caught, then the closing line.
    text: String,
    failed: bool,
}

impl Closing {
    /// A fault with a skipped check was not caught. Only `unit` allows that: every scripts/test runs those, on
    /// machines where skips.json allows their skips.
    fn of(verdicts: &[Verdict], unit: bool) -> Self {
        let count = |wanted: Outcome| verdicts.iter().filter(|verdict| verdict.outcome == wanted).count();
        let missed = verdicts.iter().filter(|verdict| verdict.outcome == Outcome::Missed);
        let mut text: String = missed.map(|verdict| line(verdict) + "\n").collect();
        let (caught, skipped) = (count(Outcome::Caught), count(Outcome::Skipped));
        text += &format!("faults: planted {}, caught {caught}, skipped {skipped}", verdicts.len());
        let is_undecided = skipped > 0 && !unit;
        if is_undecided {
            let skips = verdicts.iter().filter(|verdict| verdict.outcome == Outcome::Skipped);
            let reasons: BTreeSet<_> = skips.map(|verdict| verdict.reason.as_str()).collect();
            let reasons = reasons.into_iter().collect::<Vec<_>>().join("; ");
            text += &format!(", and a skipped fault is not caught: {reasons}; help: {REMEDY}");
        }
        Self { text, failed: is_undecided || count(Outcome::Missed) > 0 }
    }
}

/// Every file below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_with_a_skipped_fault_fails_with_the_reason_unless_it_has_unit_tests_only() {
        let verdict = |outcome, reason: &str| Verdict {
            fault: "a-fault".into(),
            finder: "a test".into(),
            outcome,
            reason: reason.into(),
        };
        let (caught, missed) = (verdict(Outcome::Caught, "fails"), verdict(Outcome::Missed, "passes"));
        let skipped = || verdict(Outcome::Skipped, "iasl is missing");
        let all = [caught, skipped(), skipped()];
        let Closing { text, failed } = Closing::of(&all, false);
        assert!(failed);
        let head = "faults: planted 3, caught 1, skipped 2, and a skipped fault is not caught: iasl is missing; help: ";
        let last = text.lines().next_back().unwrap();
        assert!(last.starts_with(head) && last.contains("acpica-tools"), "{last}");
        let unit = Closing::of(&all, true);
        assert_eq!((unit.text.as_str(), unit.failed), ("faults: planted 3, caught 1, skipped 2", false));
        assert!(!Closing::of(&all[..1], false).failed);
        assert!(Closing::of(&[missed], true).failed);
    }
}
