//! The skips that a green run may have, by the table `guest-tests/skips.json`: in a scenario's cases, and in lines
//! `skipped: REASON` of a log. A skip that no row allows is a failure.

mod condition;
mod log;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use egm_guest::findings::{Check, Outcome};
use serde::Deserialize;

use self::condition::Condition;
pub(crate) use self::condition::Site;
use crate::engine::error::LabError;
use crate::engine::results::ScenarioResult;

/// Compiled into the program, because the emulated host has no checkout.
const TABLE: &str = include_str!("../../../skips.json");

/// Subject of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// A check of a scenario of `egm-lab run`.
    Lab,
    /// A unit or integration test, on this machine or as an aarch64 program.
    Tests,
    /// A test as an aarch64 program in QEMU's emulation of a process, for what that emulation lacks.
    TestsAsAarch64,
    /// A step of scripts/test.
    Steps,
}

/// A row: one kind of skip, and the condition of the host under which it is right.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    kind: Kind,
    /// The scenario, test or step; `*` stands for any text, here and in the texts below.
    of: String,
    /// The check of a scenario.
    #[serde(default)]
    check: Option<String>,
    host: Condition,
    reason: String,
    /// Reason why no program can check the condition.
    #[serde(default)]
    note: Option<String>,
}

/// A skip that happened.
#[derive(Debug, Clone, Copy)]
struct Skip<'a> {
    kind: Kind,
    of: &'a str,
    check: Option<&'a str>,
    reason: &'a str,
}

#[derive(Debug)]
pub(crate) struct Skips(Vec<Row>);

impl Skips {
    /// The table of this program.
    pub(crate) fn read() -> Result<Self, LabError> {
        LabError::json("guest-tests/skips.json", TABLE.as_bytes()).map(Self)
    }

    /// Makes every skipped case of `result` that no row allows a failure.
    pub(crate) fn judge(&self, result: &mut ScenarioResult, site: Site<'_>) {
        for case in result.cases.iter_mut().filter(|case| case.outcome == Outcome::Skipped) {
            let check = Some(case.name.as_str());
            let skip = Skip { kind: Kind::Lab, of: &result.scenario, check, reason: &case.reason };
            if !self.allow(skip, site) && !egm_address::fault!("skip-table-ignored") {
                let reason =
                    format!("skipped, and guest-tests/skips.json does not allow it: {}", case.reason);
                *case = Check { outcome: Outcome::Failed, reason, ..case.clone() };
            }
        }
    }

    /// Whether a row allows the skip of `test`, a test of this machine.
    pub(crate) fn allows_test(&self, test: &str, reason: &str, site: Site<'_>) -> bool {
        self.allow(Skip { kind: Kind::Tests, of: test, check: None, reason }, site)
    }

    fn allow(&self, skip: Skip<'_>, site: Site<'_>) -> bool {
        self.row(skip, site).is_some()
    }

    /// The row that allows `skip`.
    fn row(&self, skip: Skip<'_>, site: Site<'_>) -> Option<&Row> {
        self.0.iter().find(|row| row.matches(skip) && row.host.holds(site))
    }
}

impl Row {
    fn matches(&self, skip: Skip<'_>) -> bool {
        let check = match (&self.check, skip.check) {
            (Some(pattern), Some(check)) => matches_pattern(check, pattern),
            (pattern, check) => pattern.is_none() && check.is_none(),
        };
        let kind = self.kind == skip.kind || (self.kind, skip.kind) == (Kind::Tests, Kind::TestsAsAarch64);
        kind && check && matches_pattern(skip.of, &self.of) && matches_pattern(skip.reason, &self.reason)
    }
}

/// Whether `text` is as `pattern`, in which `*` stands for any text.
fn matches_pattern(text: &str, pattern: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return text == pattern };
    let Some(text) = text.strip_prefix(head) else { return false };
    let starts = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    starts.filter_map(|at| text.get(at..)).any(|tail| matches_pattern(tail, rest))
}

/// Arguments of `egm-lab skips`.
#[derive(Debug, Args)]
pub(crate) struct SkipsArguments {
    /// Kind of the log.
    kind: Kind,
    /// Output of "cargo nextest run" or "cargo test -- --show-output", or lines "NAME: skipped: REASON".
    log: PathBuf,
    /// Options of scripts/test that make it skip steps.
    #[arg(last = true)]
    options: Vec<String>,
}

