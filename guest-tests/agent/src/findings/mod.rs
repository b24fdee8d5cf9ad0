//! One result line of a guest check, as the agent writes it and the host reads it; and the results of
//! `egm-guest validate` with their figures ([`Verdict`], [`Figure`]).
//!
//! The line travels over a serial console that the guest's kernel writes to as well, and the guest may be hostile:
//! [`Line::parse`] accepts only lines that are certainly ours and ignores the rest. No code here does I/O.

mod chart;
mod compare;
mod figure;
mod group;
mod html;
mod junit;
mod matrix;
mod plot;
mod run;
mod series;
mod text;
mod verdict;

use std::fmt;

pub use chart::bars;
pub use compare::{Change, Comparison, Extreme, Ratio, Summary};
pub use figure::Figure;
pub use group::{Group, group_title, groups};
pub use html::html;
pub use junit::{Case, Suite, junit, junit_of};
pub use matrix::matrices;
pub use run::{Gpu, MAX_RUN, Machine, Node, RUN_VERSION, Run, RunError, Totals};
pub use text::{visible, wrapped};
pub use verdict::{MAX_FIGURES, MAX_VERDICT, Verdict};

use egm_report::show::Style;
use serde::{Deserialize, Serialize};

/// Prefix of every line.
pub const PREFIX: &str = "{\"egm-check\":";
/// Longest line that is read, in bytes.
pub const MAX_LINE: usize = 4096;
/// Most lines that are read from one guest.
pub const MAX_LINES: usize = 1024;

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The claim is true.
    Passed,
    /// The claim is untrue.
    Failed,
    /// This guest cannot decide the claim, for the check's reason. Not a pass.
    #[serde(alias = "waived")]
    Skipped,
    /// The check itself ended with an error.
    Error,
}

impl Outcome {
    /// Style of the word in a terminal.
    pub const fn style(self) -> Style {
        match self {
            Self::Passed => Style::Green,
            Self::Failed | Self::Error => Style::Red,
            Self::Skipped => Style::Yellow,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
            Self::Error => "error",
        })
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Check {
    /// Name of the check.
    #[serde(rename = "egm-check")]
    pub name: String,
    pub outcome: Outcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Unit of the figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Reason why it is not passed, or the observation.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Milliseconds that it took.
    #[serde(default)]
    pub millis: u64,
}

/// Name of the line that closes a report; its value is the number of checks before it.
pub const SUMMARY: &str = "summary";

/// A line of a console that is ours.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    /// The result of one check.
    Check(Check),
    /// The end of the report, with the number of checks that the agent claims to have run.
    Summary(usize),
}

impl Line {
    /// Parses one console line; `None` when it is not a report line.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim();
        if line.len() > MAX_LINE || !line.starts_with(PREFIX) {
            return None;
        }
        let check: Check = serde_json::from_str(line).ok()?;
        if check.name == SUMMARY {
            let count = check.value.filter(|v| v.fract() == 0.0 && (0.0..=MAX_LINES as f64).contains(v))?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a whole number in 0..=1024"
            )]
            return Some(Self::Summary(count as usize));
        }
        Some(Self::Check(check))
    }
}

impl Check {
    /// The line, without a newline; the reason is cut so that it stays within [`MAX_LINE`].
    pub fn to_line(&self) -> String {
        let mut check = self.clone();
        loop {
            let line = serde_json::to_string(&check).unwrap_or_default();
            if line.len() <= MAX_LINE || check.reason.is_empty() {
                return line;
            }
            let keep = check.reason.chars().count() / 2;
            check.reason = check.reason.chars().take(keep).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(reason: &str) -> Check {
        Check {
            name: "numa".into(),
            outcome: Outcome::Passed,
            value: Some(1.5),
            unit: Some("GiB/s".into()),
            reason: reason.into(),
            millis: 3,
        }
    }

    #[test]
    fn a_line_is_read_back_as_it_was_written() {
        let line = check("two \"nodes\"\n").to_line();
        assert!(line.starts_with(PREFIX) && !line.contains('\n'));
        assert_eq!(Line::parse(&line), Some(Line::Check(check("two \"nodes\"\n"))));
    }

    #[test]
    fn a_long_reason_is_cut_and_a_long_line_ignored() {
        assert!(check(&"ü".repeat(5000)).to_line().len() <= MAX_LINE);
        let padded = format!("{}{}", check("").to_line(), " ".repeat(10));
        assert!(Line::parse(&padded).is_some());
        let long = check("").to_line().replace("numa", &"x".repeat(MAX_LINE));
        assert_eq!(Line::parse(&long), None);
    }

    #[test]
    fn the_summary_is_a_count() {
        let line = |value: &str| format!("{PREFIX}\"summary\",\"outcome\":\"passed\",\"value\":{value}}}");
        assert_eq!(Line::parse(&line("12.0")), Some(Line::Summary(12)));
        assert_eq!(Line::parse(&line("-1.0")), None);
        assert_eq!(Line::parse(&line("1e300")), None);
    }

    proptest! {
        #[test]
        fn any_console_text_is_a_line_or_nothing(text in "\\PC{0,80}") {
            let _ = Line::parse(&text);
            let _ = Line::parse(&format!("{PREFIX}{text}"));
        }
    }
}
