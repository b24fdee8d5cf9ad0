//! The frame of a program: its ends, and the commands that describe its command line.

mod bash;
pub mod generate;
pub mod help;
pub mod log;

use std::panic;
use std::process::{self, ExitCode};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::show::{Screen, print, written};
use crate::{Blame, Chain, Report};

/// Result of a subcommand.
pub type Outcome = Result<ExitCode, Box<dyn Report>>;

/// Makes this process write no core file, and keeps debuggers of unprivileged users out: its memory is tenants' memory.
/// `/proc/self` is then root's, so an unprivileged process can write no file there, `uid_map` for instance. A program that
/// this one executes starts without the restriction.
pub fn forbid_core_dumps() {
    let is_dumped = egm_address::fault!("core-file-of-a-program");
    let behavior = if is_dumped { DumpableBehavior::Dumpable } else { DumpableBehavior::NotDumpable };
    let _ = set_dumpable_behavior(behavior); // mappings are out of core files all the same
}

/// From now on a panic on any thread ends the process with the exit code of an internal error, as other ends have
/// theirs. `first` runs before the panic is printed. Nothing is waited for.
pub fn end_on_panic(first: impl Fn() + Send + Sync + 'static) {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        first();
        print(info);
        process::exit(Blame::Internal as i32);
    }));
}

/// The exit code for the `outcome` of a subcommand; prints its error, or that its output did not all arrive.
pub fn end(outcome: Outcome) -> ExitCode {
    let outcome = outcome.and_then(|code| Ok(written().map(|()| code)?));
    outcome.unwrap_or_else(|error| {
        eprintln!("{}", Chain(error.as_ref()).on(Screen::of_stderr()));
        error.blame().into()
    })
}

/// Writes `value` as JSON to standard output.
pub fn print_json(value: &impl serde::Serialize) {
    // Every map has string keys, so the value always has a JSON form.
    print(serde_json::to_string_pretty(value).unwrap_or_default() + "\n");
}
