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
}

/// Whether a program can take over the machine of a life cycle and a plan. It may wait for the program.
pub(crate) type Rehearsal = fn(&Path, &SavedCycle, &Plan) -> Result<(), UpgradeError>;

/// The last upgrade of this process, and whether there can be another one.
#[derive(Default)]
pub(crate) struct Upgrades {
    /// `None` where no program executes another one.
    pub(super) rehearsal: Option<Rehearsal>,
    last: Mutex<Last>,
}

#[derive(Default)]
struct Last {
    upgrade: Option<Upgrade>,
    /// Whether a dry run is under way.
    is_dry_run: bool,
}

impl Upgrades {
    /// The `last` one, which may be under way, and the test of further ones.
    pub(crate) const fn new(last: Option<Upgrade>, rehearsal: Rehearsal) -> Self {
        Self { rehearsal: Some(rehearsal), last: Mutex::new(Last { upgrade: last, is_dry_run: false }) }
    }

    pub(crate) fn last(&self) -> Option<Upgrade> {
        lock(&self.last).upgrade.clone()
    }

    /// The last one as an answer; `None` while it is under way.
    pub(super) fn outcome(&self) -> Option<Answer> {
        let over = self.last().filter(|upgrade| upgrade.state != UpgradeState::UnderWay);
        over.as_ref().map(Answer::json)
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.last().is_some_and(|upgrade| upgrade.state == UpgradeState::UnderWay)
    }

    /// Records the begin of `upgrade`, or of a dry run of it; returns whether no other one is under way.
    pub(super) fn begin(&self, upgrade: Upgrade, is_dry_run: bool) -> bool {
        let mut last = lock(&self.last);
        let is_under_way = |other: &Upgrade| other.state == UpgradeState::UnderWay;
        if last.is_dry_run || last.upgrade.as_ref().is_some_and(is_under_way) {
            return false;
        }
        if is_dry_run {
            last.is_dry_run = true;
        } else {
            last.upgrade = Some(upgrade);
        }
        true
    }

    /// Records the end of the one that is under way: the machine goes on after `pause`, in the old program if it `failed`.
    pub(super) fn end(&self, failed: Option<String>, pause: Option<Duration>) {
        let mut last = lock(&self.last);
        last.is_dry_run = false;
        if let Some(upgrade) = last.upgrade.as_mut().filter(|upgrade| upgrade.state == UpgradeState::UnderWay)
        {
            upgrade.state = if failed.is_some() { UpgradeState::Failed } else { UpgradeState::Done };
            upgrade.reason = failed;
            upgrade.pause_us = pause.and_then(|pause| u64::try_from(pause.as_micros()).ok());
        }
    }
}

/// The answer of the program before, which is executed no more.
pub(super) fn unknown() -> Answer {
    let what = "the program that takes the machine over has the answer";
    Answer::failure(Status::ServiceUnavailable, what, "send the request again")
}
