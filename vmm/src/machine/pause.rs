//! A pause of the machine, or its reset: its vCPUs wait outside the guest.
//!
//! ```text
//!  running ── pause ─► pausing ── event loop: every vCPU has left the guest ─► paused
//!     ▲                   │                                                      │
//!     └────── resume ─────┴──────────────────────── resume ──────────────────────┘
//! ```
//! Devices go on: they end the requests that they have, and packets from the host wait in the guest's rings.
//!
//! A reset closes the gate, too, in each of these states, until the event loop has carried it out. A snapshot of a paused
//! machine keeps it closed until it is written: a machine that is resumed meanwhile runs afterwards.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::MachineStep;
use crate::lock::lock;

/// Time for a vCPU to return to the gate.
const RETURN: Duration = Duration::from_secs(1);

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
    /// Whether vCPUs wait: the state is not [`PauseState::Running`], or a reset is requested.
    is_closed: AtomicBool,
    inner: Mutex<Inner>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    state: PauseState,
    reset: ResetState,
    /// Whether a pause ended that [`PauseGate::settle`] has not reported.
    resumed: bool,
    /// The vCPUs that wait.
    waiting: BTreeSet<u32>,
    /// Whether a snapshot is written.
    is_saving: bool,
    /// The vCPUs that are yet to save their state for it.
    to_save: BTreeSet<u32>,
}

/// Task of a vCPU at the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GateTask {
    /// To enter the guest.
    Run,
    /// To reset itself, and wait again.
    Reset,
    /// To save its state, and wait again.
    Save,
}

/// State of a reset.
#[derive(Debug, Default, PartialEq, Eq)]
enum ResetState {
    #[default]
    None,
    /// It is due once each vCPU waits.
    Requested,
    /// All but these vCPUs are reset.
    Restoring(BTreeSet<u32>),
}

impl Inner {
    fn is_shut(&self) -> bool {
        self.state != PauseState::Running || self.reset != ResetState::None || self.is_saving
    }

