//! The machine of this process as its API reports and controls it, from the program's start to its end.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::Serialize;
use vmm_sys_util::eventfd::EventFd;

use super::answer::texts;
use super::created::default_name;
use super::cycle::{Cycle, CycleError, Next, Order, SavedCycle};
use super::event_monitor::{CloudEvent, EventMonitor};
use super::events::{Journal, MachineEvent};
use super::upgrades::Upgrades;
use crate::error::{Chain, Report};
use crate::eventfd;
use crate::lock::lock;
use crate::machine::{ExitReason, Live, MachineStep, PauseState};
use crate::plan::Plan;
use crate::reserve::Leases;

/// State of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// No machine is created (`egm-vmm serve`).
    Empty,
    /// Its configuration is there (`egm-vmm serve`).
    Created,
    /// Its memory, devices and tables are prepared.
    Starting,
    Running,
    /// Its vCPUs wait outside the guest.
    Paused,
    /// Its vCPUs stop and its disks are flushed.
    Ending,
    /// It has ended; its slices are scrubbed and returned.
    Ended,
}

/// A stage of the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct Stage {
    pub(super) stage: &'static str,
    pub(super) duration_us: u64,
}

/// A machine, shared by the thread that runs it and the API's thread. Neither waits long for the other.
pub(crate) struct Published {
    /// Its configuration file; `None` where configurations come by the API.
    pub(super) config: Option<PathBuf>,
    /// Name of a machine without one in its configuration.
    pub(super) default_name: String,
    pub(super) begun: Instant,
    journal: Arc<Journal>,
    state: Mutex<KnownState>,
    /// Signalled when the main thread has an order; `None` where it takes none.
    orders: Option<EventFd>,
    /// Gets cloud-hypervisor's events, in a program by that name.
    monitor: Option<EventMonitor>,
}

/// State of a machine as far as it is published.
#[derive(Clone, Default)]
pub(super) struct KnownState {
    pub(super) stages: Vec<Stage>,
    /// End of the last stage, as time since [`Published::begun`].
    marked: Duration,
    pub(super) plan: Option<Arc<Plan>>,
    pub(super) slices: Leases,
    /// Path of the console's pseudo-terminal, if it is one.
    pub(super) terminal: Option<Arc<str>>,
    pub(super) live: Option<Live>,
    pub(super) ended: Option<&'static str>,
    /// `None` in a program with one machine.
    pub(super) cycle: Option<Cycle>,
    /// Why the machine did not start, as texts of an answer.
    pub(super) failure: Option<Arc<[String]>>,
    pub(super) upgrades: Arc<Upgrades>,
}

impl KnownState {
    /// Name of the machine, once its configuration is read.
    pub(super) fn name(&self) -> Option<&str> {
        let created = || self.cycle.as_ref().and_then(Cycle::created).map(|created| created.name.as_str());
        self.plan.as_ref().map(|plan| plan.name.as_str()).or_else(created)
    }

    pub(super) fn phase(&self) -> Phase {
        match (&self.live, &self.cycle) {
            _ if self.ended.is_some() => Phase::Ended,
            (None, Some(cycle)) if cycle.created().is_none() => Phase::Empty,
            (None, Some(cycle)) if !cycle.is_booted() => Phase::Created,
            (None, _) => Phase::Starting,
            (Some(live), _) if live.is_ending() => Phase::Ending,
            (Some(live), _) if live.pause_state() == PauseState::Paused => Phase::Paused,
            (Some(_), _) => Phase::Running,
        }
    }
}

impl Published {
    /// The machine of the configuration file `config`, which starts now.
    pub(crate) fn new(config: PathBuf) -> Self {
        Self {
            config: Some(config),
            default_name: String::new(),
            begun: Instant::now(),
            journal: Arc::default(),
            state: Mutex::default(),
            orders: None,
            monitor: None,
        }
    }

