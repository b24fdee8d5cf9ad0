//! `egm-device completions` and `egm-device man`: made from the command line's own description.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::{Cli, Outcome, print};
use crate::report::{Blame, Report};

/// Prints what a shell needs to complete this program's command lines
#[derive(Debug, clap::Args)]
pub(super) struct Completions {
    /// For which shell
    shell: Shell,
}

/// Prints a manual page (roff)
#[derive(Debug, clap::Args)]
pub(super) struct Man {
    /// Of this subcommand, for instance "carve advise"; the default is the program
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Write the pages of all commands into this folder instead
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    into: Option<PathBuf>,
}

/// A page cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write manual pages into {}", folder.display())]
struct ManError {
    folder: PathBuf,
    source: io::Error,
}

impl Report for ManError {
    fn blame(&self) -> Blame {
        Blame::Host
    }
}

pub(super) fn completions(args: &Completions) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "egm-device", &mut text);
    print(text);
    ExitCode::SUCCESS
}

pub(super) fn man(args: &Man) -> Outcome {
    if let Some(folder) = &args.into {
        clap_mangen::generate_to(Cli::command(), folder)
            .map_err(|source| ManError { folder: folder.clone(), source })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = Cli::command();
    command.build();
    for name in args.command.iter().flat_map(|words| words.split_whitespace()) {
        match command.find_subcommand(name) {
            Some(found) => command = found.clone(),
            None => Cli::command()
                .error(clap::error::ErrorKind::InvalidSubcommand, format!("there is no command '{name}'"))
                .exit(),
        }
    }
    let mut text = Vec::new();
    // Writing to memory does not fail.
    let _ = clap_mangen::Man::new(command).render(&mut text);
    print(text);
    Ok(ExitCode::SUCCESS)
}
