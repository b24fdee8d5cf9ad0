//! The command line: one file a subcommand, each with its `Args` and a `run` that returns the exit code.

mod facts;
mod plan;
mod progress;
mod run;
mod schema;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Chain, Report};

/// Launches Linux virtual machines whose NUMA nodes can be Extended GPU Memory
#[derive(Debug, Parser)]
#[command(name = "egm-vmm", version, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const HELP: &str = "\
One JSON file describes a machine. See where everything will be, then start it:

  egm-vmm plan configs/smoke.json
  egm-vmm run configs/smoke.json

Exit codes: 0 the guest powered off; 1 the guest failed; 2 the configuration is wrong; 3 the host lacks something;
4 a bug in egm-vmm";

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Facts(facts::Args),
    Plan(plan::Args),
    Schema(schema::Args),
}

/// How a subcommand ends.
type Outcome = Result<ExitCode, Box<dyn Report>>;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let outcome: Outcome = match &Cli::parse().command {
        Command::Run(args) => run::run(args),
        Command::Facts(args) => facts::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Schema(args) => Ok(schema::run(args)),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("{}", Chain(error.as_ref()));
        error.blame().into()
    })
}
