//! Results of scenarios: as data, as a table, as JUnit XML.

use std::fmt::Write as _;

use egm_guest::findings::{Case, Check, Outcome, Suite, junit_of, visible};
use egm_report::show::{Screen, hanging};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScenarioResult {
    pub(crate) scenario: String,
    /// Its cases, in order.
    pub(crate) cases: Vec<Check>,
    /// Milliseconds from the VMM's start until the guest's kernel started init, of the first boot.
    pub(crate) init_millis: Option<u64>,
    /// Milliseconds of the whole scenario.
    pub(crate) millis: u64,
}

/// Number of cases by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    /// The claim is true.
    pub(crate) passed: usize,
    /// The claim is untrue, or the check broke.
    pub(crate) failed: usize,
    /// Not decided, with a reason.
    pub(crate) skipped: usize,
}

impl Count {
    pub(crate) fn of(results: &[ScenarioResult]) -> Self {
        let mut count = Self::default();
        for case in results.iter().flat_map(|r| &r.cases) {
            match case.outcome {
                Outcome::Passed => count.passed += 1,
                Outcome::Failed | Outcome::Error => count.failed += 1,
                Outcome::Skipped => count.skipped += 1,
            }
        }
        count
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let allowed = if self.skipped > 0 { ", all of them allowed" } else { "" };
        write!(f, "{} passed, {} failed, {} skipped{allowed}", self.passed, self.failed, self.skipped)
    }
}

impl ScenarioResult {
    /// A scenario that was not run, with the reason.
    pub(crate) fn skipped(scenario: &str, reason: &str) -> Self {
        Self::single(scenario, Outcome::Skipped, reason)
    }

    /// A scenario that the lab could not bring to an end.
    pub(crate) fn broken(scenario: &str, reason: &str) -> Self {
        Self::single(scenario, Outcome::Error, reason)
    }

    fn single(scenario: &str, outcome: Outcome, reason: &str) -> Self {
        let case =
            Check { name: "run".into(), outcome, value: None, unit: None, reason: reason.into(), millis: 0 };
        Self { scenario: scenario.into(), cases: vec![case], init_millis: None, millis: 0 }
    }
}

/// The results as a table, reasons of skipped and failed cases included.
pub(crate) fn table(results: &[ScenarioResult], screen: Screen) -> String {
    let cases = || results.iter().flat_map(|r| r.cases.iter().map(move |case| (r.scenario.as_str(), case)));
    let width = |of: fn(&(&str, &Check)) -> usize| cases().map(|row| of(&row)).max().unwrap_or(0);
    let scenario = width(|(scenario, _)| scenario.len());
    let name = width(|(_, case)| printable(&case.name).chars().count());
    let figure = width(|(_, case)| figure(case).chars().count());
    let mut text = String::new();
    for (of, case) in cases() {
        let outcome = screen.paint(case.outcome.style(), &format!("{:<7}", case.outcome));
        let before = format!("{of:<scenario$}  {:<name$}  ", printable(&case.name));
        let after = format!("  {:>figure$}  {:>7} ms  ", self::figure(case), case.millis);
        let indent = before.chars().count() + 7 + after.chars().count();
        let reason = hanging(&printable(&case.reason), indent, screen);
        for line in format!("{before}{outcome}{after}{reason}").lines() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}", line.trim_end());
        }
    }
    text
}

fn figure(case: &Check) -> String {
    let unit = case.unit.as_deref().map(printable).unwrap_or_default();
    case.value.map_or_else(String::new, |value| format!("{} {unit}", short(value)).trim_end().to_owned())
}

/// At most three decimals; scientific notation with three digits below 0.001.
fn short(value: f64) -> String {
    if value != 0.0 && value.abs() < 0.001 {
        return format!("{value:.2e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text from a guest, without control characters for a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The results as JUnit XML, a suite a scenario.
pub(crate) fn junit(results: &[ScenarioResult]) -> String {
    let case = |case: &Check| Case {
        name: case.name.clone(),
        outcome: case.outcome,
        reason: case.reason.clone(),
        millis: case.millis,
        output: case.value.is_some().then(|| visible(&format!("{}: {}", figure(case), case.reason))),
    };
    let suite = |result: &ScenarioResult| Suite {
        name: result.scenario.clone(),
        timestamp: None,
        properties: Vec::new(),
        millis: result.millis,
        cases: result.cases.iter().map(case).collect(),
    };
    junit_of("egm-lab", &results.iter().map(suite).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Vec<ScenarioResult> {
        let case = |name: &str, outcome, reason: &str| Check {
            name: name.into(),
            outcome,
            value: (outcome == Outcome::Passed).then_some(1.5),
            unit: Some("GiB/s".into()),
            reason: reason.into(),
            millis: 12,
        };
        let cases = vec![
            case("numa", Outcome::Passed, ""),
            case("block", Outcome::Failed, "<\"\x1b[2J&>"),
            case("hmat", Outcome::Skipped, "no table"),
            case("net", Outcome::Error, "broke"),
        ];
        vec![ScenarioResult { scenario: "demo".into(), cases, init_millis: None, millis: 99 }]
    }

    #[test]
    fn a_broken_check_counts_as_failed_and_a_skipped_one_as_skipped() {
        assert_eq!(Count::of(&results()).to_string(), "1 passed, 2 failed, 1 skipped, all of them allowed");
    }

    #[test]
    fn columns_are_aligned_and_a_guest_cannot_paint_the_terminal() {
        let text = table(&results(), Screen::FILE);
        let columns: Vec<_> = text.lines().map(|line| line.find(" ms").unwrap()).collect();
        assert!(columns.iter().all(|column| *column == columns[0]), "{text}");
        assert!(!text.contains('\x1b'));
        assert!(text.contains("no table"));
        assert!(table(&results(), Screen::coloured(80)).contains("\x1b[32mpassed"));
    }

    #[test]
    fn figures_are_short() {
        let shown = [1_023.621_093_75, 236.0, 0.0, 1.5, -0.25, 0.000_123_4, 100.0].map(short);
        assert_eq!(shown, ["1023.621", "236", "0", "1.5", "-0.25", "1.23e-4", "100"]);
    }

    #[test]
    fn junit_escapes_what_a_guest_wrote() {
        let xml = junit(&results());
        assert!(
            xml.contains("tests=\"4\"") && xml.contains("failures=\"1\"") && xml.contains("errors=\"1\""),
            "{xml}"
        );
        assert!(xml.contains("&lt;&quot;") && !xml.contains('\x1b'), "{xml}");
    }
}
