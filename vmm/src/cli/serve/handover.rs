//! The state that an execution passes to the next one, of this program or of another version.
//!
//! ```text
//!  descriptors: state, listener, [file for events], [machine's state, program before, [end of the holder], files of the machine], taps
//! ```

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use egm_report::program::log::Severity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use super::RESUME;
use crate::api::{Created, EventMonitor, Published, SavedCycle, Upgrade};
use crate::kept::{KeptFiles, KeptName};
use crate::launch::Restored;
use crate::listener::Listener;
use crate::machine::{GuestView, HandedMachine, UpgradeError, guest_view};
use crate::plan::Plan;
use crate::reexec::{self, Holder};
use crate::snapshot::{FORMAT, RestoreReason};

/// Format of [`Handover`] and of the order of its descriptors, raised with each change of either: a program that cannot read the
/// message after its execution cannot give the machine back.
const MESSAGE: u32 = 3;
/// Time that another program has to read the state.
const REHEARSAL: Duration = Duration::from_secs(10);
/// Its answer, so that a program of another kind is none that can.
pub(super) const READY: &str = "egm-vmm takes the machine over\n";
/// Bytes of its messages that are quoted.
const QUOTED: u64 = 500;

/// The state that an execution passes to the next one, beside descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Handover {
    cycle: SavedCycle,
    /// Device and number of the socket's file, where this program made it.
    socket: Option<[u64; 2]>,
    /// Time since the program's start, where there is a file for events.
    uptime: Option<Duration>,
    log_level: Severity,
    upgrade: Option<Upgrade>,
    machine: Option<HandedOver>,
    /// The next execution only tries whether it can take over the machine that its guest knows so.
    rehearsal: Option<Rehearsal>,
}

/// A machine that runs or is paused.
#[derive(Debug, Serialize, Deserialize)]
struct HandedOver {
    files: Vec<KeptName>,
    /// Process number of the [`Holder`].
    holder: Option<i32>,
    runs: bool,
    paused: Duration,
    /// Why this program has it back.
    failed: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Rehearsal {
    message: u32,
    format: u32,
    view: GuestView,
}

/// What an execution begins with.
pub(super) struct Inherited {
    pub(super) listener: Listener,
    pub(super) cycle: SavedCycle,
    pub(super) event_monitor: Option<EventMonitor>,
    pub(super) upgrade: Option<Upgrade>,
    pub(super) machine: Option<InheritedMachine>,
}

/// A machine of the execution before.
pub(super) struct InheritedMachine {
    /// Its state in a file that cannot be changed.
    pub(super) state: File,
    /// The program that handed it over.
    program: OwnedFd,
    /// Child that keeps the memory of the old program.
    pub(super) holder: Option<Holder>,
    pub(super) files: KeptFiles,
    pub(super) runs: bool,
    pub(super) paused: Duration,
    /// Why that program has it back.
    pub(super) failed: Option<String>,
}

impl InheritedMachine {
    /// Its state, for the start of a machine.
    ///
    /// # Errors
    /// It is not that of a machine, or descriptors run out.
    pub(super) fn restored(&self) -> Result<Restored, UpgradeError> {
        let failed = |source| UpgradeError::State(RestoreReason::File { name: "the state", source });
        let state = self.state.try_clone().and_then(reexec::unsealed).map_err(failed)?;
        let files = self.files.duplicate().map_err(failed)?;
        Ok(Restored::taken_over(state, files, self.runs))
    }

    fn described(&self) -> HandedOver {
        let Self { holder, files, runs, paused, failed, .. } = self;
        let holder = holder.as_ref().map(Holder::process);
        HandedOver { files: files.names(), holder, runs: *runs, paused: *paused, failed: failed.clone() }
    }

    /// In the order in which [`inherited`] takes them.
    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let first = [self.state.as_fd(), self.program.as_fd()].into_iter();
        first.chain(self.holder.as_ref().and_then(Holder::end)).chain(self.files.descriptors())
    }
}

