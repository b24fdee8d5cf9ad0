//! Reasons why a machine is not enclosed, and does not run.

use std::io;

use landlock::RulesetError;
use seccompiler::BackendError;

use super::table::ThreadKind;
use crate::error::{Blame, Remedy, Report};

/// Why a machine cannot be enclosed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SandboxError {
    /// Its scrubs start threads, which no filter permits.
    #[error("cannot sandbox the machine: slice \"{id}\" is a PCI function, and its scrubs start threads")]
    Slice { id: String },
    /// Another process needs root's rights and the configuration as a file.
    #[error("cannot sandbox the machine: it has slices, which no other process can return")]
    NoKeeper,
    #[error("cannot make the filter of a thread ({kind:?})")]
    Filter { kind: ThreadKind, source: BackendError },
    #[error("cannot make Landlock rules")]
    Landlock(#[from] RulesetError),
    #[error("cannot sandbox thread {thread}: the sandbox has no filter for it")]
    Unknown { thread: String },
    #[error("cannot sandbox thread {thread}: cannot {step}")]
    Refused { thread: String, step: &'static str, source: io::Error },
    #[error("cannot sandbox thread {thread}: it does not answer a signal")]
    Silent { thread: String },
    #[error("cannot {step}")]
    Prepare { step: &'static str, source: io::Error },
}

impl Report for SandboxError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Slice { .. } => {
                Blame::Configuration.help("set \"as\": \"memory\" for it, or leave out --sandbox")
            }
            Self::NoKeeper => Blame::Configuration
                .help("as root, put the configuration into a file; other users get slices by --broker"),
            Self::Filter { .. } | Self::Unknown { .. } => Blame::Internal.into(),
            Self::Refused { .. } => {
                Blame::Host.help("use a kernel with CONFIG_SECCOMP_FILTER, or leave out --sandbox")
            }
            Self::Landlock(_) | Self::Silent { .. } | Self::Prepare { .. } => Blame::Host.into(),
        }
    }
}
