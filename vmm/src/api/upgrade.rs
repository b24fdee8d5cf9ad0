//! Requests of an upgrade: another program takes the running machine over.

use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answer::{Answer, Awaited, Deferred, Response, Status, read, with_causes};
use super::control::{ask, is_dry_run, not_carried_out};
use super::cycle::SavedCycle;
use super::http::Request;
use super::life;
use super::published::{KnownState, Published};
use super::snapshots::{absolute, check_unplugged};
use super::upgrades::{Rehearsal, Upgrade};
use crate::config::DeviceFile;
use crate::machine::{Live, UpgradeError, UpgradeRequest};
use crate::plan::Plan;
use crate::resources::ThreadError;

/// The program that takes the machine over.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewUpgrade {
    /// Absolute path of the program. Default: where this one was started from, which may have another version by now.
    program: Option<String>,
    /// Devices that the machine plugs in when its guest runs, as `GET /egm/v1/devices` has listed them: 30 at most.
    #[serde(default)]
    #[schemars(with = "Vec<DeviceFile>")]
    unplugged: Vec<Value>,
}

/// The file that this program was started from; another one may be there by now.
fn own_program() -> Option<PathBuf> {
    const DELETED: &str = " (deleted)";
    let path = std::fs::read_link("/proc/self/exe").ok()?.into_os_string().into_string().ok()?;
    Some(path.strip_suffix(DELETED).unwrap_or(&path).into())
}

/// Has another program take the machine over, or checks whether it can. Answered before its execution; [`respond`] has the rest.
pub(super) fn begin(request: &Request, machine: &Published) -> Response {
    match order(request, machine) {
        Ok(order) => order.start(machine),
        Err(answer) => answer.into(),
    }
}

/// A request that can be carried out as far as this program is concerned.
struct UpgradeOrder {
    rehearsal: Rehearsal,
    program: PathBuf,
    unplugged: Vec<Value>,
    is_dry_run: bool,
    live: Live,
    cycle: SavedCycle,
    plan: Arc<Plan>,
}

fn order(request: &Request, machine: &Published) -> Result<UpgradeOrder, Answer> {
    let (is_dry_run, body) = (is_dry_run(request)?, &request.body);
    let state = machine.state();
    let rehearsal = state.upgrades.rehearsal.ok_or_else(life::single_machine)?;
    let live = ask(&state, |live| Ok(live.clone()))?;
    let parsed =
        if body.is_empty() { Ok(NewUpgrade::default()) } else { read::<NewUpgrade>("upgrade", body) };
    let NewUpgrade { program, unplugged } = parsed?;
    check_unplugged(&unplugged)?;
    let what = "program: cannot use the path: it is not";
    let given = program.map(|path| absolute(Some(&path), what, "send a path such as /usr/bin/egm-vmm"));
    let unknown = || {
        let what = "cannot find the file that this program was started from";
        Answer::failure(Status::Conflict, what, "send its path as \"program\"")
    };
    let program = given.transpose()?.or_else(own_program).ok_or_else(unknown)?;
    let (cycle, plan) = machine.running_cycle().zip(state.plan.clone()).ok_or_else(life::starting)?;
    Ok(UpgradeOrder { rehearsal, program, unplugged, is_dry_run, live, cycle, plan })
}

impl UpgradeOrder {
    /// Has the program try whether it can take the machine over, on a thread that may wait for it, and then do so.
    fn start(self, machine: &Published) -> Response {
        let (upgrades, is_dry_run) = (machine.upgrades(), self.is_dry_run);
        if !upgrades.begin(Upgrade::to(&self.program), is_dry_run) {
            let what = "an upgrade is under way";
            return Answer::failure(Status::Conflict, what, "wait for its end: GET /egm/v1/upgrade").into();
        }
        let deferred = Deferred::default();
        let (given, journal) = (deferred.clone(), Arc::clone(machine.journal()));
        let reply = move |result: Result<(), UpgradeError>| {
            if is_dry_run || result.is_err() {
                upgrades.end(result.as_ref().err().map(|error| with_causes(error)), None);
            }
            given.set(result.map_or_else(|error| not_carried_out(&error), |()| Answer::done()));
            journal.wake();
        };
        let thread = std::thread::Builder::new().name("upgrade".to_owned());
        match thread.spawn(move || self.carry_out(reply)) {
            Ok(_) => Response::Later(Awaited::Reply(deferred)),
            Err(error) => {
                let what = format!("cannot start a thread: {error}");
                machine.end_upgrade(Some(what.clone()), None);
                Answer::failure(Status::InternalServerError, &what, ThreadError::HELP).into()
            }
        }
    }

    fn carry_out(self, reply: impl FnOnce(Result<(), UpgradeError>) + Send + 'static) {
        let Self { rehearsal, program, unplugged, is_dry_run, live, cycle, plan } = self;
        let reply = Box::new(reply);
        match rehearsal(&program, &cycle, &plan) {
            Ok(()) => live.upgrade(UpgradeRequest { program, unplugged, is_dry_run, reply }),
            Err(error) => reply(Err(error)),
        }
    }
}

/// The last upgrade, once it is over.
pub(super) fn respond(state: &KnownState) -> Response {
    match state.upgrades.last() {
        None => {
            let what = "this program has had no upgrade";
            Answer::failure(Status::NotFound, what, "use PUT /egm/v1/upgrade").into()
        }
        Some(_) => state.upgrades.outcome().map_or(Response::Later(Awaited::Upgrade), Response::Answer),
    }
}
