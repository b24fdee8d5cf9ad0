//! A running machine for the next execution of the program: its state and its open files, on the thread of the event loop.
//!
//! ```text
//!  request ─► check ─► pause ─► hold, as for a snapshot ─► open files ─► execution ─► restored, with the same memory
//!                                                                            └─ fails ─► the machine goes on
//! ```

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_manager::EventManager;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use super::Subscriber;
use super::finish::RunningDevice;
use super::pause::PauseState;
use super::save::{RunningParts, SnapshotParts, refused};
use super::saved::MachineState;
use crate::error::{Blame, Chain, Remedy, Report};
use crate::kept::{KeptFiles, KeptPart};
use crate::lock::lock;
use crate::snapshot::{RestoreReason, SaveReason};

/// Most files of a machine: a message of an execution has room for some more, and for taps that its configuration names.
const MAX_FILES: usize = 150;

/// Why no other program has taken the machine over. It goes on in this one.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum UpgradeError {
    #[error("cannot hand the machine over: {0}")]
    Save(SaveReason),
    #[error("cannot take the machine over: {0}")]
    State(RestoreReason),
    #[error("cannot execute {}", program.display())]
    Execute { program: PathBuf, source: std::io::Error },
    /// The other program does not take it.
    #[error("cannot upgrade to {}: {reason}", program.display())]
    Refused { program: PathBuf, reason: String },
}

impl Report for UpgradeError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Save(SaveReason::NotPaused) => {
                Blame::Configuration.help("another request changed the machine meanwhile: try again")
            }
            Self::Save(SaveReason::Refused { remedy, .. }) => Blame::Configuration.help(remedy.clone()),
            Self::Save(SaveReason::File { .. }) => {
                Blame::Host.help("raise the program's limit: prlimit --pid PID --nofile=65536")
            }
            Self::Save(SaveReason::Silent { .. }) => {
                Blame::Host.help("look for what is wrong with the storage below it: dmesg")
            }
            Self::Save(_) => Blame::Host.help("the kernel's log may have the reason: dmesg"),
            Self::Execute { .. } => Blame::Configuration
                .help("name an egm-vmm that you may execute: egm-vmm ctl --api SOCKET upgrade --program FILE"),
            Self::State(_) | Self::Refused { .. } => Blame::Configuration.help(
                "use a version that plans the same machine, or shut the guest down and start it with this one",
            ),
        }
    }
}

/// A request to hand the machine over, and the function that gets its first result on the thread of the event loop.
pub(crate) struct UpgradeRequest {
    pub(crate) program: PathBuf,
    /// Devices that were unplugged for it, as entries of `"devices"`: they are plugged in again when the guest runs.
    pub(crate) unplugged: Vec<Value>,
    /// Checks only, as if the devices above had left.
    pub(crate) is_dry_run: bool,
    /// Gets `Ok` before the execution.
    pub(crate) reply: Box<dyn FnOnce(Result<(), UpgradeError>) + Send>,
}

/// A machine that the next execution takes over.
pub(crate) struct HandedMachine {
    pub(crate) state: MachineState,
    pub(crate) files: KeptFiles,
    /// Whether its guest runs; otherwise it is paused.
    pub(crate) runs: bool,
    /// Time of the pause, by CLOCK_MONOTONIC.
    pub(crate) paused: Duration,
}

/// The next request, and since when the machine is paused for it, if it ran before.
pub(crate) type NextUpgrade = Arc<Mutex<Option<Pending>>>;

/// A request that waits for the pause.
pub(crate) struct Pending {
    request: UpgradeRequest,
    begun: Option<Begun>,
}

#[derive(Clone, Copy)]
struct Begun {
    runs: bool,
    paused: Duration,
}

impl From<UpgradeRequest> for Pending {
    fn from(request: UpgradeRequest) -> Self {
        Self { request, begun: None }
    }
}

/// Holds the machine for the other program, once no request can reach it.
pub(crate) type Hold<'a> = &'a mut dyn FnMut() -> Result<HandedMachine, SaveReason>;

/// Executes the program at the path with the machine that is held; returns only when that fails.
pub(crate) type HandOver<'a> = &'a dyn Fn(&Path, Hold<'_>) -> UpgradeError;

/// For a program that executes no other one.
pub(crate) fn unsupported(program: &Path, _: Hold<'_>) -> UpgradeError {
    let source = std::io::ErrorKind::Unsupported.into();
    UpgradeError::Execute { program: program.to_owned(), source }
}

/// Time since an unspecified start, the same for all executions of a process.
pub(crate) fn monotonic_now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}

