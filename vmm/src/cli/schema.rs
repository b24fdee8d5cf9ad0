//! `egm-vmm schema`: what a configuration file may say, for editors and checkers.

use std::io::{self, Write};
use std::process::ExitCode;

use crate::config;

/// Prints the JSON Schema of configuration files
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn run(_args: &Args) -> ExitCode {
    // A reader that has seen enough (`| head`) closes the pipe: that is no failure of ours.
    let _ = io::stdout().write_all(config::schema().as_bytes());
    ExitCode::SUCCESS
}
