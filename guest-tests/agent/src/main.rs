//! `egm-guest`: shows from inside a guest that it matches its plan.
//!
//! As process 1 of an initramfs it sets the system up, runs the checks that the kernel command line names, prints
//! one JSON line a check on the console and ends the machine ([`init`]). As an ordinary program it lists and runs
//! the same checks. Each check is a process of its own ([`run`]), so that one that aborts, hangs or is killed for
//! memory costs its own result and no other.

mod acpi;
mod answer;
mod calendar;
mod checks;
mod cmdline;
mod compare;
mod config_space;
mod doctor;
mod egm_function;
mod error;
mod expect;
mod finding;
mod init;
mod kernel;
mod library;
mod machine;
mod memory;
mod net;
mod output;
mod pattern;
mod ports;
mod run;
mod rxe;
mod smbios;
mod sys;
mod sysfs;
mod tree;
mod validate;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use egm_address::PciAddress;
use egm_report::program;
use egm_report::program::generate::{self, Completions, Man};
use egm_report::show::{Screen, hanging};

use crate::error::Broken;

/// Where the initramfs has the plan.
const PLAN: &str = "/egm/plan.json";

/// Check and measure, inside a guest, the memory and devices of its plan.
#[derive(Debug, Parser)]
#[command(name = "egm-guest", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List EGM memory that this machine has as a PCI function.
    List {
        /// Print JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Overwrite EGM memory of PCI functions, read it back, and print the speed.
    Test {
        /// PCI functions [default: all that "list" prints].
        functions: Vec<PciAddress>,
        /// Confirm that the contents of the memory may be lost.
        #[arg(long, required = true)]
        overwrite: bool,
    },
    /// Validate and measure memory, CUDA and RDMA of this machine, without a plan.
    Validate(validate::Options),
    /// Show a run of "validate --json" as a table, JUnit XML or a page.
    Report(validate::Again),
    /// Compare two runs of "validate --json", with ratios.
    Compare(compare::Options),
    /// List what this machine has and lacks for GPUDirect and EGM, with remedies.
    Doctor(doctor::Options),
    /// Query a vendor's library, in this process.
    #[command(hide = true)]
    Probe {
        /// Vendor's library to query.
        probe: doctor::Probe,
    },
    /// Run one validation in this process and print its verdict.
    #[command(hide = true)]
    Validation(validate::Given),
    /// Run a helper process of a validation.
    #[command(hide = true)]
    Part {
        /// Name of the helper, such as nvshmem.pe.
        name: String,
        /// Arguments, which it receives unchanged.
        #[arg(allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// List the checks and the claim of each.
    Checks,
    /// Run checks of the plan and print a table.
    Run {
        /// Checks, each of which must pass; "all" runs those that need no name and lets them skip [default: all].
        names: Vec<String>,
        /// Print one JSON line per check instead of a table.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        with: With,
    },
    Completions(Completions),
    Man(Man),
    /// Run one check in this process and print its line.
    #[command(hide = true)]
    Check {
        /// Name of the check, as "checks" lists it.
        name: String,
        #[command(flatten)]
        with: With,
    },
}

/// The plan and the arguments of checks.
#[derive(Debug, Clone, Args)]
struct With {
    /// Output of "egm-vmm plan --json" for this guest.
    #[arg(long, default_value = PLAN)]
    plan: PathBuf,
    /// Argument of a check, like egm.arg.KEY=VALUE on the kernel command line.
    #[arg(long = "arg", value_name = "KEY=VALUE")]
    args: Vec<String>,
}

impl With {
    fn context(&self) -> Result<checks::Context, Broken> {
        let args = cmdline::Arguments::from_pairs(&self.args)?;
        Ok(checks::Context { plan: expect::Plan::read(&self.plan)?, args })
    }
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::main();
    }
    match program::help::parse::<Cli>().command {
        Command::List { json } => memory::list(json),
        Command::Test { functions, overwrite: _ } => memory::test(&functions),
        Command::Validate(options) => validate::main(&options),
        Command::Report(again) => validate::again(&again),
        Command::Compare(options) => compare::main(&options),
        Command::Doctor(options) => doctor::main(&options),
        Command::Probe { probe } => doctor::probe_in_this_process(probe),
        Command::Validation(given) => validate::validation_in_this_process(&given),
        Command::Part { name, words } => validate::part_in_this_process(&name, &words),
        Command::Checks => {
            let note = |check: &checks::Check| if check.by_name_only { " (only by name)" } else { "" };
            let screen = Screen::of_stdout();
            let line = |check: &checks::Check| {
                let claim = format!("{}{}", check.claim, note(check));
                format!("{:<14} {}\n", check.name, hanging(&claim, 15, screen))
            };
            output::printed(&checks::ALL.iter().map(line).collect::<String>())
        }
        Command::Completions(args) => generate::completions(&args, Cli::command()),
        Command::Man(args) => program::end(generate::man(&args, Cli::command())),
        Command::Run { names, json, with } => run::for_a_person(&names, &with, json),
        Command::Check { name, with } => run::in_this_process(&name, &with),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
