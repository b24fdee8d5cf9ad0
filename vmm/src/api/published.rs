//! The machine of this process as its API reports and controls it, from the program's start to its end.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::events::{Journal, MachineEvent};
use crate::error::{Chain, Report};
use crate::lock::lock;
use crate::machine::{ExitReason, Live};
use crate::plan::Plan;
use crate::reserve::SliceRecord;

/// State of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// Its memory, devices and tables are prepared.
    Starting,
    Running,
    /// Its vCPUs stop and its disks are flushed.
    Ending,
    /// It has ended; its slices are scrubbed and returned.
    Ended,
}

/// A stage of the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Stage {
    pub(super) stage: &'static str,
    pub(super) duration_us: u64,
}

/// A machine, for the thread that runs it and the thread of the API. Neither waits long for the other.
pub(crate) struct Published {
    pub(super) config: PathBuf,
    pub(super) begun: Instant,
    journal: Arc<Journal>,
    state: Mutex<KnownState>,
}

/// What is known so far.
#[derive(Clone, Default)]
pub(super) struct KnownState {
    pub(super) stages: Vec<Stage>,
    /// End of the last stage, since the start.
    marked: Duration,
    pub(super) plan: Option<Arc<Plan>>,
    pub(super) slices: Arc<[SliceRecord]>,
    pub(super) live: Option<Live>,
    pub(super) ended: Option<&'static str>,
}

impl KnownState {
    pub(super) fn phase(&self) -> Phase {
        match &self.live {
            _ if self.ended.is_some() => Phase::Ended,
            None => Phase::Starting,
            Some(live) if live.is_ending() => Phase::Ending,
            Some(_) => Phase::Running,
        }
    }
}

impl Published {
    /// The machine of the configuration file `config`, which starts now.
    pub(crate) fn new(config: PathBuf) -> Self {
        let (journal, state) = (Arc::default(), Mutex::default());
        Self { config, begun: Instant::now(), journal, state }
    }

    /// Events of the machine.
    pub(crate) const fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// `stage` of the start is over.
    pub(crate) fn stage(&self, stage: &'static str) {
        let now = self.begun.elapsed();
        let mut state = lock(&self.state);
        let took = now.saturating_sub(state.marked);
        state.marked = now;
        state.stages.push(Stage { stage, duration_us: microseconds(took) });
    }

    /// The machine has a plan, and its slices.
    pub(crate) fn planned(&self, plan: Plan, slices: Vec<SliceRecord>) {
        let (plan, slices) = (Some(Arc::new(plan)), slices.into());
        let mut state = lock(&self.state);
        state.plan = plan;
        state.slices = slices;
    }

    pub(crate) fn started(&self, live: Live) {
        self.stage("vcpus");
        lock(&self.state).live = Some(live);
        self.journal.publish(&MachineEvent::Started);
    }

    /// The machine has ended.
    pub(crate) fn ended(&self, reason: &ExitReason) {
        lock(&self.state).ended = Some(reason.name());
        self.journal.publish(&MachineEvent::Stopped { reason: reason.name(), text: reason.to_string() });
    }

    /// The program ends with `error`. Reported unless the machine's own end was.
    pub(crate) fn failed(&self, error: &dyn Report) {
        let mut state = lock(&self.state);
        if state.ended.is_none() {
            state.ended = Some("failed");
            drop(state);
            self.journal.publish(&MachineEvent::Failed { text: Chain(error).one_line() });
        }
    }

    /// What is known now.
    pub(super) fn state(&self) -> KnownState {
        lock(&self.state).clone()
    }
}

/// `duration` as a number for programs.
pub(super) fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
