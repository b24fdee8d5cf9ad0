//! Copies of this host's programs, with their libraries, for the emulated host, which has neither.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::engine::error::LabError;

/// Prefix of the names of dynamic loaders.
const LOADER: &str = "ld-";

/// A program that can be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Portable {
    program: PathBuf,
    /// The loader that belongs to copied libraries, which are in its folder.
    loader: Option<PathBuf>,
}

impl Portable {
    /// The program at `program`, with this host's own libraries.
    pub(crate) fn here(program: &Path) -> Self {
        Self { program: program.to_owned(), loader: None }
    }

    /// The program `name` that [`Portable::copy`] put into `folder`, if it did.
    pub(crate) fn copied(folder: &Path, name: &str) -> Option<Self> {
        let program = folder.join(name);
        let entries = fs::read_dir(folder).ok()?.flatten();
        let is_loader =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(LOADER));
        let loader = entries.map(|entry| entry.path()).find(is_loader);
        program.exists().then_some(Self { program, loader })
    }

    /// Copies it into `folder` as `name`, with its loader and its libraries where it is not static.
    pub(crate) fn copy(&self, folder: &Path, name: &str) -> Result<(), LabError> {
        fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
        copy(&self.program, &folder.join(name))?;
        for library in libraries(&self.program)? {
            copy(&library, &folder.join(library.file_name().unwrap_or_default()))?;
        }
        Ok(())
    }

    /// The command that starts it.
    pub(crate) fn command(&self) -> Command {
        let Some(loader) = &self.loader else { return Command::new(&self.program) };
        let mut command = Command::new(loader);
        command.arg("--library-path").arg(loader.parent().unwrap_or(loader)).arg(&self.program);
        command
    }
}

/// Paths of the loader and the libraries of `program`; none if `ldd` reports that it is static.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, LabError> {
    let output = Command::new("ldd").arg(program).stdin(Stdio::null()).output();
    let output = output.map_err(LabError::file("run", "ldd"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

fn copy(from: &Path, to: &Path) -> Result<(), LabError> {
    fs::copy(from, to).map(drop).map_err(LabError::file("copy", from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(program: &Portable, argument: &str) -> bool {
        program.command().arg(argument).status().unwrap().success()
    }

    #[test]
    fn a_dynamic_program_starts_with_the_libraries_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        Portable::here(Path::new("/bin/sleep")).copy(folder.path(), "sleep").unwrap();
        let copied = Portable::copied(folder.path(), "sleep").unwrap();
        assert!(copied.loader.is_some() && runs(&copied, "0"), "{copied:?}");
        assert_eq!(Portable::copied(folder.path(), "another"), None);
    }

    #[test]
    fn a_file_that_is_no_dynamic_program_is_copied_alone() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/bin/sh\nexit 0\n").unwrap();
        let to = folder.path().join("to");
        Portable::here(&script).copy(&to, "script").unwrap();
        assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
        assert_eq!(Portable::copied(&to, "script").unwrap().loader, None);
    }
}
