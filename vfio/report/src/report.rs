//! Remedies of errors, and their printed form.

use std::error::Error;
use std::fmt::{self, Write};
use std::process::ExitCode;

use crate::show::Screen;

/// The party that must act; the discriminant is the process's exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Blame {
    /// The guest failed: panic, triple fault, unrequested reset.
    Guest = 1,
    /// The configuration or the command line is wrong.
    Configuration = 2,
    /// The host lacks a resource or denies the operation.
    Host = 3,
    /// A bug of this program.
    Internal = 4,
}

impl Blame {
    /// The party with `help`: one command or one change, without "help:" in front.
    #[must_use]
    pub fn help(self, help: impl Into<String>) -> Remedy {
        Remedy { blame: self, help: Some(help.into()) }
    }
}

impl From<Blame> for ExitCode {
    fn from(blame: Blame) -> Self {
        Self::from(blame as u8)
    }
}

/// What ends an error: the party that must act, and its action where one is known.
///
/// ```
/// # use egm_report::{Blame, Remedy};
/// let pool: Remedy = Blame::Host.help("sysctl vm.nr_hugepages=2");
/// let unknown: Remedy = Blame::Internal.into();
/// # assert!(pool.help.is_some() && unknown.help.is_none());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// The party that must act.
    pub blame: Blame,
    /// The action, without "help:" in front.
    pub help: Option<String>,
}

impl From<Blame> for Remedy {
    fn from(blame: Blame) -> Self {
        Self { blame, help: None }
    }
}

/// An error for people, with its remedy.
pub trait Report: Error {
    /// The party that must act, and the action.
    fn remedy(&self) -> Remedy;

    /// The party of the [`remedy`](Self::remedy).
    fn blame(&self) -> Blame {
        self.remedy().blame
    }

    /// The action of the [`remedy`](Self::remedy).
    fn help(&self) -> Option<String> {
        self.remedy().help
    }

    /// The line of a file that the error is about, with a mark under the place ([`excerpt`](crate::excerpt())).
    fn excerpt(&self) -> Option<String> {
        None
    }

    /// Further errors, independent of this one and found with it.
    fn others(&self) -> Vec<&dyn Report> {
        Vec::new()
    }
}

impl<E: Report + 'static> From<E> for Box<dyn Report> {
    fn from(error: E) -> Self {
        Box::new(error)
    }
}

/// Shows an error, its place in a file, the chain of its sources and its help, each on lines of its own; then the others
/// that were found with it.
///
/// Some of this text is untrusted: parts of a configuration, file names, output of the guest. So each line has a length
/// limit, and control characters, which a terminal would obey, are shown as Rust writes them.
#[derive(Debug)]
pub struct Chain<'a>(pub &'a dyn Report);

impl Chain<'_> {
    /// All of it on one line, for a log.
    #[must_use]
    pub fn one_line(&self) -> String {
        self.to_string().lines().map(str::trim).collect::<Vec<_>>().join("; ")
    }

    /// The lines as `screen` shows them, with colour where it has any.
    #[must_use]
    pub fn on(&self, screen: Screen) -> String {
        self.to_string().lines().map(|line| screen.message(line)).collect::<Vec<_>>().join("\n")
    }
}

/// Longest line in characters.
const MAX_LINE: usize = 2000;

/// One line for a terminal.
struct Line<'a, 'f> {
    to: &'a mut fmt::Formatter<'f>,
    /// Characters that it may still have.
    left: usize,
}

impl Write for Line<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars().take(self.left) {
            self.left = self.left.saturating_sub(1);
            if character.is_control() && !egm_address::fault!("control-characters-printed") {
                write!(self.to, "{}", character.escape_default())?;
            } else {
                self.to.write_char(character)?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        alone(self.0, f)?;
        self.0.others().into_iter().try_for_each(|other| {
            f.write_str("\n")?;
            alone(other, f)
        })
    }
}

/// Writes `error` without the others.
fn alone(error: &dyn Report, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut line = |start: &str, text: &dyn fmt::Display| {
        f.write_str(start)?;
        write!(Line { to: &mut *f, left: MAX_LINE }, "{text}")
    };
    line("error: ", &error)?;
    for text in error.excerpt().iter().flat_map(|excerpt| excerpt.split('\n')) {
        line("\n", &text)?;
    }
    let mut source = error.source();
    while let Some(error) = source {
        line("\n  caused by: ", &error)?;
        source = error.source();
    }
    let help = error.help();
    for (number, text) in help.iter().flat_map(|help| help.split('\n')).enumerate() {
        line(if number == 0 { "\n  help: " } else { "\n        " }, &text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open {name}")]
    struct OpenError {
        name: String,
        source: std::io::Error,
    }

    impl Report for OpenError {
        fn remedy(&self) -> Remedy {
            Blame::Host.help(format!("rename {}:\nmv it", self.name.trim_end()))
        }
    }

    #[test]
    fn a_line_repeats_neither_control_characters_nor_everything() {
        let source = std::io::Error::other("\u{9b}2J\0");
        let shown = Chain(&OpenError { name: "\u{1b}[31mé\r\n".to_owned(), source }).to_string();
        let lines: Vec<_> = shown.split('\n').collect();
        assert_eq!(
            lines,
            [
                r"error: cannot open \u{1b}[31mé\r\n",
                r"  caused by: \u{9b}2J\u{0}",
                r"  help: rename \u{1b}[31mé:",
                "        mv it",
            ]
        );
        let source = std::io::Error::other("none");
        let coloured = Chain(&OpenError { name: "it".to_owned(), source }).on(Screen::coloured(80));
        for label in
            ["\u{1b}[1;31merror:\u{1b}[0m cannot", "\n  \u{1b}[2mcaused by:\u{1b}[0m none", "\n        mv it"]
        {
            assert!(coloured.contains(label), "{coloured:?}");
        }
        let source = std::io::Error::other("é".repeat(9999));
        let shown = Chain(&OpenError { name: "a\n".repeat(9999), source }).to_string();
        let longest = shown.split('\n').map(|line| line.chars().count()).max();
        assert!(longest < Some(4000), "{longest:?}");
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{name}: unknown key")]
    struct Misspelt {
        name: &'static str,
        others: Vec<Misspelt>,
    }

    impl Report for Misspelt {
        fn remedy(&self) -> Remedy {
            Blame::Configuration.into()
        }

        fn excerpt(&self) -> Option<String> {
            Some("  1 | {}\n    |  ^".to_owned())
        }

        fn others(&self) -> Vec<&dyn Report> {
            self.others.iter().map(|other| other as &dyn Report).collect()
        }
    }

    #[test]
    fn every_error_of_a_file_is_shown_with_its_line() {
        let both = Misspelt { name: "a", others: vec![Misspelt { name: "b", others: Vec::new() }] };
        let line = "  1 | {}\n    |  ^";
        assert_eq!(
            Chain(&both).to_string(),
            format!("error: a: unknown key\n{line}\nerror: b: unknown key\n{line}")
        );
    }
}
