//! The verdict on one boot, from its expectation and its collected results. Pure.

use egm_guest::findings::{Check, Line, Outcome};

use crate::engine::process::Ending;

/// Expected result of a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The VMM's exit code.
    pub(crate) exit: i32,
    /// Whether the guest's report ends with its summary line; a guest that is made to crash may not get there.
    pub(crate) summary: bool,
    /// Checks that must pass; a required check that is skipped is a fault.
    pub(crate) checks: &'static [&'static str],
}

impl Expected {
    /// The guest passes `checks` and powers off.
    pub(crate) const fn power_off(checks: &'static [&'static str]) -> Self {
        Self { exit: 0, summary: true, checks }
    }

    /// The guest passes `checks` and resets itself, which ends the VMM.
    pub(crate) const fn reset(checks: &'static [&'static str]) -> Self {
        Self { exit: 1, summary: true, checks }
    }
}

/// Collected results of a boot.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Collected {
    /// The lines of the report, in order.
    pub(crate) lines: Vec<Line>,
    /// End of the VMM.
    pub(crate) ending: Ending,
    /// Milliseconds from its start to its end.
    pub(crate) millis: u64,
}

/// Name prefix of the facts that `egm-guest doctor` reports, which a step of the scenario compares.
const FACT: &str = "doctor.";

/// The guest's checks without facts that are no fault, then `report` (it is complete, and every required check passed or
/// failed) and `ending` (the VMM ended as expected).
pub(crate) fn judge(expected: Expected, collected: &Collected) -> Vec<Check> {
    let mut cases: Vec<Check> = collected
        .lines
        .iter()
        .filter_map(|line| match line {
            Line::Check(check) => Some(check.clone()),
            Line::Summary(_) => None,
        })
        .collect();
    let report = report_fault(expected, &cases, &collected.lines);
    cases.retain(|case| !case.name.starts_with(FACT) || is_fault(case.outcome));
    let ending = ending_fault(expected.exit, collected.ending);
    cases.push(case("report", report, 0));
    cases.push(case("ending", ending, collected.millis));
    cases
}

/// A result of the runner itself; a fault makes it a failure.
pub(crate) fn case(name: &str, fault: Option<String>, millis: u64) -> Check {
    let outcome = if fault.is_none() { Outcome::Passed } else { Outcome::Failed };
    Check { name: name.into(), outcome, value: None, unit: None, reason: fault.unwrap_or_default(), millis }
}

const fn is_fault(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Failed | Outcome::Error)
}

fn report_fault(expected: Expected, cases: &[Check], lines: &[Line]) -> Option<String> {
    let absent: Vec<_> = expected
        .checks
        .iter()
        .filter(|name| !cases.iter().any(|case| case.name == **name))
        .copied()
        .collect();
    if !absent.is_empty() {
        return Some(format!("the guest did not report {}", absent.join(", ")));
    }
    let skipped: Vec<_> = cases
        .iter()
        .filter(|case| case.outcome == Outcome::Skipped && expected.checks.contains(&case.name.as_str()))
        .map(|case| format!("{}: {}", case.name, case.reason))
        .collect();
    if !skipped.is_empty() && !egm_address::fault!("required-skip-passes") {
        return Some(format!("the guest skipped required checks: {}", skipped.join("; ")));
    }
    let summaries: Vec<_> = lines.iter().filter(|line| matches!(line, Line::Summary(_))).collect();
    match (summaries.as_slice(), lines.last()) {
        ([], _) if expected.summary => Some(format!("no summary line after {} checks", cases.len())),
        ([], _) => None,
        ([Line::Summary(count)], Some(Line::Summary(_))) if *count == cases.len() => None,
        ([Line::Summary(count)], Some(Line::Summary(_))) => {
            Some(format!("the guest counts {count} checks and {} were read", cases.len()))
        }
        _ => Some("the report goes on after its summary".into()),
    }
}

