//! Output of this program to its caller: standard output and standard error, files, and the width of a terminal.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use egm_report::show::{Colour, Style};

/// Exit code for a command line that is not understood.
pub(crate) const USAGE: u8 = 2;
/// Columns of what is no terminal, or one that reports none.
pub(crate) const COLUMNS: usize = 80;
/// The fewest and the most columns that a terminal plausibly has.
const PLAUSIBLE: std::ops::RangeInclusive<usize> = 40..=400;

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

/// Reports what is wrong (it may quote a stranger's file) on standard error; a failure to do so keeps `code`.
pub(crate) fn complain(wrong: &str, code: ExitCode) -> ExitCode {
    let _ = writeln!(io::stderr(), "error: {}", egm_guest::findings::visible(wrong));
    code
}

/// Reports a wrong command line.
pub(crate) fn misused(wrong: &str) -> ExitCode {
    complain(wrong, ExitCode::from(USAGE))
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

/// Columns of a terminal; `None` for what is none, where lines are as long as they are.
pub(crate) fn terminal<S: AsFd + IsTerminal>(stream: &S) -> Option<usize> {
    let size = || rustix::termios::tcgetwinsize(stream).ok().map(|size| usize::from(size.ws_col));
    stream.is_terminal().then(|| size().filter(|columns| PLAUSIBLE.contains(columns)).unwrap_or(COLUMNS))
}

/// Standard output: a terminal with its columns and colours, or a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Screen {
    colour: Colour,
    columns: Option<usize>,
}

impl Screen {
    /// A file or another program: no colours, and lines of any length, which can be searched.
    pub(crate) const FILE: Self = Self { colour: Colour::Off, columns: None };

    /// A terminal with colours.
    #[cfg(test)]
    pub(crate) const fn coloured(columns: usize) -> Self {
        Self { colour: Colour::On, columns: Some(columns) }
    }

    /// A terminal without colours.
    #[cfg(test)]
    pub(crate) const fn plain(columns: usize) -> Self {
        Self { colour: Colour::Off, columns: Some(columns) }
    }

    /// The screen behind standard output; `NO_COLOR` and a dumb terminal turn colours off.
    pub(crate) fn of_stdout() -> Self {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let colour = if is_dumb { Colour::Off } else { Colour::of_stdout() };
        Self { colour, columns: terminal(&io::stdout()) }
    }

    /// Columns of the terminal; `None` for a file.
    pub(crate) const fn columns(self) -> Option<usize> {
        self.columns
    }

    /// `text`, printable, in `style`.
    pub(crate) fn paint(self, style: Style, text: &str) -> String {
        self.colour.paint(style, text)
    }
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
