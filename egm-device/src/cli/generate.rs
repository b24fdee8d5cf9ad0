//! The subcommands `completions` and `man` of our programs: made from a command line's own description.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use crate::cli::Outcome;
use crate::report::{Blame, Report};
use crate::show::print;

/// Prints what a shell needs to complete this program's command lines
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// For which shell
    shell: Shell,
}

/// Prints a manual page (roff)
#[derive(Debug, clap::Args)]
pub struct Man {
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

/// What `args` ask of `program`.
pub fn completions(args: &Completions, mut program: Command) -> ExitCode {
    let mut text = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(args.shell, &mut program, name, &mut text);
    print(text);
    ExitCode::SUCCESS
}

/// What `args` ask of `program`.
///
/// # Errors
/// A folder that cannot be written to.
pub fn man(args: &Man, program: Command) -> Outcome {
    if let Some(folder) = &args.into {
        clap_mangen::generate_to(program, folder)
            .map_err(|source| ManError { folder: folder.clone(), source })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = program.clone();
    command.build();
    for name in args.command.iter().flat_map(|words| words.split_whitespace()) {
        match command.find_subcommand(name) {
            Some(found) => command = found.clone(),
            None => program
                .clone()
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