fn ending_fault(exit: i32, ending: Ending) -> Option<String> {
    match ending {
        Ending::Exit(code) if code == exit => None,
        Ending::Exit(code) => Some(format!("exit code {code}, expected {exit}")),
        Ending::Signal(signal) => Some(format!("killed by signal {signal}, expected exit code {exit}")),
        Ending::Deadline => Some("did not end in time and was killed".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POWER_OFF: Expected = Expected::power_off(&["cpus"]);

    fn check(name: &str) -> Line {
        Line::Check(case(name, None, 1))
    }

    fn faults(expected: Expected, lines: Vec<Line>, ending: Ending) -> Vec<(String, String)> {
        let cases = judge(expected, &Collected { lines, ending, millis: 1 });
        let failed = cases.into_iter().filter(|case| case.outcome != Outcome::Passed);
        failed.map(|case| (case.name, case.reason)).collect()
    }

    #[test]
    fn a_whole_report_and_the_right_exit_code_pass() {
        assert_eq!(faults(POWER_OFF, vec![check("cpus"), Line::Summary(1)], Ending::Exit(0)), []);
    }

    #[test]
    fn a_silent_guest_fails() {
        let faults = faults(POWER_OFF, vec![], Ending::Exit(0));
        assert_eq!(faults[0].1, "the guest did not report cpus");
    }

    fn skipped(name: &str) -> Line {
        Line::Check(Check { outcome: Outcome::Skipped, reason: "no device".into(), ..case(name, None, 1) })
    }

    #[test]
    fn a_required_check_that_is_skipped_fails_the_report() {
        let lines = vec![check("cpus"), skipped("cpus"), Line::Summary(2)];
        let faults = faults(POWER_OFF, lines, Ending::Exit(0));
        let report = faults.iter().find(|(name, _)| name == "report").unwrap();
        assert_eq!(report.1, "the guest skipped required checks: cpus: no device");
    }

    #[test]
    fn what_doctor_reports_is_no_case_unless_it_is_a_fault() {
        let failed = Line::Check(case("doctor.mtu", Some("a line without use".into()), 0));
        let lines = vec![check("cpus"), check("doctor.gid_table"), skipped("doctor.gpu_bar1"), failed];
        let lines = [lines, vec![Line::Summary(4)]].concat();
        let cases = judge(POWER_OFF, &Collected { lines, ending: Ending::Exit(0), millis: 1 });
        let names: Vec<_> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names, ["cpus", "doctor.mtu", "report", "ending"]);
    }

    #[test]
    fn a_report_without_its_end_fails_unless_the_guest_was_made_to_crash() {
        let crash = Expected { exit: 1, summary: false, ..POWER_OFF };
        assert_eq!(faults(POWER_OFF, vec![check("cpus")], Ending::Exit(0)).len(), 1);
        assert_eq!(faults(crash, vec![check("cpus")], Ending::Exit(1)), []);
    }

    #[test]
    fn a_summary_that_is_wrong_or_not_the_end_fails() {
        let wrong = vec![check("cpus"), Line::Summary(2)];
        assert_eq!(faults(POWER_OFF, wrong, Ending::Exit(0)).len(), 1);
        let after = vec![check("cpus"), Line::Summary(1), check("late")];
        assert_eq!(faults(POWER_OFF, after, Ending::Exit(0))[0].1, "the report goes on after its summary");
        let twice = vec![check("cpus"), Line::Summary(1), Line::Summary(1)];
        assert_eq!(faults(POWER_OFF, twice, Ending::Exit(0)).len(), 1);
    }

    #[test]
    fn another_exit_a_signal_and_a_deadline_fail() {
        for ending in [Ending::Exit(4), Ending::Signal(11), Ending::Deadline] {
            let faults = faults(POWER_OFF, vec![check("cpus"), Line::Summary(1)], ending);
            assert_eq!(faults.len(), 1, "{ending:?}");
            assert_eq!(faults[0].0, "ending");
        }
    }
}
