//! Restrictions of a thread, and the steps by which each thread confines itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use seccompiler::{BpfProgram, apply_filter};

use super::sys;

/// Limits of all threads of a machine but for their filters.
#[derive(Debug)]
pub(super) struct Restrictions {
    /// Landlock rules; `None` where the kernel has none, and while calls are only logged.
    pub(super) ruleset: Option<OwnedFd>,
    pub(super) drops_capabilities: bool,
}

/// A step that failed, and the kernel's error.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) step: Step,
    pub(super) source: io::Error,
}

/// A step into the restrictions, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    NoNewPrivileges = 1,
    Paths,
    Capabilities,
    Filter,
}

impl Step {
    pub(super) const ALL: [Self; 4] = [Self::NoNewPrivileges, Self::Paths, Self::Capabilities, Self::Filter];

    /// The action, for messages.
    pub(super) const fn action(self) -> &'static str {
        match self {
            Self::NoNewPrivileges => "set no_new_privs",
            Self::Paths => "restrict it by Landlock",
            Self::Capabilities => "drop its capabilities",
            Self::Filter => "set its system call filter",
        }
    }
}

impl Restrictions {
    /// Confines the calling thread, for ever. Async-signal-safe.
    ///
    /// # Errors
    /// The kernel's; the thread may be confined in part.
    pub(super) fn confine(&self, filter: &BpfProgram) -> Result<(), Failure> {
        let failed = |step| move |source: io::Error| Failure { step, source };
        set_no_new_privs(true).map_err(|errno| failed(Step::NoNewPrivileges)(errno.into()))?;
        if let Some(ruleset) = &self.ruleset {
            sys::restrict(ruleset.as_fd()).map_err(failed(Step::Paths))?;
        }
        if self.drops_capabilities {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets).map_err(|errno| failed(Step::Capabilities)(errno.into()))?;
        }
        apply_filter(filter).map_err(|error| match error {
            seccompiler::Error::Prctl(source) | seccompiler::Error::Seccomp(source) => {
                failed(Step::Filter)(source)
            }
            _ => failed(Step::Filter)(io::ErrorKind::InvalidInput.into()),
        })
    }
}
