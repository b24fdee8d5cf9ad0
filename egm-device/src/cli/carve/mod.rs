//! `egm-device carve`: splitting the host, and taking slices; one file a subcommand.

mod advise;
mod free;
mod grant;
mod hold;
mod slices;
mod verify;

use clap::Subcommand;

use egm_report::program::Outcome;

/// Split the host's memory and take slices of it
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Advise(advise::Args),
    Free(free::Args),
    Grant(grant::Args),
    #[command(hide = true)]
    Hold(hold::Args),
    Verify(verify::Args),
    Plan(slices::PlanArgs),
    Return(slices::ReturnArgs),
    Scrub(slices::ScrubArgs),
}

pub(super) fn run(args: &Args) -> Outcome {
    match &args.command {
        Command::Advise(args) => advise::run(args),
        Command::Free(args) => free::run(args),
        Command::Grant(args) => grant::run(args),
        Command::Hold(args) => hold::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Plan(args) => slices::plan(args),
        Command::Return(args) => slices::return_slice(args),
        Command::Scrub(args) => slices::scrub(args),
    }
}