impl SnapshotParts {
    /// Carries the `next` request out as far as it can be now. Its turns follow each turn of the event loop.
    pub(super) fn upgrade(
        &self,
        next: &NextUpgrade,
        hand_over: HandOver<'_>,
        running: &RunningParts<'_>,
        events: &mut EventManager<Subscriber>,
    ) {
        let Some(Pending { request, begun }) = lock(next).take() else { return };
        let gate = &running.shared.gate;
        match (gate.state(), begun) {
            (state, None) => {
                let leaves = request.is_dry_run && !request.unplugged.is_empty();
                let planned = self.plan.device_addresses();
                let stays = |id: &str| !leaves || planned.contains_key(id);
                let checked = if leaves { self.check_planned() } else { self.check() };
                let checked = checked.and_then(|()| self.keep_files(running, stays));
                let checked = checked.and_then(|_| self.drain_console());
                if request.is_dry_run || checked.is_err() {
                    return (request.reply)(checked.map_err(UpgradeError::Save));
                }
                let (runs, paused) = (state == PauseState::Running && gate.close(), monotonic_now());
                *lock(next) = Some(Pending { request, begun: Some(Begun { runs, paused }) });
                let _ = running.shared.exit.wake().write(1); // the event loop interrupts the vCPUs
            }
            (PauseState::Pausing, begun) => *lock(next) = Some(Pending { request, begun }),
            (PauseState::Running, Some(_)) => (request.reply)(Err(UpgradeError::Save(SaveReason::NotPaused))),
            (PauseState::Paused, Some(begun)) => {
                self.hand_over(request, begun, hand_over, running, events);
                if begun.runs {
                    gate.open();
                }
                let _ = running.shared.exit.wake().write(1); // its turns took what others woke the event loop for
            }
        }
    }

    /// Returns when no other program has taken the machine over.
    fn hand_over(
        &self,
        request: UpgradeRequest,
        begun: Begun,
        hand_over: HandOver<'_>,
        running: &RunningParts<'_>,
        events: &mut EventManager<Subscriber>,
    ) {
        let UpgradeRequest { program, unplugged, reply, .. } = request;
        reply(Ok(()));
        let (mut saving, mut is_held) = (None, false);
        let error = hand_over(&program, &mut || {
            let (held, state) = self.hold(unplugged.clone(), running, events)?;
            saving = Some(held);
            self.drain_console()?;
            self.check()?;
            let files = self.keep_files(running, |_| true)?;
            // The end of a machine that was requested meanwhile comes first.
            if running.shared.exit.is_set() {
                return Err(SaveReason::NotPaused);
            }
            is_held = true;
            let Begun { runs, paused } = begun;
            Ok(HandedMachine { state, files, runs, paused })
        });
        drop(saving);
        tracing::error!("{}", Chain(&error));
        if is_held {
            lock(&self.origin.console).take_terminal();
        }
        lock(&self.origin.unplugged).extend(unplugged);
    }

    /// Waits for the reader of the console.
    fn drain_console(&self) -> Result<(), SaveReason> {
        let drained = lock(&self.origin.console).drain();
        drained.then_some(()).ok_or_else(|| {
            refused("the reader of its console is slow", "read the console's output, and try again")
        })
    }

    /// The open files of the machine and of its devices that stay, by their ids; refuses one that cannot be handed over.
    fn keep_files(
        &self,
        running: &RunningParts<'_>,
        stays: impl Fn(&str) -> bool,
    ) -> Result<KeptFiles, SaveReason> {
        let failed =
            |source| SaveReason::File { step: "cannot duplicate", name: "a descriptor".to_owned(), source };
        let mut files = KeptFiles::default();
        if let Some(id) = running.ram.keep(&self.plan, &mut files).map_err(failed)? {
            return Err(refused(
                format!("memory \"{id}\" is a slice, or private to this execution"),
                "shut the guest down, and start it with the other program",
            ));
        }
        for RunningDevice { id, device, .. } in lock(&self.devices).iter().filter(|kept| stays(&kept.id)) {
            files.add(KeptFiles::device(id), lock(device).kept().map_err(failed)?);
        }
        let boot = KeptPart::of(self.origin.boot.files().iter().map(AsFd::as_fd)).map_err(failed)?;
        files.add(KeptFiles::BOOT.to_owned(), boot);
        files.add(KeptFiles::CONSOLE.to_owned(), lock(&self.origin.console).keep().map_err(failed)?);
        match files.descriptors().count() {
            count if count > MAX_FILES => Err(refused(
                format!("it has {count} open files, and an upgrade passes {MAX_FILES} at most"),
                "start it with fewer queue pairs",
            )),
            _ => Ok(files),
        }
    }
}
