//! Claim: `egm-guest validate`, called as a person calls it, finds nothing wrong with this guest, and `egm-guest
//! doctor` prints something. The arguments `validate.select` and `validate.size` set the groups and the memory.

use std::process::Command;
use std::time::Duration;

use egm_guest::findings::{MAX_RUN, Outcome, Run};
use serde_json::Value;

use crate::answer::answer_of;
use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::finding::{Claim, Finding};

/// Time limit of all validations; less than that of this check.
const TIMEOUT: Duration = Duration::from_secs(550);
/// Validations that run unless the argument `validate.select` names others: they need no GPU and no network.
const SELECT: &str = "memory,numa,pci";
const SIZE: &str = "1MiB";

pub(super) fn run(args: &Arguments) -> Result<Finding, Broken> {
    let select = args.text("validate.select").unwrap_or(SELECT);
    let size = args.text("validate.size").unwrap_or(SIZE);
    let words = ["validate", "--json", "--select", select, "--size", size];
    let mut claim = Claim::default();
    match output_of(&words).and_then(|text| Run::parse(&text).map_err(|error| error.to_string())) {
        Err(why) => claim.untrue(format!("validate {why}")),
        Ok(run) => judge(&mut claim, &run),
    }
    match output_of(&["doctor", "--json"]).map(|text| serde_json::from_slice::<Vec<Value>>(&text)) {
        Ok(Ok(lines)) if !lines.is_empty() => {
            let lacking = lines.iter().filter(|line| line["state"] == "lacks").count();
            claim.seen(format!("doctor: {} lines, {lacking} lacking", lines.len()));
        }
        other => claim.untrue(format!("doctor gave no lines: {other:?}")),
    }
    Ok(claim.finish())
}

/// Output of this program, called with `words`.
fn output_of(words: &[&str]) -> Result<Vec<u8>, String> {
    let mut command = Command::new("/proc/self/exe");
    command.args(words);
    answer_of(command, TIMEOUT, MAX_RUN, &mut |_| {})
}

fn judge(claim: &mut Claim, run: &Run) {
    let mut skipped = Vec::new();
    for verdict in &run.verdicts {
        match verdict.outcome {
            Outcome::Failed | Outcome::Error => claim.untrue(format!("{}: {}", verdict.name, verdict.reason)),
            Outcome::Skipped => skipped.push(verdict.name.as_str()),
            Outcome::Passed => match (verdict.value, &verdict.unit) {
                (Some(value), Some(unit)) => claim.seen(format!("{} {value:.3} {unit}", verdict.name)),
                _ => claim.seen(&verdict.name),
            },
        }
    }
    claim.holds(run.totals().passed > 0, || "nothing passed");
    if !skipped.is_empty() {
        claim.seen(format!("skipped: {}", skipped.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::{Machine, RUN_VERSION};

    use super::*;

    fn judged(findings: Vec<(&str, Finding)>) -> Finding {
        let verdicts =
            findings.into_iter().map(|(name, finding)| finding.into_verdict(name, "", 1)).collect();
        let (date, program) = (String::new(), String::new());
        let run = Run {
            version: RUN_VERSION,
            date,
            program,
            seed: 1,
            most: 1,
            args: Vec::new(),
            machine: Machine::default(),
            verdicts,
        };
        let mut claim = Claim::default();
        judge(&mut claim, &run);
        claim.finish()
    }

    #[test]
    fn what_passed_and_what_is_skipped_is_named_and_a_failure_fails() {
        let good = || ("memory.egm", Finding::passed("x").with_value(0.5, "of ordinary"));
        let all = judged(vec![good(), ("pci.links", Finding::skipped("y"))]);
        assert_eq!(
            (all.outcome, &*all.reason),
            (Outcome::Passed, "memory.egm 0.500 of ordinary; skipped: pci.links")
        );
        assert_eq!(judged(vec![good(), ("numa.hmat", Finding::error("z"))]).reason, "numa.hmat: z");
        assert_eq!(
            judged(vec![("pci.links", Finding::skipped("y"))]).outcome,
            Outcome::Failed,
            "nothing was shown"
        );
    }
}