/// Parts of an execution that the next one needs.
pub(super) struct Leaving<'a> {
    pub(super) listener: &'a Listener,
    pub(super) machine: &'a Published,
}

impl Leaving<'_> {
    /// Executes this program for the machine of `cycle`. Returns only when that fails.
    pub(super) fn again(&self, cycle: SavedCycle) -> io::Error {
        self.execute(&reexec::own(), cycle, None)
    }

    /// Executes `program`, which takes `handed` over. Returns only when that fails.
    pub(super) fn hand_over(&self, program: &Path, handed: HandedMachine) -> io::Error {
        let HandedMachine { state, files, runs, paused } = handed;
        let parts = || Ok::<_, io::Error>((reexec::sealed(&state)?, File::open(reexec::own())?));
        let (state, own) = match parts() {
            Ok((state, own)) => (state, OwnedFd::from(own)),
            Err(error) => return error,
        };
        let holder = Holder::start();
        let holder = holder.inspect_err(|error| {
            tracing::warn!(
                "cannot keep the old memory in a child: {error}; the guest waits about 1 ms longer for each GiB"
            );
        });
        let (holder, failed) = (holder.ok(), None);
        self.carry(program, &InheritedMachine { state, program: own, holder, files, runs, paused, failed })
    }

    /// Executes the program that handed `machine` over, because this one cannot have it. Returns only when that fails.
    pub(super) fn give_back(&self, machine: &InheritedMachine) -> io::Error {
        let path = PathBuf::from(format!("/proc/self/fd/{}", machine.program.as_raw_fd()));
        self.carry(&path, machine)
    }

    fn carry(&self, program: &Path, machine: &InheritedMachine) -> io::Error {
        match self.machine.running_cycle() {
            Some(cycle) => self.execute(program, cycle, Some(machine)),
            None => io::ErrorKind::Unsupported.into(),
        }
    }

    fn execute(&self, program: &Path, cycle: SavedCycle, machine: Option<&InheritedMachine>) -> io::Error {
        let monitor = self.machine.monitor();
        let handover = Handover {
            cycle,
            socket: self.listener.made(),
            uptime: monitor.map(EventMonitor::uptime),
            log_level: Severity::least(),
            upgrade: self.machine.upgrades().last(),
            machine: machine.map(InheritedMachine::described),
            rehearsal: None,
        };
        let state = match reexec::sealed(&handover) {
            Ok(state) => state,
            Err(error) => return error,
        };
        let descriptors = [state.as_fd(), self.listener.as_fd()].into_iter();
        let descriptors = descriptors.chain(monitor.map(|monitor| monitor.file().as_fd()));
        let descriptors = descriptors.chain(machine.into_iter().flat_map(InheritedMachine::descriptors));
        let taps = handover.cycle.taps().map(|tap| tap.as_fd());
        reexec::execute(program, RESUME, &descriptors.chain(taps).collect::<Vec<_>>())
    }
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// What the execution before this one left.
pub(super) enum Left {
    Serve(Box<Inherited>),
    /// To be tried only: the configuration of the machine, and what its guest knows.
    Rehearse(Box<Created>, GuestView),
}