    /// Machines that come and go by the API at `path`, after the end of the execution that left `saved`.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn serving(path: &Path, saved: SavedCycle) -> io::Result<Self> {
        let journal = Arc::new(Journal::after(saved.events));
        let state = KnownState { cycle: Some(Cycle::resumed(saved)), ..KnownState::default() };
        Ok(Self {
            config: None,
            default_name: default_name(path),
            begun: Instant::now(),
            journal,
            state: Mutex::new(state),
            orders: Some(eventfd::new()?),
            monitor: None,
        })
    }

    /// The same with a file for cloud-hypervisor's events. The program `ends_with_guest` that ends by itself.
    pub(crate) fn with(self, monitor: Option<EventMonitor>, ends_with_guest: bool) -> Self {
        if let Some(cycle) = &mut lock(&self.state).cycle {
            cycle.set_ends_with_guest(ends_with_guest);
        }
        Self { monitor, ..self }
    }

    /// The same with `upgrades`.
    pub(crate) fn with_upgrades(self, upgrades: Upgrades) -> Self {
        lock(&self.state).upgrades = Arc::new(upgrades);
        self
    }

    /// The last upgrade of this process, and whether there can be another one.
    pub(crate) fn upgrades(&self) -> Arc<Upgrades> {
        Arc::clone(&lock(&self.state).upgrades)
    }

    /// Records the end of the upgrade that is under way: the machine goes on after `pause`, in the old program if it `failed`.
    pub(crate) fn end_upgrade(&self, failed: Option<String>, pause: Option<Duration>) {
        self.upgrades().end(failed, pause);
        self.journal.wake();
    }

    /// Whether its machine ends.
    pub(crate) fn is_ending(&self) -> bool {
        lock(&self.state).live.as_ref().is_some_and(Live::is_ending)
    }

    /// State for the execution that takes the running machine over; `None` in a program with one machine.
    pub(crate) fn running_cycle(&self) -> Option<SavedCycle> {
        let events = self.journal.published();
        lock(&self.state).cycle.as_ref().map(|cycle| cycle.running_cycle(events))
    }

    pub(crate) const fn monitor(&self) -> Option<&EventMonitor> {
        self.monitor.as_ref()
    }

    /// Writes the end of a machine that ran, before the execution that begins with `next`, to the same file.
    pub(crate) fn note_end(&self, next: Option<&SavedCycle>) {
        let state = self.state();
        let was_running = state.live.is_some() || state.cycle.as_ref().is_some_and(Cycle::is_restart);
        if next.is_some_and(|next| next.boots) {
            self.note(CloudEvent::Rebooting);
        } else if was_running {
            self.note(CloudEvent::Shutdown);
        }
        if next.is_some_and(|next| next.created.is_none()) {
            self.note(CloudEvent::Deleted);
        }
    }

    /// Writes the end of the program to the same file.
    pub(crate) fn note_program_end(&self) {
        if self.state().cycle.as_ref().and_then(Cycle::created).is_some() {
            self.note(CloudEvent::Deleted);
        }
        self.note(CloudEvent::Ending);
    }

    /// Writes `event` to the file for cloud-hypervisor's events, if there is one.
    pub(crate) fn note(&self, event: CloudEvent) {
        if let Some(monitor) = &self.monitor {
            monitor.write(event);
        }
    }

    /// Events of the machine.
    pub(crate) const fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Publishes that the program serves, and how the last machine ended. Must precede all clients: it is the first event of
    /// an execution.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn announce(&self) -> io::Result<()> {
        self.journal.open()?;
        let last = lock(&self.state).cycle.as_ref().and_then(|cycle| cycle.last().cloned());
        let (reason, text) = last.map(|last| (last.reason, last.text)).unzip();
        self.journal.publish(&MachineEvent::Ready { reason, text });
        Ok(())
    }

    /// Readable when [`order`](Self::order) is to be called; `None` where the main thread takes no orders.
    pub(crate) const fn orders(&self) -> Option<&EventFd> {
        self.orders.as_ref()
    }

    /// The main thread's next instruction; resets [`orders`](Self::orders).
    pub(crate) fn order(&self) -> Order {
        if let Some(orders) = &self.orders {
            let _ = orders.read();
        }
        lock(&self.state).cycle.as_ref().map_or(Order::End, Cycle::order)
    }

    /// Changes the life cycle by `change`, and wakes the main thread; `None` in a program with one machine.
    pub(super) fn change<T>(
        &self,
        change: impl FnOnce(&mut Cycle) -> Result<T, CycleError>,
    ) -> Option<Result<T, CycleError>> {
        let changed = lock(&self.state).cycle.as_mut().map(change);
        if let Some(orders) = &self.orders {
            let _ = orders.write(1); // a full counter has woken it already
        }
        changed
    }

    /// Ends the program after its machine, because no client can request anything any more.
    pub(super) fn abandon(&self) {
        let _ = self.change(|cycle| cycle.request(Next::End));
    }

    /// Begins the first stage of the start.
    pub(crate) fn begin_start(&self) {
        lock(&self.state).marked = self.begun.elapsed();
    }

    /// State for the next execution; `None` if the program ends.
    pub(crate) fn saved(&self) -> Option<SavedCycle> {
        let events = self.journal.published();
        lock(&self.state).cycle.as_ref().and_then(|cycle| cycle.saved(events))
    }

    /// Records the end of `stage` of the start.
    pub(crate) fn stage(&self, stage: &'static str) {
        let now = self.begun.elapsed();
        let mut state = lock(&self.state);
        let took = now.saturating_sub(state.marked);
        state.marked = now;
        state.stages.push(Stage { stage, duration_us: microseconds(took) });
    }

    /// Records the machine's plan and slices.
    pub(crate) fn planned(&self, plan: Plan, slices: Leases) {
        let plan = Some(Arc::new(plan));
        let mut state = lock(&self.state);
        state.plan = plan;
        state.slices = slices;
    }

    /// Records the path of the console's pseudo-terminal.
    pub(crate) fn record_terminal(&self, path: &str) {
        lock(&self.state).terminal = Some(path.into());
    }

    /// Publishes `step` of the machine that `live` controls.
    pub(crate) fn step(&self, step: MachineStep, live: &Live) {
        let event = match step {
            MachineStep::Started => {
                self.record_ready(live);
                self.note(CloudEvent::Booted);
                if lock(&self.state).cycle.as_ref().is_some_and(Cycle::is_restart) {
                    self.note(CloudEvent::Rebooted);
                }
                MachineEvent::Started
            }
            MachineStep::Restored => {
                self.record_ready(live);
                self.note(CloudEvent::Restored);
                MachineEvent::Restored
            }
            MachineStep::Paused => {
                self.note(CloudEvent::Paused);
                MachineEvent::Paused
            }
            MachineStep::Resumed => {
                self.note(CloudEvent::Resumed);
                MachineEvent::Resumed
            }
            MachineStep::Reset => {
                self.note(CloudEvent::Rebooting);
                self.note(CloudEvent::Rebooted);
                MachineEvent::Reset
            }
            MachineStep::SnapshotStarted => return self.note(CloudEvent::Snapshotting),
            MachineStep::SnapshotWritten => {
                self.note(CloudEvent::Snapshotted);
                MachineEvent::Snapshot
            }
        };
        self.journal.publish(&event);
    }

    /// Records the end of the start.
    fn record_ready(&self, live: &Live) {
        self.stage("vcpus");
        lock(&self.state).live = Some(live.clone());
    }

    /// Publishes the machine's end.
    pub(crate) fn ended(&self, reason: &ExitReason) {
        let mut state = lock(&self.state);
        state.ended = Some(reason.name());
        if let Some(cycle) = state.cycle.as_mut() {
            cycle.ended(reason);
        }
        drop(state);
        self.journal.publish(&MachineEvent::Stopped { reason: reason.name(), text: reason.to_string() });
    }

    /// Records that the program ends with `error`; publishes it unless the machine's end is published.
    pub(crate) fn failed(&self, error: &dyn Report) {
        let text = Chain(error).one_line();
        let mut state = lock(&self.state);
        if let Some(cycle) = state.cycle.as_mut() {
            cycle.failed(text.clone());
        }
        if state.live.is_none() {
            state.failure = Some(texts(error).into());
        }
        if state.ended.is_none() {
            state.ended = Some("failed");
            drop(state);
            self.journal.publish(&MachineEvent::Failed { text });
        }
    }

    /// A copy of the present state.
    pub(super) fn state(&self) -> KnownState {
        lock(&self.state).clone()
    }
}

/// `duration` in whole microseconds, at most `u64::MAX`.
pub(super) fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
