//! A step of a scenario and its result.

use std::time::Instant;

use egm_guest::findings::{Check, Outcome};

use crate::judge::case;
use crate::run::millis;

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