/// Takes over what the execution before this one left; `listener` makes the listener of its socket.
///
/// # Errors
/// Nothing was left, or not by a program like this one.
pub(super) fn inherited(
    listener: impl FnOnce(OwnedFd, Option<[u64; 2]>) -> io::Result<Listener>,
) -> io::Result<Left> {
    let mut passed = reexec::inherited()?.into_iter();
    let state = passed.next().ok_or_else(invalid)?;
    let Handover { cycle, socket: made, uptime, log_level, upgrade, machine, rehearsal } =
        reexec::unsealed(state.into())?;
    if let Some(Rehearsal { message, format, view }) = rehearsal {
        if (message, format) != (MESSAGE, FORMAT) {
            let what = format!(
                "it has formats {message} and {format}, and this program reads {MESSAGE} and {FORMAT}"
            );
            return Err(io::Error::other(what));
        }
        let created = cycle.with_taps(passed.collect()).into_created().ok_or_else(invalid)?;
        return Ok(Left::Rehearse(Box::new(created), view));
    }
    log_level.set_least();
    let listener = listener(passed.next().ok_or_else(invalid)?, made)?;
    let event_monitor = uptime
        .and_then(|uptime| Some((passed.next()?, uptime)))
        .map(|(file, uptime)| EventMonitor::new(file.into(), uptime));
    let event_monitor = event_monitor.transpose()?;
    let machine = machine.map(|HandedOver { files, holder, runs, paused, failed }| {
        let (Some(state), Some(program)) = (passed.next(), passed.next()) else { return Err(invalid()) };
        let holder = holder.and_then(|process| Holder::inherited(process, passed.next()?));
        let files = KeptFiles::received(files, &mut passed)?;
        Ok(InheritedMachine { state: state.into(), program, holder, files, runs, paused, failed })
    });
    let machine = machine.transpose()?;
    let cycle = cycle.with_taps(passed.collect());
    Ok(Left::Serve(Box::new(Inherited { listener, cycle, event_monitor, upgrade, machine })))
}

/// Has `program` try whether it can take over the machine of `cycle` and `plan`.
///
/// # Errors
/// [`UpgradeError`]: it cannot, or it is no such program.
pub(super) fn rehearse(program: &Path, cycle: &SavedCycle, plan: &Plan) -> Result<(), UpgradeError> {
    let failed = |source| UpgradeError::Execute { program: program.to_owned(), source };
    let (socket, uptime, upgrade, machine, log_level) = (None, None, None, None, Severity::least());
    let rehearsal = Some(Rehearsal { message: MESSAGE, format: FORMAT, view: guest_view(plan) });
    let cycle = cycle.clone();
    let handover = Handover { cycle, socket, uptime, log_level, upgrade, machine, rehearsal };
    let state = reexec::sealed(&handover).map_err(failed)?;
    let taps = handover.cycle.taps().map(|tap| tap.as_fd());
    let descriptors: Vec<_> = [state.as_fd()].into_iter().chain(taps).collect();
    let refusal = reexec::command(program, RESUME, &descriptors).and_then(refusal).map_err(failed)?;
    refusal.map_or(Ok(()), |reason| Err(UpgradeError::Refused { program: program.to_owned(), reason }))
}

/// Runs `command`, and returns why it fails, if it does.
fn refusal(mut command: Command) -> io::Result<Option<String>> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let ended = ends_in_time(&child);
    if !matches!(ended, Ok(true)) {
        let _ = child.kill(); // it may end by itself now
    }
    let status = child.wait()?;
    if !ended? {
        return Ok(Some(format!("it did not answer within {} s", REHEARSAL.as_secs())));
    }
    let (answer, text) = (waiting(child.stdout.take())?, waiting(child.stderr.take())?);
    if status.success() && answer == READY.as_bytes() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("help: "));
    let text = lines.collect::<Vec<_>>().join("; ");
    Ok(Some(match text.trim_start_matches("error: ") {
        "" => format!("it is no egm-vmm that can take a machine over ({status})"),
        text => egm_address::Printable(text).to_string(),
    }))
}

/// Bytes that wait in `pipe`: descendants of the program may have its other end still.
fn waiting(pipe: Option<impl AsFd + Read>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let Some(pipe) = pipe else { return Ok(bytes) };
    rustix::io::ioctl_fionbio(&pipe, true)?;
    match pipe.take(QUOTED).read_to_end(&mut bytes) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(bytes),
    }
}

fn ends_in_time(child: &Child) -> io::Result<bool> {
    let ended = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let start = Instant::now();
    loop {
        let left = REHEARSAL.saturating_sub(start.elapsed());
        let limit = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            polled => return Ok(polled? > 0),
        }
    }
}
