//! Result of a check.

use std::fmt::{Debug, Display};

use egm_guest::findings::{Check, Figure, Outcome, Verdict};

use crate::error::Broken;

/// Most differences that a reason spells out.
const SHOWN: usize = 6;

/// The result of a check, before it has a name and a duration.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Finding {
    pub(crate) outcome: Outcome,
    value: Option<(f64, &'static str)>,
    figures: Vec<Figure>,
    pub(crate) reason: String,
}

impl Finding {
    /// The claim is true; `seen` is what was seen.
    pub(crate) fn passed(seen: impl Into<String>) -> Self {
        Self { outcome: Outcome::Passed, value: None, figures: Vec::new(), reason: seen.into() }
    }

    /// The claim is untrue, for `reason`.
    pub(crate) fn failed(reason: impl Into<String>) -> Self {
        Self { outcome: Outcome::Failed, value: None, figures: Vec::new(), reason: reason.into() }
    }

    /// This guest cannot decide the claim, for `reason`.
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self { outcome: Outcome::Skipped, value: None, figures: Vec::new(), reason: reason.into() }
    }

    /// The check broke, for `reason`.
    pub(crate) fn error(reason: impl Into<String>) -> Self {
        Self { outcome: Outcome::Error, value: None, figures: Vec::new(), reason: reason.into() }
    }

    /// Adds a measured figure.
    #[must_use]
    pub(crate) fn with_value(mut self, value: f64, unit: &'static str) -> Self {
        self.value = Some((value, unit));
        self
    }

    /// Adds measured figures, to those that are there.
    #[must_use]
    pub(crate) fn with_figures(mut self, figures: Vec<Figure>) -> Self {
        self.figures.extend(figures);
        self
    }

    /// The finding, turned into a failure if it passed with an impossible figure.
    #[must_use]
    pub(crate) fn without_nonsense(mut self) -> Self {
        let nonsense: Vec<String> = self.figures.iter().filter_map(Figure::nonsense).take(SHOWN).collect();
        if self.outcome == Outcome::Passed && !nonsense.is_empty() {
            self.outcome = Outcome::Failed;
            self.reason = nonsense.join("; ");
        }
        self
    }

    /// The figures that it has.
    pub(crate) fn figures(&self) -> &[Figure] {
        &self.figures
    }

    /// As a verdict of a validation.
    pub(crate) fn into_verdict(self, name: &str, claim: &str, seed: u64) -> Verdict {
        let Self { outcome, value, figures, reason } = self;
        Verdict {
            name: name.to_owned(),
            claim: claim.to_owned(),
            outcome,
            reason,
            value: value.map(|(figure, _)| figure),
            unit: value.map(|(_, unit)| unit.to_owned()),
            figures,
            seed,
            millis: 0,
        }
    }

    /// As a line of the report, which has no room for figures.
    pub(crate) fn into_check(self, name: &str, millis: u64) -> Check {
        let Self { outcome, value, figures: _, reason } = self;
        Check {
            name: name.to_owned(),
            outcome,
            value: value.map(|(figure, _)| figure),
            unit: value.map(|(_, unit)| unit.to_owned()),
            reason,
            millis,
        }
    }
}

impl From<Broken> for Finding {
    fn from(broken: Broken) -> Self {
        Self::error(broken.to_string())
    }
}

/// Collects what is untrue about one claim, so that a report names every difference and not only the first.
#[derive(Debug, Default)]
pub(crate) struct Claim {
    untrue: Vec<String>,
    seen: Vec<String>,
}

impl Claim {
    /// Requires that `is` equals `planned`.
    pub(crate) fn equal<T: PartialEq + Debug>(&mut self, what: impl Display, is: &T, planned: &T) {
        if is != planned {
            self.untrue.push(format!("{what} is {is:?}, planned {planned:?}"));
        }
    }

    /// Requires `truth`; `otherwise` describes what is wrong.
    pub(crate) fn holds<S: Into<String>>(&mut self, truth: bool, otherwise: impl FnOnce() -> S) {
        if !truth {
            self.untrue.push(otherwise().into());
        }
    }

    /// Records that something is untrue.
    pub(crate) fn untrue(&mut self, what: impl Into<String>) {
        self.untrue.push(what.into());
    }

    /// Notes what was seen.
    pub(crate) fn seen(&mut self, what: impl Into<String>) {
        self.seen.push(what.into());
    }

    /// Whether nothing was untrue so far.
    pub(crate) fn is_true(&self) -> bool {
        self.untrue.is_empty()
    }

    /// Passed when nothing was untrue.
    pub(crate) fn finish(self) -> Finding {
        if self.is_true() {
            return Finding {
                outcome: Outcome::Passed,
                value: None,
                figures: Vec::new(),
                reason: self.seen.join("; "),
            };
        }
        let more = self.untrue.len().saturating_sub(SHOWN);
        let mut shown: Vec<String> = self.untrue.into_iter().take(SHOWN).collect();
        if more > 0 {
            shown.push(format!("and {more} more"));
        }
        Finding::failed(shown.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_without_a_difference_passes_and_states_what_was_seen() {
        let mut claim = Claim::default();
        claim.equal("count", &2, &2);
        claim.seen("2 vCPUs");
        let check = claim.finish().with_value(2.0, "vCPUs").into_check("cpus", 7);
        assert_eq!((check.outcome, check.reason.as_str()), (Outcome::Passed, "2 vCPUs"));
        assert_eq!((check.value, check.unit.as_deref(), check.millis), (Some(2.0), Some("vCPUs"), 7));
    }

    #[test]
    fn a_figure_that_cannot_be_fails_what_passed() {
        let with = |round: f64| {
            let figure = Figure::of("copy", Some(8), "GB/s", &mut [round]);
            Claim::default().finish().with_figures(vec![figure]).without_nonsense()
        };
        assert_eq!(with(50.0).outcome, Outcome::Passed);
        assert_eq!(with(-50.0).outcome, Outcome::Failed);
        assert!(with(f64::INFINITY).reason.contains("copy"), "{}", with(f64::INFINITY).reason);
        assert_eq!(Finding::skipped("why").without_nonsense().outcome, Outcome::Skipped);
    }

    #[test]
    fn every_difference_is_named_up_to_a_limit() {
        let mut claim = Claim::default();
        for cpu in 0..10 {
            claim.equal(format!("node of CPU {cpu}"), &1, &0);
        }
        let finding = claim.finish();
        assert_eq!(finding.outcome, Outcome::Failed);
        assert!(finding.reason.starts_with("node of CPU 0 is 1, planned 0; "));
        assert!(finding.reason.ends_with("and 4 more"));
    }
}
