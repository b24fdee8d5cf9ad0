//! Programs that refuse to start.

use std::process::Command;

use crate::engine::command::output;
use crate::engine::step::{Fault, Step};

/// The VMM's exit code when the host lacks something.
pub(crate) const HOST_LACKS: i32 = 3;

/// A machine refuses to start: it ends with exit code `exit`, and prints all of `words`.
pub(crate) fn refused(machine: &mut Command, exit: i32, words: &[&str]) -> Step {
    let output = output(machine)?;
    let said = String::from_utf8_lossy(&output.stderr);
    match words.iter().find(|word| !said.contains(**word)) {
        None if output.status.code() == Some(exit) => Ok(()),
        None => Err(Fault::Untrue(format!("{}, expected exit code {exit}: {said}", output.status))),
        Some(word) => Err(Fault::Untrue(format!("{}, and no \"{word}\" in: {said}", output.status))),
    }
}
