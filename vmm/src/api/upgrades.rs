//! The last upgrade of a process, over its executions.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::answer::{Answer, Status};
use super::cycle::SavedCycle;
use crate::lock::lock;
use crate::machine::UpgradeError;
use crate::plan::Plan;

/// How far an upgrade is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UpgradeState {
    UnderWay,
    /// The program has the machine.
    Done,
    /// The program does not have the machine; the reason is the cause.
    Failed,
}

/// The last upgrade of this process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Upgrade {
    pub(crate) state: UpgradeState,
    /// Path of the program.
    pub(crate) program: String,
    /// Why it failed, in words.
    pub(crate) reason: Option<String>,
    /// Time between the request of the guest's pause and its end, in microseconds.
    pub(crate) pause_us: Option<u64>,
}

impl Upgrade {
    pub(super) fn to(program: &Path) -> Self {
        let program = program.display().to_string();
        Self { state: UpgradeState::UnderWay, program, reason: None, pause_us: None }
    }

    /// The same once the machine goes on: in the new program, or for the reason `failed` in the old one.
    pub(crate) fn over(self, failed: Option<String>, pause: Option<Duration>) -> Self {
        let state = if failed.is_some() { UpgradeState::Failed } else { UpgradeState::Done };
        Self {
            state,
            reason: failed,
            pause_us: pause.and_then(|pause| u64::try_from(pause.as_micros()).ok()),
            ..self
        }
    }
}

/// Whether a program can take over the machine of a life cycle and a plan. It may wait for the program.
pub(crate) type Rehearsal = fn(&Path, &SavedCycle, &Plan) -> Result<(), UpgradeError>;

/// The last upgrade of this process, and whether there can be another one.
#[derive(Default)]
pub(crate) struct Upgrades {
    /// `None` where no program executes another one.
    pub(super) rehearsal: Option<Rehearsal>,
    last: Mutex<Option<Upgrade>>,
}

impl Upgrades {
    /// The `last` one, which may be under way, and the test of further ones.
    pub(crate) const fn new(last: Option<Upgrade>, rehearsal: Rehearsal) -> Self {
        Self { rehearsal: Some(rehearsal), last: Mutex::new(last) }
    }

    pub(crate) fn last(&self) -> Option<Upgrade> {
        lock(&self.last).clone()
    }

    /// The last one as an answer; `None` while it is under way.
    pub(super) fn outcome(&self) -> Option<Answer> {
        let over = self.last().filter(|upgrade| upgrade.state != UpgradeState::UnderWay);
        over.as_ref().map(Answer::json)
    }

    /// Records the begin of `upgrade`; returns whether no other one is under way.
    pub(super) fn begin(&self, upgrade: Upgrade) -> bool {
        let mut last = lock(&self.last);
        let is_free = last.as_ref().is_none_or(|other| other.state != UpgradeState::UnderWay);
        if is_free {
            *last = Some(upgrade);
        }
        is_free
    }

    /// Records the end of the one that is under way: the machine goes on after `pause`, in the old program if it `failed`.
    pub(super) fn end(&self, failed: Option<String>, pause: Option<Duration>) {
        let mut last = lock(&self.last);
        if let Some(upgrade) = last.take_if(|upgrade| upgrade.state == UpgradeState::UnderWay) {
            *last = Some(upgrade.over(failed, pause));
        }
    }
}

/// The answer of the program before, which is executed no more.
pub(super) fn unknown() -> Answer {
    let what = "the program that takes the machine over has the answer";
    Answer::failure(Status::ServiceUnavailable, what, "send the request again")
}
