//! A pause of the machine: its vCPUs wait outside the guest.
//!
//! ```text
//!  running ── pause ─► pausing ── event loop: every vCPU has left the guest ─► paused
//!     ▲                   │                                                      │
//!     └────── resume ─────┴──────────────────────── resume ──────────────────────┘
//! ```
//! Devices go on: they end the requests that they have, and packets from the host wait in the guest's rings.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use super::MachineStep;
use crate::lock::lock;

/// State of a machine that runs, as far as its pauses are concerned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum PauseState {
    #[default]
    Running,
    /// A pause is requested, and some vCPU may be in the guest.
    Pausing,
    /// No vCPU is in the guest.
    Paused,
}

/// The gate that vCPUs pass before each stay in the guest.
#[derive(Debug, Default)]
pub(crate) struct PauseGate {
    /// Whether vCPUs wait: the state is not [`PauseState::Running`].
    is_closed: AtomicBool,
    inner: Mutex<Inner>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    state: PauseState,
    /// Whether a pause ended that [`PauseGate::settle`] has not reported.
    resumed: bool,
    /// The vCPUs that wait.
    waiting: BTreeSet<u32>,
}

impl PauseGate {
    pub(crate) fn state(&self) -> PauseState {
        lock(&self.inner).state
    }

    /// Whether a vCPU is to call [`wait`](Self::wait) before it enters the guest.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Requests a pause. Returns whether the machine was running.
    pub(super) fn close(&self) -> bool {
        let mut inner = lock(&self.inner);
        let ran = inner.state == PauseState::Running;
        if ran {
            inner.state = PauseState::Pausing;
            self.is_closed.store(true, Ordering::Release);
        }
        ran
    }

    /// Lets the vCPUs run. Returns whether there was a pause.
    pub(super) fn open(&self) -> bool {
        let mut inner = lock(&self.inner);
        let was_closed = inner.state != PauseState::Running;
        inner.resumed |= was_closed;
        inner.state = PauseState::Running;
        self.is_closed.store(false, Ordering::Release);
        drop(inner);
        self.opened.notify_all();
        was_closed
    }

    /// Waits on the thread of `vcpu` until the gate opens or `ends` is true; [`open`](Self::open) follows a change of that.
    pub(super) fn wait(&self, vcpu: u32, ends: impl Fn() -> bool) {
        let mut inner = lock(&self.inner);
        inner.waiting.insert(vcpu);
        let is_shut = |inner: &mut Inner| inner.state != PauseState::Running && !ends();
        let mut inner = self.opened.wait_while(inner, is_shut).unwrap_or_else(PoisonError::into_inner);
        inner.waiting.remove(&vcpu);
    }

    /// Whether `vcpu` waits, or no pause is requested.
    pub(super) fn is_out(&self, vcpu: u32) -> bool {
        let inner = lock(&self.inner);
        inner.state == PauseState::Running || inner.waiting.contains(&vcpu)
    }

    /// The steps since the last call, of a machine with `vcpus` vCPUs: it is paused once each of them waits.
    pub(super) fn settle(&self, vcpus: usize) -> [Option<MachineStep>; 2] {
        let mut inner = lock(&self.inner);
        let resumed = std::mem::take(&mut inner.resumed);
        let waits = inner.waiting.len() == vcpus || egm_address::fault!("pause-reported-early");
        let paused = inner.state == PauseState::Pausing && waits;
        if paused {
            inner.state = PauseState::Paused;
        }
        [resumed.then_some(MachineStep::Resumed), paused.then_some(MachineStep::Paused)]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    /// A thread that waits as `vcpu`, once it does.
    fn vcpu(gate: &Arc<PauseGate>, vcpu: u32, ends: &Arc<AtomicBool>) -> thread::JoinHandle<()> {
        let (ours, ends) = (Arc::clone(gate), Arc::clone(ends));
        let thread = thread::spawn(move || ours.wait(vcpu, || ends.load(Ordering::Acquire)));
        while !gate.is_out(vcpu) {
            thread::yield_now();
        }
        thread
    }

    #[test]
    fn a_machine_is_paused_once_every_vcpu_waits_and_runs_once_it_resumes() {
        let (gate, ends) = (Arc::new(PauseGate::default()), Arc::default());
        assert_eq!((gate.is_closed(), gate.is_out(0), gate.settle(2)), (false, true, [None; 2]));
        assert!(gate.close() && gate.is_closed() && !gate.is_out(0));
        assert!(!gate.close(), "it was requested already");
        let first = vcpu(&gate, 0, &ends);
        assert_eq!((gate.settle(2), gate.is_out(1), gate.state()), ([None; 2], false, PauseState::Pausing));
        let second = vcpu(&gate, 1, &ends);
        assert_eq!((gate.settle(2), gate.state()), ([None, Some(MachineStep::Paused)], PauseState::Paused));
        assert_eq!(gate.settle(2), [None; 2], "it is reported once");
        assert!(gate.open());
        first.join().unwrap();
        second.join().unwrap();
        assert_eq!(gate.settle(2), [Some(MachineStep::Resumed), None]);
        assert_eq!((gate.is_closed(), gate.state(), gate.open()), (false, PauseState::Running, false));
        assert!(lock(&gate.inner).waiting.is_empty());
    }

    #[test]
    fn a_machine_that_resumes_before_it_is_paused_runs_and_its_client_is_notified() {
        let gate = PauseGate::default();
        gate.close();
        assert!(gate.open());
        assert_eq!((gate.settle(0), gate.state()), ([Some(MachineStep::Resumed), None], PauseState::Running));
    }

    #[test]
    fn a_pause_that_follows_at_once_is_reported_after_the_end_of_the_last() {
        let gate = PauseGate::default();
        gate.close();
        assert_eq!(gate.settle(0), [None, Some(MachineStep::Paused)]);
        gate.open();
        gate.close();
        assert_eq!(gate.settle(0), [Some(MachineStep::Resumed), Some(MachineStep::Paused)]);
    }

    #[test]
    fn the_end_of_the_machine_releases_every_vcpu() {
        let (gate, ends) = (Arc::new(PauseGate::default()), Arc::<AtomicBool>::default());
        gate.close();
        let waits = vcpu(&gate, 0, &ends);
        ends.store(true, Ordering::Release);
        gate.open();
        waits.join().unwrap();
        gate.close();
        gate.wait(0, || ends.load(Ordering::Acquire)); // a pause that comes too late stops nothing
    }
}
