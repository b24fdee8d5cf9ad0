//! Requests that create, start and end the machines of `egm-vmm serve`.

use super::answer::{Answer, Awaited, Response, Status, texts};
use super::cycle::{Created, Cycle, CycleError, Effect, Language, Next};
use super::event_monitor::CloudEvent;
use super::published::{KnownState, Published};
use super::upgrades;
use crate::machine::{Live, PauseState};

/// The remedy in a program with one machine.
pub(super) const SERVE: &str = "start a program that serves machines: egm-vmm serve --api PATH";

/// Creates the machine of `body`.
pub(super) fn create(language: Language, body: &[u8], machine: &Published) -> Answer {
    match machine.state().cycle.as_ref().map(Cycle::check_create) {
        None => return single_machine(),
        Some(Err(error)) => return refused(error),
        Some(Ok(())) => {}
    }
    let Ok(text) = String::from_utf8(body.to_vec()) else {
        let what = "cannot read the configuration: it is not UTF-8";
        return Answer::failure(Status::BadRequest, what, "send JSON");
    };
    match Created::new(language, text, &machine.default_name) {
        Err(errors) => Answer::failures(Status::BadRequest, &texts(&errors)),
        Ok(created) => match machine.change(|cycle| cycle.create(created)) {
            None => single_machine(),
            Some(Err(error)) => refused(error),
            Some(Ok(())) => Answer::done(),
        },
    }
}

/// Starts the machine.
pub(super) fn boot(machine: &Published) -> Response {
    match machine.change(Cycle::boot) {
        None => single_machine().into(),
        Some(Err(error)) => refused(error).into(),
        Some(Ok(())) => Response::Later(Awaited::Start),
    }
}

/// Ends the machine, if there is one, and then takes the step `next`.
pub(super) fn end(next: Next, machine: &Published) -> Response {
    let state = machine.state();
    let Some(cycle) = &state.cycle else { return single_machine().into() };
    if cycle.is_booted() && state.live.is_none() && state.ended.is_none() {
        return starting().into();
    }
    match machine.change(|cycle| cycle.request(next)) {
        None => single_machine().into(),
        Some(Err(error)) => refused(error).into(),
        Some(Ok(Effect::Done)) => {
            if next == Next::Delete && cycle.created().is_some() {
                machine.note(CloudEvent::Deleted);
            }
            Answer::done().into()
        }
        Some(Ok(Effect::Stop)) => {
            if let Some(live) = &state.live {
                live.stop();
            }
            Response::Later(Awaited::End)
        }
    }
}

/// The answer to a waiting client, if it is due. `is_last`: the machine has ended, and the API of this
/// execution ends.
pub(super) fn outcome(awaited: &Awaited, state: &KnownState, is_last: bool) -> Option<Answer> {
    match awaited {
        Awaited::Start if state.live.is_some() => Some(Answer::done()),
        Awaited::Pause => pause_outcome(state),
        Awaited::Restore
            if state
                .live
                .as_ref()
                .is_some_and(|live| !live.is_ending() && live.pause_state() != PauseState::Pausing) =>
        {
            Some(Answer::done())
        }
        Awaited::Upgrade => state.upgrades.outcome().or_else(|| is_last.then(upgrades::unknown)),
        Awaited::Reply(reply) if reply.get().is_some() => reply.get(),
        // The machine goes on in another program.
        Awaited::Reply(_) | Awaited::End if is_last && state.upgrades.is_under_way() => {
            Some(upgrades::unknown())
        }
        Awaited::Reply(_) => is_last.then(unanswered),
        // Its client may request a start again at once, which this execution would refuse.
        _ if !is_last => None,
        Awaited::End => Some(Answer::done()),
        Awaited::Start | Awaited::Restore => Some(match &state.failure {
            Some(texts) => Answer::failures(Status::InternalServerError, texts),
            None => {
                let what = "cannot start the machine: the program ends";
                Answer::failure(Status::InternalServerError, what, "start egm-vmm serve again")
            }
        }),
    }
}

/// The answer to a client that waits for a pause; `None` while a vCPU may be in the guest.
fn pause_outcome(state: &KnownState) -> Option<Answer> {
    let live = state.live.as_ref().filter(|live| !live.is_ending());
    match live.map(Live::pause_state) {
        Some(PauseState::Pausing) => None,
        Some(PauseState::Paused) => Some(Answer::done()),
        Some(PauseState::Running) | None => Some(Answer::failure(
            Status::Conflict,
            "cannot pause the machine: it was resumed meanwhile, or it ends",
            "look at its state: GET /egm/v1/machine",
        )),
    }
}

/// Refuses a request of a machine that is not booted; `None` where one is, or in a program with one machine.
pub(super) fn unbooted(state: &KnownState) -> Option<Answer> {
    state.cycle.as_ref().and_then(|cycle| cycle.check_booted().err()).map(refused)
}

/// The answer where the program has one machine, which starts and ends with it.
pub(super) fn single_machine() -> Answer {
    Answer::failure(Status::NotImplemented, "egm-vmm run has one machine", SERVE)
}

pub(super) fn starting() -> Answer {
    Answer::failure(
        Status::Conflict,
        "the machine does not run yet",
        "wait for the event \"started\", or end the program: kill PID",
    )
}

/// The answer of a machine that ended first.
fn unanswered() -> Answer {
    let what = "the machine ended before it carried the request out";
    Answer::failure(Status::Conflict, what, "start it again")
}

pub(super) fn refused(error: CycleError) -> Answer {
    let (status, what, remedy) = match error {
        CycleError::Exists => (Status::Conflict, "a machine is created already", "use vm.delete first"),
        CycleError::NotCreated => {
            (Status::NotFound, "no machine is created", "use vm.create, or PUT /egm/v1/machine")
        }
        CycleError::NotBooted => (Status::Conflict, "the machine is not started", "use vm.boot"),
        CycleError::Booted => {
            (Status::Conflict, "the machine is started already", "use vm.reboot, or vm.shutdown first")
        }
        CycleError::Ending => (
            Status::Conflict,
            "the machine ends, or has ended",
            "wait for the event \"ready\", and try again",
        ),
    };
    Answer::failure(status, what, remedy)
}
