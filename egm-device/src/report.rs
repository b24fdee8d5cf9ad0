//! Who is to blame, and what is printed.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Who must act; the discriminant is the process's exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Blame {
    /// The guest failed: panic, triple fault, reset that nobody asked for.
    Guest = 1,
    /// The configuration or the command line is wrong.
    Configuration = 2,
    /// The host lacks something or forbids it.
    Host = 3,
    /// Our own bug.
    Internal = 4,
}

impl From<Blame> for ExitCode {
    fn from(blame: Blame) -> Self {
        Self::from(blame as u8)
    }
}

/// An error that a person will read: whose turn it is and what helps.
pub trait Report: Error {
    /// Who must act.
    fn blame(&self) -> Blame;

    /// What to do about it, without "help:" in front.
    fn help(&self) -> Option<String> {
        None
    }
}

impl<E: Report + 'static> From<E> for Box<dyn Report> {
    fn from(error: E) -> Self {
        Box::new(error)
    }
}

/// Shows an error, the chain of its sources and its help, each on a line.
#[derive(Debug)]
pub struct Chain<'a>(pub &'a dyn Report);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, "\n  caused by: {error}")?;
            source = error.source();
        }
        if let Some(help) = self.0.help() {
            write!(f, "\n  help: {}", help.replace('\n', "\n        "))?;
        }
        Ok(())
    }
}
