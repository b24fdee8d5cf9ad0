//! A run as a person reads it in a terminal.

use std::io::{self, IsTerminal};

use egm_report::{Comparison, Outcome, Run, Verdict, visible};

use super::cli::is_good;

/// Whether words may be coloured: standard output is a terminal that knows colours, and nobody minds (`NO_COLOR`).
pub(super) fn colours(to_file: bool) -> bool {
    let minds = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    !to_file && !minds && !is_dumb && io::stdout().is_terminal()
}

/// The table, bars of the figures, what is different from a run before, and the totals.
pub(super) fn table(run: &Run, before: Option<&Comparison>, colours: bool) -> String {
    let mut text = String::new();
    for verdict in &run.verdicts {
        text.push_str(&row(verdict, colours));
        if !is_good(verdict.outcome) && verdict.name != "baseline.least" {
            text.push_str(&format!(
                "  again: egm-guest validate --select {} --seed {} --size {}\n",
                visible(&verdict.name),
                run.seed,
                run.most
            ));
        }
    }
    let bars = egm_report::bars(run, before);
    if !bars.is_empty() {
        text.push('\n');
        text.push_str(&bars);
    }
    if let Some(before) = before {
        text.push_str(&different(before));
    }
    text.push_str(&format!("\n{}; seed {}\n", run.totals(), run.seed));
    text
}

/// Outcomes, and what is in one run only; ratios are beside the bars.
fn different(before: &Comparison) -> String {
    let mut lines = vec![String::new()];
    for change in &before.changed {
        lines.push(format!("{} was {} before", visible(&change.name), change.first));
    }
    for (when, list) in [("before", &before.only_first), ("now", &before.only_second)] {
        match list.as_slice() {
            [] => {}
            [first] => lines.push(format!("only {when}: {first}")),
            [first, rest @ ..] => lines.push(format!("only {when}: {first}, and {} more", rest.len())),
        }
    }
    if let [worst, ..] = before.below(1.0).as_slice() {
        lines.push(format!("worst against before: {}, {:.3}", worst.what(), worst.ratio));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn row(verdict: &Verdict, colours: bool) -> String {
    let value = verdict.value.map_or_else(String::new, |value| {
        format!("{value:.2} {}", visible(verdict.unit.as_deref().unwrap_or_default()))
    });
    let outcome = format!("{:<7}", verdict.outcome);
    let outcome =
        if colours { format!("\x1b[{}m{outcome}\x1b[0m", colour(verdict.outcome)) } else { outcome };
    let (name, reason) = (visible(&verdict.name), visible(&verdict.reason));
    let row = format!("{name:<28} {outcome} {value:>14}  {reason}");
    format!("{}\n", row.trim_end())
}

const fn colour(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Passed => 32,
        Outcome::Failed | Outcome::Error => 31,
        Outcome::Waived => 33,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Finding;

    #[test]
    fn a_row_has_no_escapes_but_our_colours() {
        let verdict = Finding::error("a\u{1b}[2Jb").into_verdict("memory.pattern", "", 1);
        assert_eq!(
            row(&verdict, false),
            "memory.pattern               error                   a\u{fffd}[2Jb\n"
        );
        assert!(row(&verdict, true).contains("\u{1b}[31merror  \u{1b}[0m"));
    }
}
