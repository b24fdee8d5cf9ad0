//! `egm-vmm schema`: what the files of this program may have in them, for editors and checkers.

use std::process::ExitCode;

use clap::ValueEnum;
use egm_report::show::print;

use crate::{config, facts};

/// Print the JSON Schema of configurations, or of recorded facts
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Files to describe: configurations of machines, or facts of hosts
    #[arg(value_name = "FILES", value_enum, default_value_t = Files::Machine)]
    files: Files,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Files {
    Machine,
    Facts,
}

pub(super) fn run(args: &Args) -> ExitCode {
    match args.files {
        Files::Machine => print(config::schema()),
        Files::Facts => print(facts::SCHEMA),
    }
    ExitCode::SUCCESS
}
