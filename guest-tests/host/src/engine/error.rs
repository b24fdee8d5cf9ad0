//! Errors of the lab itself; a guest that fails is a result, not an error.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use serde::de::DeserializeOwned;

/// An error of the lab, with its exit code.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LabError {
    #[error("cannot {action} {}", path.display())]
    File {
        /// The verb: `read`, `write`, `make`.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot run {program}: install the Debian package {package}")]
    Program {
        program: String,
        /// The Debian package that has it.
        package: &'static str,
        source: io::Error,
    },
    #[error("{command} ended with {status}: {tail}")]
    Command {
        /// The program and its last arguments.
        command: String,
        status: String,
        /// The end of its output.
        tail: String,
    },
    /// A file's content or a program's output is not as expected.
    #[error("{what}: {problem}")]
    Content {
        /// The file or program.
        what: String,
        problem: String,
    },
    #[error("{what}; {remedy}")]
    Host { what: String, remedy: String },
    /// The command line names something that does not exist.
    #[error("{0}")]
    Usage(String),
}

impl LabError {
    /// For `map_err`: a failed file operation.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// Reads `bytes` of `what`, a file or a program's output, as JSON.
    pub(crate) fn json<T: DeserializeOwned>(what: impl Into<String>, bytes: &[u8]) -> Result<T, Self> {
        serde_json::from_slice(bytes)
            .map_err(|error| Self::Content { what: what.into(), problem: error.to_string() })
    }

    /// Exit code: 2 usage, 3 the host lacks something, 4 the lab itself.
    pub(crate) const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Program { .. } | Self::Host { .. } => 3,
            Self::File { .. } | Self::Command { .. } | Self::Content { .. } => 4,
        }
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &LabError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
