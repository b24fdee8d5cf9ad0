//! The command line: one file a subcommand, each with its `Args` and a `run` that returns the exit code.

mod broker;
mod carve;
mod export;
pub mod generate;
mod host;
mod html;
mod ledger;
mod log;
pub mod progress;
mod regions;
mod serve;
mod signals;
mod unretire;

use std::panic;
use std::process::{self, ExitCode};

use clap::{CommandFactory, Parser, Subcommand};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use egm_report::show::{print, written};
use egm_report::{Blame, Chain, Report};

/// Splits host memory into regions and slices for virtual machines, and records their owners
#[derive(Debug, Parser)]
#[command(name = "egm-device", version, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const HELP: &str = "\
See what this host has, split it once, and give slices away all day:

  egm-device regions
  egm-device carve advise --hypervisor 64GiB
  egm-device carve grant --region hidden --size 4GiB -- COMMAND
  egm-device ledger show

Exit codes: 0 done; 2 the command line or a file is wrong; 3 the host lacks something or forbids it, such as a
region, or memory that is not there or not free; 4 a bug in egm-device";

#[derive(Debug, Subcommand)]
enum Command {
    Regions(regions::Args),
    Carve(carve::Args),
    Broker(broker::Args),
    Serve(serve::Args),
    Ledger(ledger::Args),
    Log(log::Args),
    Export(export::Args),
    Completions(generate::Completions),
    Man(generate::Man),
}

/// Result of a subcommand.
pub type Outcome = Result<ExitCode, Box<dyn Report>>;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    forbid_core_dumps();
    end_on_panic(|| ());
    let outcome: Outcome = match &Cli::parse().command {
        Command::Regions(args) => regions::run(args),
        Command::Carve(args) => carve::run(args),
        Command::Broker(args) => broker::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Ledger(args) => ledger::run(args),
        Command::Log(args) => log::run(args),
        Command::Export(args) => export::run(args),
        Command::Completions(args) => Ok(generate::completions(args, Cli::command())),
        Command::Man(args) => generate::man(args, Cli::command()),
    };
    end(outcome)
}

/// Makes this process write no core file, and keeps debuggers of unprivileged users out: its memory is tenants' memory.
/// `/proc/self` is then root's, so an unprivileged process can write no file there, `uid_map` for instance. A program that
/// this one executes starts without the restriction.
pub fn forbid_core_dumps() {
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable); // mappings are out of core files all the same
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
        eprintln!("{}", Chain(error.as_ref()));
        error.blame().into()
    })
}

/// Writes `value` as JSON to standard output.
fn print_json(value: &impl serde::Serialize) {
    // Every map has string keys, so the value always has a JSON form.
    print(serde_json::to_string_pretty(value).unwrap_or_default() + "\n");
}
