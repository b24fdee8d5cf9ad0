//! Reasons why a machine is not confined, and does not run.

use std::io;

use landlock::RulesetError;
use seccompiler::BackendError;

use super::table::ThreadKind;
use crate::error::{Blame, Remedy, Report};

/// Why a machine cannot be confined.
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
    #[error("cannot sandbox thread {thread}: it started while the others were confined")]
    Late { thread: String },
    #[error("cannot sandbox thread {thread}: cannot {step}")]
    Refused { thread: String, step: &'static str, source: io::Error },
    #[error("cannot sandbox thread {thread}: it does not answer a signal")]
    Silent { thread: String },
    #[error("cannot {step}")]
    Prepare { step: &'static str, source: io::Error },
}

impl SandboxError {
    /// Remedy for a thread that the kernel does not confine.
    pub(crate) const REFUSED_HELP: &str = "use a kernel with CONFIG_SECCOMP_FILTER, or leave out --sandbox";
}

impl Report for SandboxError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Slice { .. } => {
                Blame::Configuration.help("set \"as\": \"memory\" for it, or leave out --sandbox")
            }
            Self::NoKeeper => Blame::Configuration
                .help("as root, put the configuration into a file; other users get slices by --broker"),
            Self::Filter { .. } | Self::Unknown { .. } | Self::Late { .. } => Blame::Internal.into(),
            Self::Refused { .. } => Blame::Host.help(Self::REFUSED_HELP),
            Self::Landlock(_) | Self::Silent { .. } | Self::Prepare { .. } => Blame::Host
                .help("leave out --sandbox, and report this with the version of the kernel: uname -r"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_refuses_has_a_way_to_run_the_machine() {
        let refused = || io::Error::from_raw_os_error(libc::EPERM);
        let thread = || "blk".to_owned();
        for error in [
            SandboxError::Refused { thread: thread(), step: "set its filter", source: refused() },
            SandboxError::Silent { thread: thread() },
            SandboxError::Prepare { step: "list the threads of this process", source: refused() },
        ] {
            assert_eq!(error.blame(), Blame::Host);
            assert!(error.help().unwrap().contains("leave out --sandbox"), "{error}");
        }
    }
}
