//! A step of a scenario and its result.

use std::time::{Duration, Instant};

use egm_guest::findings::{Check, Outcome};

use crate::engine::judge::case;

/// Longest wait for an event that a guest or a program must cause, under emulation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Result of a step: success, a fault, or the reason why it cannot be decided.
pub(crate) type Step = Result<(), Fault>;

/// Reason why a step did not pass.
pub(crate) enum Fault {
    /// The claim that is untrue.
    Untrue(String),
    /// The reason why the step cannot be decided.
    Undecided(&'static str),
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

/// Milliseconds since `begun`.
pub(crate) fn millis(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}
