//! Output of this program to its caller: standard output and standard error, and files.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use egm_guest::findings::visible;
use egm_report::show::Screen;
use egm_report::{Blame, Chain, Remedy, Report};

/// Exit code for a command line that is not understood.
pub(crate) const USAGE: u8 = 2;

/// Prints on standard output. A reader that has gone (`| head`) is no error: no other one is left to notify.
///
/// # Errors
/// Standard output cannot be written: its disk is full, say.
pub(crate) fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// The same as all that a command does: its exit code.
pub(crate) fn printed(text: &str) -> ExitCode {
    print(text).map_or_else(|wrong| complain(&wrong, ExitCode::FAILURE), |()| ExitCode::SUCCESS)
}

/// Reports what is wrong (it may quote any file) on standard error; a failure to do so keeps `code`.
pub(crate) fn complain(wrong: &str, code: ExitCode) -> ExitCode {
    let line = format!("error: {}", visible(wrong));
    let _ = writeln!(io::stderr(), "{}", Screen::of_stderr().message(&line));
    code
}

/// What is wrong with a command line, or with a file that it names.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct Misuse {
    what: String,
    /// The line of the file that is wrong, with a mark under the place.
    excerpt: Option<String>,
    help: Option<String>,
}

impl Misuse {
    /// The same with the line of the file that is wrong.
    pub(crate) fn with_excerpt(self, excerpt: &str) -> Self {
        let lines: Vec<String> = excerpt.lines().map(visible).collect();
        Self { excerpt: Some(lines.join("\n")), ..self }
    }

    /// The same with a remedy.
    pub(crate) fn with_help(self, help: &str) -> Self {
        Self { help: Some(help.to_owned()), ..self }
    }
}

impl From<String> for Misuse {
    fn from(what: String) -> Self {
        Self { what: visible(&what), excerpt: None, help: None }
    }
}

impl Report for Misuse {
    fn remedy(&self) -> Remedy {
        Remedy { blame: Blame::Configuration, help: self.help.clone() }
    }

    fn excerpt(&self) -> Option<String> {
        self.excerpt.clone()
    }
}

/// Reports a wrong command line on standard error; a failure to do so keeps the code.
pub(crate) fn misused(wrong: &Misuse) -> ExitCode {
    let _ = writeln!(io::stderr(), "{}", Chain(wrong).on(Screen::of_stderr()));
    ExitCode::from(USAGE)
}

/// A file that is written at the end; what was in it stays until then, so a run that is broken off destroys nothing.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    path: PathBuf,
}

impl Output {
    /// Makes the file where there is none.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| wrong(path, &error))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Replaces what is in it.
    ///
    /// # Errors
    /// It cannot be written: the disk is full, say.
    pub(crate) fn write(mut self, text: &str) -> Result<(), String> {
        let emptied = match self.file.metadata() {
            Ok(metadata) if metadata.is_file() => self.file.set_len(0),
            other => other.map(drop), // pipes and devices have nothing to take away
        };
        emptied.and_then(|()| self.file.write_all(text.as_bytes())).map_err(|error| wrong(&self.path, &error))
    }
}

fn wrong(path: &Path, error: &io::Error) -> String {
    format!("cannot write {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_keeps_what_it_has_until_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        fs::write(&path, "a long run of yesterday").unwrap();
        let output = Output::open(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "a long run of yesterday");
        output.write("today").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "today");
        assert!(Output::open(folder.path()).unwrap_err().starts_with("cannot write "));
    }

    #[test]
    fn a_device_is_written_and_a_full_one_is_an_error() {
        Output::open(Path::new("/dev/null")).unwrap().write("x").unwrap();
        let full = Output::open(Path::new("/dev/full")).unwrap().write("x").unwrap_err();
        assert!(full.starts_with("cannot write /dev/full: "), "{full}");
    }
}
