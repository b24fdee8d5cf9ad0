//! A machine of an unprivileged user or in a sandbox, and the root process that keeps its slices' locks.
//!
//! ```text
//!  keeper (root)                                  machine
//!    spawns ─────────────────────────────────────► takes slices, opens, maps, registers: as root
//!    fetches the locks' descriptors ◄── grants ──── closes the regions' files
//!    forwards signals, waits          ── "taken" ─► closes the locks, becomes the user, runs the guest
//!    scrubs and returns the slices  ◄── its end
//! ```
//! The keeper starts the machine before it has a thread or a descriptor of any region. It reads one message, which the
//! machine sends while it is still root, and nothing afterwards.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_device::lease::Lease;
use egm_device::ledger::{Identity, Ledger, LedgerError, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::region::{Region, Slice};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, kill_process, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::error::{Blame, Chain, Remedy, Report};
use crate::reexec;
use crate::reserve::{Leases, SliceProgress};

/// Signals that the keeper forwards to the machine.
const FORWARDED: [Signal; 5] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPWR, Signal::SIGUSR1];

/// The answer to a machine once the keeper has its locks.
const TAKEN: u8 = b'k';

/// Why a machine and its keeper cannot work together.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub(crate) struct CustodyError {
    step: &'static str,
    source: io::Error,
}

impl Report for CustodyError {
    fn remedy(&self) -> Remedy {
        Blame::Host.into()
    }
}

fn failed<E: Into<io::Error>>(step: &'static str) -> impl Fn(E) -> CustodyError {
    move |error| CustodyError { step, source: error.into() }
}

/// A slice that the keeper returns.
#[derive(Debug, Serialize, Deserialize)]
struct Grant {
    id: String,
    region: Region,
    slice: Slice,
    owner: Owner,
    /// The lock's descriptor, by its number in the machine's process.
    claim: i32,
}

/// The machine's connection to its keeper.
#[derive(Debug)]
pub(crate) struct Keeper {
    stream: UnixStream,
    parent: u32,
}

impl Keeper {
    /// The keeper that started this process with descriptor `number` of its own.
    ///
    /// # Errors
    /// [`CustodyError`]: this process's parent is no keeper.
    pub(crate) fn connect(number: i32) -> Result<Self, CustodyError> {
        reexec::restore_name(c"egm-vmm");
        // The keeper has them blocked, and a process inherits that.
        handled_signals().thread_unblock().map_err(failed("unblock signals"))?;
        let parent = std::os::unix::process::parent_id();
        let stream = fetch(parent, number).map_err(failed("reach the process that started the machine"))?;
        Ok(Self { stream: stream.into(), parent })
    }

    pub(crate) const fn process(&self) -> u32 {
        self.parent
    }

    /// Hands over the locks of this process's slices among `leases`, of a machine that runs as user `uid`; returns when the
    /// keeper has them.
    ///
    /// # Errors
    /// [`CustodyError`].
    pub(crate) fn hand_over(&self, leases: &Leases, uid: u32) -> Result<(), CustodyError> {
        let grants = leases.map_own(|id, lease| Grant {
            id: id.to_owned(),
            region: lease.region().clone(),
            slice: lease.slice().clone(),
            owner: Owner { uid, ..lease.owner().clone() },
            claim: lease.claim().as_raw_fd(),
        });
        self.send(&grants).map_err(failed("leave the slices to the process that returns them"))
    }

    fn send(&self, grants: &[Grant]) -> io::Result<()> {
        let mut line = serde_json::to_vec(grants)?;
        line.push(b'\n');
        (&self.stream).write_all(&line)?;
        let mut answer = [0];
        (&self.stream).read_exact(&mut answer)?;
        if answer == [TAKEN] { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
}

/// The signals that the keeper waits for.
fn handled_signals() -> SigSet {
    FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect()
}

/// A duplicate of descriptor `number` of `process`.
pub(crate) fn fetch(process: u32, number: i32) -> io::Result<std::os::fd::OwnedFd> {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(pidfd_getfd(process, number, PidfdGetfdFlags::empty())?)
}

/// Runs this command line once more as the machine, marked by `option`, and returns its slices at its end.
///
/// # Errors
/// [`CustodyError`], or what stopped the return.
pub(crate) fn keep(option: &str, progress: SliceProgress<'_>) -> Result<ExitCode, Box<dyn Report>> {
    let handled = handled_signals();
    handled.thread_block().map_err(failed("block signals"))?;
    let signals =
        SignalFd::with_flags(&handled, SfdFlags::SFD_CLOEXEC).map_err(failed("wait for signals"))?;
    let (ours, theirs) = UnixStream::pair().map_err(failed("make a socket"))?;
    let mut child = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .arg(format!("{option}={}", theirs.as_raw_fd()))
        .spawn()
        .map_err(failed("start the machine's process"))?;
    let Remains { status, slices } = watch(&mut child, &signals, ours)?;
    drop(theirs);
    return_slices(resume(slices), &handled, progress);
    Ok(code(status))
}

/// Waits for the machine's end.
fn watch(child: &mut Child, signals: &SignalFd, stream: UnixStream) -> Result<Remains, CustodyError> {
    let mut slices = Vec::new();
    let mut stream = Some(stream);
    loop {
        let mut ready = vec![PollFd::new(signals, PollFlags::IN)];
        ready.extend(stream.iter().map(|stream| PollFd::new(stream, PollFlags::IN)));
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed("wait for the machine")(errno)),
        }
        let has_signal = !ready.first().is_none_or(|ready| ready.revents().is_empty());
        let has_message = ready.get(1).is_some_and(|ready| !ready.revents().is_empty());
        if has_message && let Some(stream) = stream.take() {
            slices = receive(child.id(), &stream).unwrap_or_default();
        }
        if has_signal && let Ok(Some(signal)) = signals.read_signal() {
            forward(child, signal.ssi_signo, signal.ssi_code);
        }
        if let Some(status) = child.try_wait().map_err(failed("wait for the machine"))? {
            return Ok(Remains { status, slices });
        }
    }
}