    fn task(&self, vcpu: u32) -> GateTask {
        match &self.reset {
            _ if self.to_save.contains(&vcpu) => GateTask::Save,
            ResetState::Restoring(vcpus) if vcpus.contains(&vcpu) => GateTask::Reset,
            _ => GateTask::Run,
        }
    }
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
        self.is_closed.store(inner.is_shut(), Ordering::Release);
        drop(inner);
        self.opened.notify_all();
        was_closed
    }

    /// Requests a reset. Its requester wakes the event loop.
    pub(super) fn request_reset(&self) {
        let mut inner = lock(&self.inner);
        inner.reset = ResetState::Requested;
        self.is_closed.store(true, Ordering::Release);
    }

    /// Whether a reset is requested and each of `vcpus` vCPUs waits for it.
    pub(super) fn is_reset_due(&self, vcpus: usize) -> bool {
        let inner = lock(&self.inner);
        inner.reset == ResetState::Requested && inner.waiting.len() == vcpus
    }

    /// Has each vCPU, all of which wait, reset itself. None enters the guest before the last one is reset: the first could
    /// start another one that is not.
    pub(super) fn restore_vcpus(&self) {
        let mut inner = lock(&self.inner);
        inner.reset = ResetState::Restoring(inner.waiting.clone());
        drop(inner);
        self.opened.notify_all();
    }

    /// Reports that `vcpu` is reset.
    pub(super) fn restored(&self, vcpu: u32) {
        let mut inner = lock(&self.inner);
        let ResetState::Restoring(vcpus) = &mut inner.reset else { return };
        vcpus.remove(&vcpu);
        if vcpus.is_empty() {
            inner.reset = ResetState::None;
            self.is_closed.store(inner.is_shut(), Ordering::Release);
            drop(inner);
            self.opened.notify_all();
        }
    }

    /// Keeps the gate of a paused machine of `vcpus` vCPUs closed until [`end_save`](Self::end_save). Returns whether the machine
    /// is paused. A vCPU that was reset or has saved itself is at the gate again in a moment, which is awaited.
    pub(super) fn begin_save(&self, vcpus: usize) -> bool {
        let is_paused = |inner: &Inner| inner.state == PauseState::Paused && inner.reset == ResetState::None;
        let returns = |inner: &mut Inner| is_paused(inner) && inner.waiting.len() < vcpus;
        let inner = self.opened.wait_timeout_while(lock(&self.inner), RETURN, returns);
        let (mut inner, _) = inner.unwrap_or_else(PoisonError::into_inner);
        inner.is_saving = is_paused(&inner) && inner.waiting.len() == vcpus;
        inner.is_saving
    }

    /// Has each vCPU save its state, after [`begin_save`](Self::begin_save). Returns when each has.
    pub(super) fn save_vcpus(&self) {
        let mut inner = lock(&self.inner);
        inner.to_save = inner.waiting.clone();
        self.opened.notify_all();
        let waits = |inner: &mut Inner| !inner.to_save.is_empty();
        drop(self.opened.wait_while(inner, waits).unwrap_or_else(PoisonError::into_inner));
    }

    /// Reports that `vcpu` has saved its state.
    pub(super) fn saved(&self, vcpu: u32) {
        lock(&self.inner).to_save.remove(&vcpu);
        self.opened.notify_all();
    }

    /// Opens the gate after a snapshot, unless the machine is paused still.
    pub(super) fn end_save(&self) {
        let mut inner = lock(&self.inner);
        inner.is_saving = false;
        self.is_closed.store(inner.is_shut(), Ordering::Release);
        drop(inner);
        self.opened.notify_all();
    }

    /// Waits on the thread of `vcpu` until the gate opens or `ends` is true; [`open`](Self::open) follows a change of that.
    /// Returns early when the vCPU has another task before it waits again.
    pub(super) fn wait(&self, vcpu: u32, ends: impl Fn() -> bool) -> GateTask {
        let mut inner = lock(&self.inner);
        inner.waiting.insert(vcpu);
        self.opened.notify_all(); // `begin_save`
        let waits = |inner: &mut Inner| inner.is_shut() && inner.task(vcpu) == GateTask::Run && !ends();
        let mut inner = self.opened.wait_while(inner, waits).unwrap_or_else(PoisonError::into_inner);
        inner.waiting.remove(&vcpu);
        inner.task(vcpu)
    }

    /// Whether `vcpu` waits, or neither a pause nor a reset is requested.
    pub(super) fn is_out(&self, vcpu: u32) -> bool {
        let inner = lock(&self.inner);
        !inner.is_shut() || inner.waiting.contains(&vcpu)
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
    fn vcpu(gate: &Arc<PauseGate>, vcpu: u32, ends: &Arc<AtomicBool>) -> thread::JoinHandle<GateTask> {
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
    fn a_reset_is_due_once_every_vcpu_waits_and_none_goes_on_before_the_last_one_is_reset() {
        let (gate, ends) = (Arc::new(PauseGate::default()), Arc::default());
        gate.request_reset();
        assert_eq!((gate.is_closed(), gate.is_out(0), gate.state()), (true, false, PauseState::Running));
        let vcpus = [0, 1].map(|index| vcpu(&gate, index, &ends));
        assert_eq!((gate.is_reset_due(3), gate.is_reset_due(2), gate.settle(2)), (false, true, [None; 2]));
        gate.restore_vcpus();
        assert!(vcpus.into_iter().all(|vcpu| vcpu.join().unwrap() == GateTask::Reset));
        gate.restored(0);
        assert!(gate.is_closed() && !gate.is_reset_due(0));
        let first = vcpu(&gate, 0, &ends);
        gate.restored(1);
        assert_eq!((first.join().unwrap(), gate.is_closed()), (GateTask::Run, false));
    }

    #[test]
    fn a_machine_that_is_reset_while_a_pause_is_requested_is_paused_after_the_reset() {
        let (gate, ends) = (Arc::new(PauseGate::default()), Arc::default());
        gate.close();
        gate.request_reset();
        let first = vcpu(&gate, 0, &ends);
        assert!(gate.is_reset_due(1));
        gate.restore_vcpus();
        assert_eq!(first.join().unwrap(), GateTask::Reset);
        gate.restored(0);
        let first = vcpu(&gate, 0, &ends);
        assert_eq!((gate.is_closed(), gate.settle(1)), (true, [None, Some(MachineStep::Paused)]));
        assert!(gate.open());
        assert_eq!(first.join().unwrap(), GateTask::Run);
    }

    #[test]
    fn the_end_of_a_pause_leaves_the_gate_closed_for_a_reset() {
        let gate = PauseGate::default();
        gate.close();
        gate.request_reset();
        assert!(gate.open() && gate.is_closed());
        gate.restore_vcpus();
        assert!(gate.is_closed(), "no vCPU is reset");
    }

    #[test]
    fn each_vcpu_of_a_paused_machine_saves_its_state_and_a_resume_waits_for_the_end_of_that() {
        let (gate, ends) = (Arc::new(PauseGate::default()), Arc::default());
        gate.close();
        assert!(!gate.begin_save(2), "it is not paused yet");
        let vcpus = [0, 1].map(|index| vcpu(&gate, index, &ends));
        gate.settle(2);
        assert!(gate.begin_save(2));
        let saves = thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.save_vcpus()
        });
        for (index, vcpu) in (0..).zip(vcpus) {
            assert_eq!(vcpu.join().unwrap(), GateTask::Save);
            gate.saved(index);
        }
        saves.join().unwrap();
        let first = vcpu(&gate, 0, &ends);
        assert!(gate.open() && gate.is_closed(), "its file is not written");
        gate.end_save();
        assert_eq!((first.join().unwrap(), gate.is_closed()), (GateTask::Run, false));
        gate.request_reset();
        assert!(!gate.begin_save(2), "it is not paused");
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
