//! `egm-device carve hold`: a process that keeps locks for a command that must not have them.
//!
//! A descriptor of a lock is the right to release it, and a broker's connection is the right to send requests as the
//! user that opened it. The command, which may run as a tenant, inherits one end of a pipe instead: as long as it has
//! that, the slice stays in use, also when the process that started it is killed.

use std::io::{self, PipeWriter};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};

use egm_report::program::Outcome;

/// Keep inherited descriptors until standard input ends
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn run(_: &Args) -> Outcome {
    // An error ends it, too: there is no pipe left to wait for.
    let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
    Ok(ExitCode::SUCCESS)
}

/// A process that keeps descriptors until this process, and all that inherit from it from now on, have ended.
pub(super) struct Holder {
    process: Child,
    _alive: PipeWriter,
}

impl Holder {
    /// Starts a process that keeps `descriptors`.
    pub(super) fn start(descriptors: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let (read, write) = io::pipe()?;
        let mut inherited = Vec::new();
        for descriptor in descriptors {
            let copy = descriptor.try_clone_to_owned()?;
            fcntl_setfd(&copy, FdFlags::empty())?;
            inherited.push(copy);
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(["carve", "hold"]).stdin(read).stdout(Stdio::null()).stderr(Stdio::null());
        // A signal of the terminal is for the command.
        let process = command.process_group(0).spawn()?;
        if egm_address::fault!("held-descriptors-inherited") {
            inherited.into_iter().for_each(std::mem::forget);
        } else {
            drop(inherited);
        }
        fcntl_setfd(&write, FdFlags::empty())?;
        Ok(Self { process, _alive: write })
    }

    /// Ends it: its descriptors are closed when this returns.
    pub(super) fn end(mut self) -> io::Result<()> {
        self.process.kill()?;
        self.process.wait().map(drop)
    }
}
