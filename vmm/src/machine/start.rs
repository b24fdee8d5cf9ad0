//! The last step before the guest runs: each vCPU has its thread; in a sandbox, every thread confines itself, and vCPUs wait until
//! all have done so.

use std::error::Error;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::exit::ExitReason;
use crate::lock::lock;
use crate::program::StartPages;
use crate::sandbox::{Sandbox, SandboxError};

/// What the threads of a machine share until its guest runs.
pub(super) struct Start {
    sandbox: Option<Arc<Sandbox>>,
    /// Number of vCPUs that have no running thread yet, or are not confined; or the reason why one cannot be.
    unconfined: Mutex<Result<usize, ExitReason>>,
    /// Signalled after each change of `unconfined`.
    changed: Condvar,
    /// Whether the guest runs, once that is known.
    runs: OnceLock<bool>,
}

impl Start {
    /// A start of `vcpus` vCPUs in `sandbox`, or without one.
    pub(super) fn new(sandbox: Option<Arc<Sandbox>>, vcpus: usize) -> Self {
        let unconfined = Mutex::new(Ok(vcpus));
        Self { sandbox, unconfined, changed: Condvar::new(), runs: OnceLock::new() }
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

    /// Counts a vCPU that is `confined`, or cannot be. The first reason stays.
    fn count(&self, confined: Result<(), ExitReason>) -> Result<(), ExitReason> {
        let mut unconfined = lock(&self.unconfined);
        *unconfined = unconfined.clone().and_then(|count| confined.clone().map(|()| count.saturating_sub(1)));
        drop(unconfined);
        self.changed.notify_one();
        confined
    }

    /// Waits until each vCPU has a running thread, which is confined in a sandbox.
    fn wait_for_vcpus(&self) -> Result<(), ExitReason> {
        let waits =
            |unconfined: &mut Result<usize, ExitReason>| unconfined.as_ref().is_ok_and(|count| *count > 0);
        let unconfined = self.changed.wait_while(lock(&self.unconfined), waits);
        unconfined.unwrap_or_else(PoisonError::into_inner).clone().map(|_| ())
    }

    /// Called by the event loop when each vCPU was given a thread: lets them run once every thread is confined. On return all threads
    /// have their names, by which libvirt finds them right after `vm.boot`.
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
