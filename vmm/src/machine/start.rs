//! The last step before the guest runs. The start waits until each vCPU has a running thread. In a sandbox, every thread confines
//! itself, and vCPUs wait until all have done so.

use std::error::Error;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::exit::ExitReason;
use crate::lock::lock;
use crate::program::StartPages;
use crate::sandbox::{Sandbox, SandboxError};

/// What the threads of a machine share until its guest runs.
pub(super) struct Start {
    sandbox: Option<Arc<Sandbox>>,
    /// Number of vCPUs of which the thread does not run yet or, in a sandbox, is not confined; or the first reason why one cannot be.
    pending: Mutex<Result<usize, ExitReason>>,
    /// Signalled after each change of `pending`.
    changed: Condvar,
    /// Whether the guest runs, once that is known.
    runs: OnceLock<bool>,
}

impl Start {
    /// A start of `vcpus` vCPUs in `sandbox`, or without one.
    pub(super) fn new(sandbox: Option<Arc<Sandbox>>, vcpus: usize) -> Self {
        let pending = Mutex::new(Ok(vcpus));
        Self { sandbox, pending, changed: Condvar::new(), runs: OnceLock::new() }
    }

    /// Called by each vCPU. Returns whether the guest runs: without a sandbox at once.
    ///
    /// # Errors
    /// [`ExitReason::Sandbox`].
    pub(super) fn enter(&self) -> Result<bool, ExitReason> {
        let Some(sandbox) = &self.sandbox else {
            self.count(Ok(()))?;
            return Ok(true);
        };
        self.count(sandbox.confine_vcpu().map_err(|error| reason(&error)))?;
        Ok(*self.runs.wait())
    }

    /// Counts a vCPU that is `ready`, or cannot be. The first reason stays.
    fn count(&self, ready: Result<(), ExitReason>) -> Result<(), ExitReason> {
        let mut pending = lock(&self.pending);
        *pending = pending.clone().and_then(|count| ready.clone().map(|()| count.saturating_sub(1)));
        drop(pending);
        self.changed.notify_one();
        ready
    }

    /// Waits until no vCPU is pending.
    fn wait_for_vcpus(&self) -> Result<(), ExitReason> {
        let waits = |pending: &mut Result<usize, ExitReason>| pending.as_ref().is_ok_and(|count| *count > 0);
        let pending = self.changed.wait_while(lock(&self.pending), waits);
        pending.unwrap_or_else(PoisonError::into_inner).clone().map(|_| ())
    }

    /// Called by the event loop after it has spawned a thread for each vCPU. Returns when all of them run under their names, by which
    /// libvirt finds them after `vm.boot`; in a sandbox, lets them enter the guest.
    ///
    /// # Errors
    /// [`ExitReason::Sandbox`].
    pub(super) fn go(&self) -> Result<(), ExitReason> {
        // Not earlier than the threads of vCPUs: without a sandbox, the guest's first instruction does not wait for it.
        let pages = StartPages::find();
        self.wait_for_vcpus()?;
        if let Some(sandbox) = &self.sandbox {
            sandbox.confine_event_loop().map_err(|error| reason(&error))?;
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
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn without_a_sandbox_no_vcpu_waits_and_the_start_waits_for_all() {
        let start = Arc::new(Start::new(None, 2));
        let (begun, begins) = channel();
        let event_loop = Arc::clone(&start);
        let event_loop = thread::spawn(move || begun.send(event_loop.go()).unwrap());
        assert_eq!(start.enter(), Ok(true));
        assert_eq!(begins.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
        assert_eq!(start.enter(), Ok(true));
        assert_eq!(begins.recv().unwrap(), Ok(()));
        event_loop.join().unwrap();
    }

    #[test]
    fn no_vcpu_runs_before_the_last_one_is_confined() {
        let start = Arc::new(Start::new(Some(Sandbox::that_logs()), 2));
        let (entered, runs) = channel();
        let vcpu = || {
            let (start, entered) = (Arc::clone(&start), entered.clone());
            thread::spawn(move || entered.send(start.enter()).unwrap())
        };
        let event_loop = Arc::clone(&start);
        let event_loop = thread::spawn(move || event_loop.go());
        let first = vcpu();
        assert_eq!(runs.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
        assert!(!event_loop.is_finished());
        let second = vcpu();
        assert_eq!((runs.recv().unwrap(), runs.recv().unwrap()), (Ok(true), Ok(true)));
        assert_eq!(event_loop.join().unwrap(), Ok(()));
        first.join().unwrap();
        second.join().unwrap();
    }

    #[test]
    fn a_vcpu_that_cannot_be_confined_ends_the_start_with_its_reason() {
        let start = Start::new(Some(Sandbox::that_logs()), 3);
        let why = |what: &str| ExitReason::Sandbox(what.to_owned());
        start.count(Ok(())).unwrap();
        start.count(Err(why("first"))).unwrap_err();
        start.count(Err(why("second"))).unwrap_err();
        assert_eq!(start.go(), Err(why("first")));
        start.cancel();
        assert_eq!(start.runs.get(), Some(&false));
    }

    #[test]
    fn a_thread_that_is_not_confined_is_named_with_the_kernel_s_reason() {
        let source = std::io::Error::from_raw_os_error(libc::EINVAL);
        let error = SandboxError::Refused { thread: "vcpu0".to_owned(), step: "set its filter", source };
        let ExitReason::Sandbox(what) = reason(&error) else { panic!() };
        assert!(
            what.starts_with("cannot sandbox thread vcpu0: cannot set its filter: Invalid argument"),
            "{what}"
        );
    }
}
