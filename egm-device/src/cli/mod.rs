//! The command line: one file a subcommand, each with its `Args` and a `run` that returns the exit code.

mod access;
mod broker;
mod carve;
mod html;
mod ledger;
mod log;
mod regions;
mod schema;
mod serve;
mod signals;
mod tables;
mod unretire;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use egm_report::program::log::Log;
use egm_report::program::{Outcome, end, end_on_panic, forbid_core_dumps, generate, help};

/// Split host memory into regions and slices for virtual machines, and record their owners
#[derive(Debug, Parser)]
#[command(name = "egm-device", version, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: Log,
}

const HELP: &str = "\
Show the memory of this host, split it once, then grant slices:

  egm-device regions
  egm-device carve advise --hypervisor 64GiB
  egm-device carve grant --region egm4 --size 4GiB -- COMMAND
  egm-device ledger show

Exit codes:

  0  done
  2  the command line or a file is wrong
  3  the host lacks something or forbids it, such as a region or free memory
  4  a bug in egm-device";

#[derive(Debug, Subcommand)]
enum Command {
    Regions(regions::Args),
    Carve(carve::Args),
    Broker(broker::Args),
    Serve(serve::Args),
    Ledger(ledger::Args),
    Log(log::Args),
    Schema(schema::Args),
    Completions(generate::Completions),
    Man(generate::Man),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    forbid_core_dumps();
    end_on_panic(|| ());
    let cli: Cli = help::parse();
    cli.log.start();
    let outcome: Outcome = match &cli.command {
        Command::Regions(args) => regions::run(args),
        Command::Carve(args) => carve::run(args),
        Command::Broker(args) => broker::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Ledger(args) => ledger::run(args),
        Command::Log(args) => log::run(args),
        Command::Schema(args) => Ok(schema::run(args)),
        Command::Completions(args) => Ok(generate::completions(args, Cli::command())),
        Command::Man(args) => generate::man(args, Cli::command()),
    };
    end(outcome)
}
