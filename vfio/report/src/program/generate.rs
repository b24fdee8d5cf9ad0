//! The subcommands `completions` and `man` of our programs: made from a command line's own description.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use crate::program::{Outcome, bash, help};
use crate::show::print;
use crate::{Blame, Remedy, Report};

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// Shell that reads the script
    shell: Shell,
}

/// Print the manual page (roff) of this program or of a subcommand
#[derive(Debug, clap::Args)]
pub struct Man {
    /// Subcommand of the page, such as "carve advise" [default: this program]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Write the pages of this program and all subcommands into FOLDER, which is created if missing
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
    fn remedy(&self) -> Remedy {
        Blame::Host.into()
    }
}

/// Runs `args` for `program`.
pub fn completions(args: &Completions, mut program: Command) -> ExitCode {
    if args.shell == Shell::Bash {
        print(bash::script(&mut program));
        return ExitCode::SUCCESS;
    }
    let mut text = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(args.shell, &mut program, name, &mut text);
    print(text);
    ExitCode::SUCCESS
}

/// Runs `args` for `program`.
///
/// # Errors
/// A folder that cannot be written to.
pub fn man(args: &Man, program: Command) -> Outcome {
    if let Some(folder) = &args.into {
        pages(&program, folder).map_err(|source| ManError { folder: folder.clone(), source })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = built(&program);
    for name in args.command.iter().flat_map(|words| words.split_whitespace()) {
        match command.find_subcommand(name) {
            Some(found) => command = found.clone(),
            None => {
                let reason = format!("there is no command '{name}'");
                help::exit(&program.clone().error(clap::error::ErrorKind::InvalidSubcommand, reason))
            }
        }
    }
    print(text(&page(command, &program)));
    Ok(ExitCode::SUCCESS)
}

/// `program` with the names that its subcommands have as pages, `PROGRAM-COMMAND`.
fn built(program: &Command) -> Command {
    let mut command = program.clone().disable_help_subcommand(true);
    command.build();
    command
}

/// The page of `command`, with the version of `program`.
fn page(command: Command, program: &Command) -> clap_mangen::Man {
    let version = program.get_version().unwrap_or_default();
    clap_mangen::Man::new(command).source(format!("{} {version}", program.get_name()))
}

/// Writes the pages of `program` and all of its commands into `folder`, which is made.
fn pages(program: &Command, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut left = vec![built(program)];
    while let Some(command) = left.pop() {
        left.extend(command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned());
        let page = page(command, program);
        fs::write(folder.join(page.get_filename()), text(&page))?;
    }
    Ok(())
}

/// The text of `page`. What follows the options is filled like a paragraph, but its examples, which are indented, are lines.
fn text(page: &clap_mangen::Man) -> String {
    let mut rendered = Vec::new();
    // Writing to memory does not fail.
    let _ = page.render(&mut rendered);
    let (mut out, mut after, mut verbatim) = (String::new(), false, false);
    for line in String::from_utf8_lossy(&rendered).lines() {
        if line.starts_with(".SH") {
            after = line == ".SH EXTRA";
        }
        let example = after && line.starts_with(' ');
        if example != verbatim {
            out.push_str(if example { ".nf\n" } else { ".fi\n" });
            verbatim = example;
        }
        out.push_str(if line == ".SH EXTRA" { ".SH NOTES" } else { line });
        out.push('\n');
    }
    if verbatim { out + ".fi\n" } else { out }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "\
Example: two lines
of a paragraph

  program --flag 'a  b'
  program

The end.

  last";

    #[test]
    fn examples_are_lines_and_paragraphs_are_filled() {
        let text =
            text(&page(Command::new("program").version("1").after_help(HELP), &Command::new("program")));
        let notes = text.split_once(".SH NOTES\n").unwrap().1.split_once(".SH VERSION").unwrap().0;
        let expected = [
            "Example: two lines\nof a paragraph\n\n",
            ".nf\n  program \\-\\-flag \\*(Aqa  b\\*(Aq\n  program\n.fi\n",
            "\nThe end.\n\n",
            ".nf\n  last\n.fi\n",
        ];
        assert_eq!(notes, expected.concat());
        assert!(!text.contains("EXTRA"), "{text}");
    }
}