/// Prints the skips of a log; exit code 1 when the table does not allow one of them.
pub(crate) fn run(arguments: &SkipsArguments) -> Result<ExitCode, LabError> {
    let text = std::fs::read(&arguments.log).map_err(LabError::file("read", &arguments.log))?;
    let table = Skips::read()?;
    let site = Site::of_this_host(false, &arguments.options);
    let (mut refused, mut allowed) = (0u32, 0u32);
    for log::Printed { of, reason } in log::skips(&String::from_utf8_lossy(&text)) {
        let skip = Skip { kind: arguments.kind, of: &of, check: None, reason: &reason };
        let row = table.row(skip, site);
        match row {
            Some(Row { note: None, .. }) => println!("{of}: {reason}"),
            Some(Row { note: Some(note), .. }) => println!("{of}: {reason} (not checked: {note})"),
            None => println!("{of}: {reason} (guest-tests/skips.json does not allow it)"),
        }
        let count = if row.is_some() { &mut allowed } else { &mut refused };
        *count += 1;
    }
    println!("{} skipped, {allowed} of them allowed", allowed + refused);
    Ok(ExitCode::from(u8::from(refused > 0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::ALL;

    fn table(json: &str) -> Skips {
        Skips(serde_json::from_str(json).unwrap())
    }

    fn skipped(scenario: &str, reason: &str) -> ScenarioResult {
        ScenarioResult::skipped(scenario, reason)
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (text, pattern) in [("", "*"), ("abc", "a*c"), ("abc", "abc"), ("ac", "a*c"), ("a*c", "a*c*")] {
            assert!(matches_pattern(text, pattern), "{text} {pattern}");
        }
        for (text, pattern) in [("abc", "ab"), ("abc", "*b"), ("", "a*"), ("ba", "a*")] {
            assert!(!matches_pattern(text, pattern), "{text} {pattern}");
        }
    }

    #[test]
    fn a_skip_outside_of_the_table_is_a_failure() {
        let table = table(
            r#"[{ "kind": "lab", "of": "vfio-*", "check": "run", "host": "not-lab", "reason": "no function *" }]"#,
        );
        let judged = |scenario: &str, reason: &str, in_lab| {
            let mut result = skipped(scenario, reason);
            table.judge(&mut result, Site::of_this_host(in_lab, &[]));
            result.cases[0].outcome
        };
        assert_eq!(judged("vfio-net", "no function 0000:01:00.0", false), Outcome::Skipped);
        assert_eq!(judged("vfio-net", "no function 0000:01:00.0", true), Outcome::Failed);
        assert_eq!(judged("demo", "no function 0000:01:00.0", false), Outcome::Failed);
        assert_eq!(judged("vfio-net", "another reason", false), Outcome::Failed);
    }

    /// A row without a condition allows its skip on every host, so there are few.
    #[test]
    fn a_row_without_a_condition_has_a_note_and_is_one_of_five_at_most() {
        let table = Skips::read().unwrap();
        let without = |row: &&Row| matches!(row.host, Condition::Any);
        assert!(table.0.iter().filter(without).count() <= 5);
        for row in &table.0 {
            assert_eq!(without(&row), row.note.is_some(), "{row:?}");
        }
    }

    #[test]
    fn options_of_a_run_allow_what_they_skip() {
        let table = Skips::read().unwrap();
        let allows = |options: &[&str], reason| {
            let options: Vec<String> = options.iter().map(|&option| option.into()).collect();
            let skip = Skip { kind: Kind::Steps, of: "guests", check: None, reason };
            table.allow(skip, Site::of_this_host(false, &options))
        };
        assert!(allows(&["--quick"], "--quick") && !allows(&["--full"], "--quick"));
        assert!(allows(&["--without-lab"], "--without-lab") && !allows(&[], "--without-lab"));
        assert!(allows(&[], "run only with --full") && !allows(&["--full"], "run only with --full"));
        assert!(allows(&["--shard", "2/4"], "not in this shard") && !allows(&[], "not in this shard"));
    }

    /// The lab itself provides regions and functions in its emulated host, so their absence is a failure there.
    #[test]
    fn the_table_is_sound_and_allows_no_missing_region_or_function_in_the_lab() {
        let table = Skips::read().unwrap();
        for row in table.0.iter().filter(|row| row.kind == Kind::Lab) {
            assert!(ALL.iter().any(|scenario| matches_pattern(scenario.name, &row.of)), "{row:?}");
            assert!(row.check.is_some(), "{row:?}");
        }
        for (scenario, reason) in [
            ("slice-mem", "this host has no region mem: it has dax0.0"),
            ("slice-mem", "this host has no function 0000:01:00.0 in an IOMMU group"),
            ("egm-device-kinds", "this host has no such region"),
        ] {
            for (in_lab, outcome) in [(true, Outcome::Failed), (false, Outcome::Skipped)] {
                let mut result = skipped(scenario, reason);
                table.judge(&mut result, Site::of_this_host(in_lab, &[]));
                assert_eq!(result.cases[0].outcome, outcome, "{reason}");
            }
        }
    }
}
