//! Runs programs to their end and returns their output.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use crate::engine::error::LabError;

/// Maximum characters of a failed program's output in an error.
const TAIL: usize = 600;

/// A program with arguments, and the Debian package that has it.
#[derive(Debug)]
pub(crate) struct Tool {
    command: Command,
    package: &'static str,
}

impl Tool {
    /// `program`, found in `PATH` or in the system's sbin folders.
    pub(crate) fn new(program: &str, package: &'static str) -> Self {
        let mut command = Command::new(program);
        // depmod, modinfo and debootstrap live in sbin, which an ordinary user's PATH leaves out.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).env("LC_ALL", "C").stdin(Stdio::null());
        Self { command, package }
    }

    pub(crate) fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, args: I) -> Self {
        self.command.args(args);
        self
    }

    /// Sets the directory that it runs in.
    pub(crate) fn within(mut self, directory: &std::path::Path) -> Self {
        self.command.current_dir(directory);
        self
    }

    /// Runs it and returns its standard output, bytes as they are.
    pub(crate) fn bytes(mut self) -> Result<Vec<u8>, LabError> {
        let output = self.command.output().map_err(|source| self.not_started(source))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
        let said = String::from_utf8_lossy(said);
        Err(self.failed(&output.status.to_string(), &said))
    }

    /// Runs it and returns its standard output as text.
    pub(crate) fn text(self) -> Result<String, LabError> {
        self.bytes().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Runs it and hands each line of its standard output to `line`.
    pub(crate) fn lines(mut self, mut line: impl FnMut(&str)) -> Result<(), LabError> {
        use std::io::BufRead;
        self.command.stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = self.command.spawn().map_err(|source| self.not_started(source))?;
        if let Some(out) = child.stdout.take() {
            for text in std::io::BufReader::new(out).lines().map_while(Result::ok) {
                line(&text);
            }
        }
        let status = child.wait().map_err(|source| self.not_started(source))?;
        if status.success() {
            Ok(())
        } else {
            Err(self.failed(&status.to_string(), "its own words are above"))
        }
    }

    fn name(&self) -> String {
        self.command.get_program().to_string_lossy().into_owned()
    }

    fn not_started(&self, source: std::io::Error) -> LabError {
        LabError::Program { program: self.name(), package: self.package, source }
    }

    fn failed(&self, status: &str, said: &str) -> LabError {
        let args: Vec<_> = self.command.get_args().map(OsStr::to_string_lossy).collect();
        // The end of a long command line distinguishes one call from another.
        let shown = args.iter().rev().take(4).rev().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
        let said = said.trim();
        let skip = said.chars().count().saturating_sub(TAIL);
        let tail = said.chars().skip(skip).collect();
        LabError::Command { command: format!("{} … {shown}", self.name()), status: status.to_owned(), tail }
    }
}

/// Runs `command` to its end, whatever its exit code, without input.
pub(crate) fn output(command: &mut Command) -> Result<Output, LabError> {
    let program = command.get_program().to_os_string();
    command.stdin(Stdio::null()).output().map_err(LabError::file("run", program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_exist_names_its_package() {
        let error = Tool::new("egm-no-such-program", "egm-package").text().unwrap_err();
        assert!(error.to_string().contains("egm-package"));
        assert_eq!(error.exit_code(), 3);
    }

    #[test]
    fn a_failed_program_is_quoted() {
        let error = Tool::new("sh", "dash").args(["-c", "echo why >&2; exit 3"]).text().unwrap_err();
        assert!(error.to_string().contains("exit status: 3: why"), "{error}");
    }

    #[test]
    fn lines_come_one_by_one() {
        let mut seen = Vec::new();
        let tool = Tool::new("printf", "coreutils").args(["a\nb\n"]);
        tool.lines(|line| seen.push(line.to_owned())).unwrap();
        assert_eq!(seen, ["a", "b"]);
    }
}
