//! Plan plus resources make a machine; the machine runs until there is an [`ExitReason`].
//!
//! ```text
//!            build()             run()                    first reason
//!  Resources ───────► Machine ───────► vCPU threads ═══╗
//!                                      event loop  ════╬══► stop vCPUs ► finish devices ► Ended
//!                                      signals     ════╝     (no guest     (disks are
//!                                                             I/O after)    durable, or named)
//! ```

mod assigned;
mod board;
mod board_state;
mod build;
mod bus;
mod error;
mod exit;
mod finish;
mod grants;
mod hand_over;
mod live;
mod load;
mod pause;
mod pl011;
mod platform;
mod plugged;
mod poison;
mod reset;
mod restore;
mod save;
mod saved;
mod serial;
mod signals;
mod slices;
mod start;
mod tree;
mod vcpu;
mod vcpu_states;
mod virtio;

use std::sync::{Arc, Mutex};

pub use board_state::{BoardState, ClockRegisters, Pl011Registers, SerialRegisters};
pub use build::build;
pub use bus::{Bus, BusDevice, Overlap};
pub use error::BuildError;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
pub(crate) use exit::ExitLatch;
pub use exit::ExitReason;
pub use finish::Unfinished;
pub(crate) use grants::PluggedSlice;
pub use hand_over::UpgradeError;
pub(crate) use hand_over::{HandOver, HandedMachine, Hold, UpgradeRequest, monotonic_now, unsupported};
#[cfg(test)]
pub(crate) use live::LiveParts;
pub use live::{ControlError, DeviceCounters, Live};
pub(crate) use pause::PauseState;
pub(crate) use save::SnapshotRequest;
pub(crate) use saved::{GuestView, MachineState, check_view, guest_view};
pub use tree::TreeError;

use crate::config::Spec;
use crate::hotplug;
use crate::kvm::Vm;
use crate::lock::lock;
use crate::memory::GuestRam;
use crate::sandbox::Sandbox;

/// A part of the event loop.
type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A machine that has not started. Fields are dropped in this order: vCPUs and devices use what comes after them.
pub struct Machine {
    events: EventManager<Subscriber>,
    changes: virtio::Changes,
    vcpus: Vec<vcpu::Vcpu>,
    shared: Arc<vcpu::Shared>,
    devices: finish::RunningDevices,
    hotplug: Option<hotplug::Running>,
    poison: Arc<Mutex<poison::Poison>>,
    live: Live,
    subscribers: Vec<Subscriber>,
    sandbox: Option<Arc<Sandbox>>,
    /// Resets the machine, unless a reset ends it.
    machine_reset: Option<reset::MachineReset>,
    snapshot: save::SnapshotParts,
    first_step: MachineStep,
    vm: Vm,
    ram: GuestRam,
}

/// A step in the life of a machine between its start and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineStep {
    /// The vCPUs run.
    Started,
    /// The machine is in the state of a snapshot, and its vCPUs wait.
    Restored,
    /// The vCPUs wait outside the guest.
    Paused,
    /// The vCPUs run again, or a requested pause is cancelled.
    Resumed,
    /// The guest was reset, and starts again.
    Reset,
    /// A snapshot is being written.
    SnapshotStarted,
    /// A snapshot is complete.
    SnapshotWritten,
}

/// How a machine ended.
#[derive(Debug)]
pub struct Ended {
    /// The reason.
    pub reason: ExitReason,
    /// Devices that could not make the guest's writes durable.
    pub unfinished: Vec<Unfinished>,
    /// Mistakes and failures that the devices counted, in words; `None` when there was none.
    pub counted: Option<String>,
}

impl Machine {
    /// Access from other threads, until it ends.
    pub fn live(&self) -> Live {
        self.live.clone()
    }

    /// Devices that were unplugged for its snapshot: to take and plug in when the guest first runs.
    pub(crate) fn unplugged(&self) -> save::Unplugged {
        Arc::clone(&self.snapshot.origin.unplugged)
    }

    /// Keeps `spec`, of which its plan was made, for snapshots.
    pub(crate) fn with_configuration(mut self, spec: Spec) -> Self {
        self.snapshot.origin.spec = Some(spec);
        self
    }

    /// Confines the machine's threads in `sandbox` before the guest runs.
    pub(crate) fn within(mut self, sandbox: Option<Arc<Sandbox>>) -> Self {
        if sandbox.is_some() {
            lock(&self.poison).leave_ledger();
            self.live.confine();
        }
        self.sandbox = sandbox;
        self
    }

    /// Runs the guest to its end, and calls `step` after each step. On return the vCPUs have stopped, and each device has made
    /// durable what it promised or is in [`Ended::unfinished`].
    pub fn run(self, step: &dyn Fn(MachineStep)) -> Ended {
        self.run_upgradable(step, &unsupported)
    }