/// A slice, and its lock, which this process holds.
struct LockedSlice {
    grant: Grant,
    claim: File,
}

/// What a machine leaves at its end.
struct Remains {
    status: ExitStatus,
    slices: Vec<LockedSlice>,
}

/// A slice to return, by the id of its backing.
struct OwnedSlice {
    id: String,
    lease: Lease,
}

/// Receives the one message: the slices that the machine leaves, with the locks' descriptors.
fn receive(machine: u32, stream: &UnixStream) -> io::Result<Vec<LockedSlice>> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let grants: Vec<Grant> = serde_json::from_str(&line)?;
    let mut slices = Vec::new();
    for grant in grants {
        let claim = File::from(fetch(machine, grant.claim)?);
        slices.push(LockedSlice { grant, claim });
    }
    let mut stream = stream;
    stream.write_all(&[TAKEN])?;
    Ok(slices)
}

/// Forwards a signal that was sent to this process; a terminal's signals have reached the machine already.
fn forward(child: &Child, signal: u32, code: i32) {
    /// `si_code` of signals that the kernel sends, as for a terminal (`asm-generic/siginfo.h`).
    const SI_KERNEL: i32 = 0x80;
    let number = i32::try_from(signal).ok().filter(|number| *number != libc::SIGCHLD && code != SI_KERNEL);
    let signal = number.and_then(rustix::process::Signal::from_named_raw);
    if let Some(signal) = signal {
        let _ = kill_process(Pid::from_child(child), signal); // it may have ended
    }
}

/// Opens the slices that the machine left; it has no memory of them mapped any more.
fn resume(slices: Vec<LockedSlice>) -> Vec<OwnedSlice> {
    if slices.is_empty() {
        return Vec::new();
    }
    let ledger = match open_ledger(Path::new("/")) {
        Ok(ledger) => ledger,
        Err(error) => {
            tracing::warn!("{}", Chain(&error));
            return Vec::new();
        }
    };
    let mut owned = Vec::new();
    for LockedSlice { grant: Grant { id, region, slice, owner, .. }, claim } in slices {
        match Lease::resume(&ledger, region, slice, owner, claim) {
            Ok(lease) => owned.push(OwnedSlice { id, lease }),
            Err(error) => tracing::warn!("{}", Chain(&error)),
        }
    }
    owned
}

fn open_ledger(root: &Path) -> Result<Ledger, LedgerError> {
    let unknown = |source| LedgerError::Record { step: "read the id of this boot for", source };
    Ledger::open(Paths::below(root), Identity::read(root).map_err(unknown)?)
}

/// Scrubs and returns `slices`; a signal ends the scrub, and the next owner's grant does the rest.
fn return_slices(slices: Vec<OwnedSlice>, blocked: &SigSet, progress: SliceProgress<'_>) {
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let _ = signal_hook::flag::register(signal, Arc::clone(&cancel));
    }
    let _ = blocked.thread_unblock();
    for OwnedSlice { id, lease } in slices {
        let report = |step| progress(&id, step);
        let watch = Watch { progress: &report, cancel: &cancel, ..Watch::unobserved() };
        if let Err(error) = lease.return_slice(&watch) {
            tracing::warn!("{}", Chain(&error));
        }
    }
}

/// The machine's exit code; a signal that ended it is 128 and its number, as shells have it.
fn code(status: ExitStatus) -> ExitCode {
    let signalled = || status.signal().map(|signal| signal.saturating_add(128));
    let code = status.code().or_else(signalled).and_then(|code| u8::try_from(code).ok());
    code.map_or_else(|| Blame::Internal.into(), ExitCode::from)
}
