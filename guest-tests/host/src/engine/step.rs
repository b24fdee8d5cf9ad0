//! A step of a scenario and its result.

use std::thread;
use std::time::{Duration, Instant};

use egm_guest::findings::{Check, Outcome};

use crate::engine::error::LabError;
use crate::engine::judge::case;

/// Longest wait for an event that a guest or a program must cause, under emulation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Pause between two tries of [`eventually`].
const PAUSE: Duration = Duration::from_millis(20);

/// Result of a step: success, a fault, or the reason why it cannot be decided.
pub(crate) type Step = Result<(), Fault>;

/// Reason why a step did not pass.
pub(crate) enum Fault {
    /// The claim that is untrue.
    Untrue(String),
    /// The reason why the step cannot be decided.
    Undecided(&'static str),
}

impl Fault {
    fn reason(self) -> String {
        match self {
            Self::Untrue(reason) => reason,
            Self::Undecided(reason) => reason.to_owned(),
        }
    }

    /// The fault as an error of `what` in the lab.
    pub(crate) fn of_lab(self, what: &str) -> LabError {
        LabError::Content { what: what.to_owned(), problem: self.reason() }
    }
}

impl<E: std::fmt::Display> From<E> for Fault {
    fn from(error: E) -> Self {
        Self::Untrue(error.to_string())
    }
}

/// The case of a step, with its time.
pub(crate) fn timed(name: &str, step: impl FnOnce() -> Step) -> Check {
    let begun = Instant::now();
    let step = step();
    let millis = millis(begun);
    match step {
        Ok(()) => case(name, None, millis),
        Err(Fault::Untrue(fault)) => case(name, Some(fault), millis),
        Err(Fault::Undecided(why)) => {
            Check { outcome: Outcome::Skipped, reason: why.to_owned(), ..case(name, None, millis) }
        }
    }
}

/// Repeats `step` until it passes, for `limit` at most; then its last fault counts.
pub(crate) fn eventually(limit: Duration, mut step: impl FnMut() -> Step) -> Step {
    let begun = Instant::now();
    loop {
        match step() {
            Err(Fault::Untrue(_)) if begun.elapsed() <= limit => thread::park_timeout(PAUSE),
            result => return result,
        }
    }
}

pub(crate) fn millis(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_step_ends_when_it_passes_or_cannot_be_decided_and_else_with_its_last_fault() {
        let long = Duration::from_secs(600);
        let mut looks = 0;
        let third = eventually(long, || {
            looks += 1;
            if looks < 3 { Err("not yet".into()) } else { Ok(()) }
        });
        assert!(third.is_ok() && looks == 3, "{looks}");
        assert!(matches!(eventually(long, || Err(Fault::Undecided("why"))), Err(Fault::Undecided("why"))));
        let late = eventually(Duration::ZERO, || Err("never".into()));
        assert!(matches!(late, Err(Fault::Untrue(fault)) if fault == "never"));
    }
}