    /// As [`Machine::run`], and calls `hand_over` at the request of an upgrade.
    pub(crate) fn run_upgradable(mut self, step: &dyn Fn(MachineStep), hand_over: HandOver<'_>) -> Ended {
        let exit = Arc::clone(&self.shared.exit);
        for subscriber in &self.subscribers {
            self.events.add_subscriber(Arc::clone(subscriber));
        }
        let mut running = Vec::with_capacity(self.vcpus.len());
        let start = Arc::new(start::Start::new(self.sandbox, self.vcpus.len()));
        let begun = vcpu::prepare_kicks().and_then(|()| {
            self.vcpus.into_iter().try_for_each(|vcpu| {
                running.push(vcpu.start(Arc::clone(&self.shared), Arc::clone(&start))?);
                Ok(())
            })
        });
        let begun = begun.and_then(|()| start.go());
        start.cancel();
        if begun.is_ok() {
            lock(&self.devices).iter().for_each(|kept| kept.function.resume_vhost());
            step(self.first_step);
        }
        let buses = [&self.shared.ports, &self.shared.memory];
        let mut reset = |events: &mut EventManager<Subscriber>| match &mut self.machine_reset {
            Some(reset) => reset.carry_out(&self.vm, &exit, buses, events),
            None => Ok(()), // nothing requests one
        };
        let (next, next_upgrade) = (self.live.next_snapshot(), self.live.next_upgrade());
        let parts = save::RunningParts { vm: &self.vm, ram: &self.ram, shared: &self.shared };
        let mut save = |events: &mut EventManager<Subscriber>| {
            let request = lock(&next).take();
            if let Some(SnapshotRequest { folder, unplugged, is_dry_run, reply }) = request {
                if is_dry_run {
                    reply(self.snapshot.dry_run(&folder));
                } else {
                    step(MachineStep::SnapshotStarted);
                    let written = self.snapshot.carry_out(&folder, unplugged, &parts, events);
                    if written.is_ok() {
                        step(MachineStep::SnapshotWritten);
                    }
                    reply(written);
                    let _ = exit.wake().write(1); // its turns took what others woke the event loop for
                }
            }
            self.snapshot.upgrade(&next_upgrade, hand_over, &parts, events);
        };
        let mut duties = Duties { reset: &mut reset, save: &mut save };
        let served = || {
            let reason = serve(&mut self.events, &self.changes, &self.shared, &running, &mut duties, step);
            // A client may end the machine as soon as its pause or resume is answered.
            self.shared.gate.settle(running.len()).into_iter().flatten().for_each(step);
            reason
        };
        exit.set(begun.err().unwrap_or_else(served));
        self.shared.gate.open(); // the vCPUs of a paused machine end, too
        self.live.close(); // before the memory is unmapped: no thread keeps a part of it
        running.into_iter().for_each(vcpu::RunningVcpu::stop);
        // Host functions end first: they write to memory by themselves.
        let functions = self.hotplug.as_mut().map(hotplug::Running::end).unwrap_or_default();
        lock(&self.poison).collect();
        let devices = std::mem::take(&mut *lock(&self.devices));
        let unfinished = finish::finish(&devices, &mut self.events, &exit);
        let counted = finish::counted(&devices, functions);
        if !unfinished.is_empty() {
            // Storage that answers later still writes to guest memory, which must stay mapped until the process ends.
            std::mem::forget((devices, self.ram));
        }
        Ended { reason: exit.reason().cloned().unwrap_or(ExitReason::PoweredOff), unfinished, counted }
    }
}

/// Work on the thread of the event loop, while the vCPUs wait.
struct Duties<'a> {
    reset: &'a mut dyn FnMut(&mut EventManager<Subscriber>) -> Result<(), ExitReason>,
    /// Writes a snapshot, if one is requested.
    save: &'a mut dyn FnMut(&mut EventManager<Subscriber>),
}

fn serve(
    events: &mut EventManager<Subscriber>,
    changes: &virtio::Changes,
    shared: &vcpu::Shared,
    running: &[vcpu::RunningVcpu],
    duties: &mut Duties<'_>,
    step: &dyn Fn(MachineStep),
) -> ExitReason {
    loop {
        if let Some(reason) = shared.exit.reason() {
            return reason.clone();
        }
        match events.run() {
            Ok(_) => {
                changes.carry_out(events);
                for (index, vcpu) in (0..).zip(running) {
                    vcpu.interrupt_until(|| shared.needs_nothing_of(index));
                }
                if shared.gate.is_reset_due(running.len()) {
                    if let Err(reason) = (duties.reset)(events) {
                        return reason;
                    }
                    if shared.exit.is_set() {
                        continue;
                    }
                    shared.gate.restore_vcpus();
                    step(MachineStep::Reset);
                    let _ = shared.exit.wake().write(1); // its turns took what others woke the event loop for
                }
                shared.gate.settle(running.len()).into_iter().flatten().for_each(step);
                (duties.save)(events);
            }
            Err(event_manager::Error::Epoll(error)) if error.errno() == libc::EINTR => {}
            Err(error) => return ExitReason::Internal(format!("the event loop stopped: {error}")),
        }
    }
}

/// Wakes the event loop when the machine ends, is paused or resumed, and when the operator no longer waits.
struct Wake(Arc<ExitLatch>);

impl MutEventSubscriber for Wake {
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        let _ = self.0.wake().read(); // the loop looks at the reason after each turn
    }
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(self.0.wake(), EventSet::IN));
    }
}
