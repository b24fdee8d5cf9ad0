//! The last step before the guest runs: in a sandbox, every thread encloses itself, and vCPUs wait until all have done so.

use std::error::Error;
use std::sync::{Arc, OnceLock};

use super::exit::ExitReason;
use crate::program::StartPages;
use crate::sandbox::{Sandbox, SandboxError};

/// What the threads of a machine share until its guest runs.
pub(super) struct Start {
    sandbox: Option<Arc<Sandbox>>,
    /// Whether the guest runs, once that is known.
    runs: OnceLock<bool>,
}

impl Start {
    /// A start in `sandbox`, or without one.
    pub(super) fn new(sandbox: Option<Arc<Sandbox>>) -> Self {
        Self { sandbox, runs: OnceLock::new() }
    }

    /// Called by each vCPU. Returns whether the guest runs: without a sandbox at once.
    ///
    /// # Errors
    /// [`ExitReason::Sandbox`].
    pub(super) fn enter(&self) -> Result<bool, ExitReason> {
        let Some(sandbox) = &self.sandbox else { return Ok(true) };
        sandbox.enclose_vcpu().map_err(|error| reason(&error))?;
        Ok(*self.runs.wait())
    }

    /// Called by the event loop when the vCPUs have threads: lets them run.
    ///
    /// # Errors
    /// [`ExitReason::Sandbox`].
    pub(super) fn go(&self) -> Result<(), ExitReason> {
        // Not earlier than the threads of vCPUs: without a sandbox, the guest's first instruction does not wait for it.
        let pages = StartPages::find();
        if let Some(sandbox) = &self.sandbox {
            sandbox.enclose_event_loop().map_err(|error| reason(&error))?;
            let _ = self.runs.set(true);
        }
        pages.forget();
        Ok(())
    }

    /// Ends vCPUs that still wait.
    pub(super) fn cancel(&self) {
        let _ = self.runs.set(false);
    }
}

fn reason(error: &SandboxError) -> ExitReason {
    let cause = error.source().map(|source| format!(": {source}")).unwrap_or_default();
    ExitReason::Sandbox(format!("{error}{cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_sandbox_no_vcpu_waits() {
        let start = Start::new(None);
        assert_eq!(start.enter(), Ok(true));
        start.go().unwrap();
    }

    #[test]
    fn a_thread_that_is_not_enclosed_is_named_with_the_kernel_s_reason() {
        let source = std::io::Error::from_raw_os_error(libc::EINVAL);
        let error = SandboxError::Refused { thread: "vcpu0".to_owned(), step: "set its filter", source };
        let ExitReason::Sandbox(what) = reason(&error) else { panic!() };
        assert!(
            what.starts_with("cannot sandbox thread vcpu0: cannot set its filter: Invalid argument"),
            "{what}"
        );
    }
}
