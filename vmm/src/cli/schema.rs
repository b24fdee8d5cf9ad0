//! `egm-vmm schema`: what a configuration file may say, for editors and checkers.

use std::process::ExitCode;

use egm_report::show::print;

use crate::config;

/// Print the JSON Schema of configuration files
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn run(_args: &Args) -> ExitCode {
    print(config::schema());
    ExitCode::SUCCESS
}
