//! Restrictions of a machine's process, so that a guest that takes over the monitor gains nothing more.
//!
//! ```text
//!  plan ─► parts ─┐
//!                 ├─► program (a filter for each kind of thread) ─┐
//!  table: calls, requests, reasons ───────────────────────────────┤
//!                                                                 ▼
//!  Restrictions: no_new_privs, Landlock, no capabilities ─► each thread confines itself ─► a refused call ends the process
//!                                                    before the first guest instruction     report.rs, sys.rs
//! ```
//! Everything is open by then: no thread opens, connects, starts or executes anything any more, except what [`table`]
//! permits with a reason. Another process returns what the machine took from the host: see [`crate::custody`].

mod calls;
mod compile;
mod error;
mod parts;
mod paths;
mod report;
mod restrictions;
mod sys;
mod table;
mod threads;

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use seccompiler::{BpfProgram, apply_filter_all_threads};
use vmm_sys_util::signal::register_signal_handler;

pub(crate) use self::error::SandboxError;
pub(crate) use self::parts::needs_return;
use self::restrictions::{Failure, Restrictions};
use self::table::{MachinePart, ThreadKind};
use crate::arch::native::system_call::ARCHITECTURE;
use crate::config::Spec;
use crate::plan::Plan;

/// What happens to a system call that a running machine has no use for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Mode {
    /// Nothing: there is no sandbox.
    #[default]
    Off,
    /// The kernel logs it, and carries it out.
    Log,
    /// The machine ends with exit code 4 and a message that names thread and call.
    Strict,
}

impl Mode {
    /// Whether there are filters.
    pub(crate) const fn is_on(self) -> bool {
        !matches!(self, Self::Off)
    }
}

/// The restrictions of a machine that is built and does not run yet.
#[derive(Debug)]
pub(crate) struct Sandbox {
    mode: Mode,
    parts: Vec<MachinePart>,
    /// Restrictions of the process; signal handlers read them.
    restrictions: &'static Restrictions,
    vcpu: BpfProgram,
    event_loop: BpfProgram,
}

/// Descriptors that stay open, and that the plan of a machine does not show.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeptDescriptors<'p> {
    /// Whether there is a broker's connection.
    pub(crate) broker: bool,
    /// Whether there is the file of an EGM device.
    pub(crate) egm_device: bool,
    /// Path of the control API's socket, if there is one.
    pub(crate) api: Option<&'p Path>,
}

impl Sandbox {
    /// The restrictions of the machine of `plan`; `None` with [`Mode::Off`]. Call it once in a process, after the change of
    /// user, when everything is open.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub(crate) fn new(
        mode: Mode,
        plan: &Plan,
        kept: KeptDescriptors<'_>,
    ) -> Result<Option<Arc<Self>>, SandboxError> {
        if !mode.is_on() {
            return Ok(None);
        }
        let strict = mode == Mode::Strict;
        let ruleset = if strict { paths::ruleset(&paths::folders(plan, kept.api))? } else { None };
        if strict && ruleset.is_none() {
            tracing::info!("this kernel has no Landlock: only filters keep the machine from files");
        }
        // Leaked: threads and handlers use it until the process ends.
        let restrictions: &'static Restrictions =
            Box::leak(Box::new(Restrictions { ruleset, drops_capabilities: strict }));
        let parts = parts::of(plan, kept);
        let (vcpu, event_loop) =
            (filter(mode, &parts, ThreadKind::Vcpu)?, filter(mode, &parts, ThreadKind::EventLoop)?);
        sys::keep_allocator_from_files();
        prepare(mode)?;
        Ok(Some(Arc::new(Self { mode, parts, restrictions, vcpu, event_loop })))
    }

    /// Confines all threads of this process but the calling one.
    ///
    /// # Errors
    /// [`SandboxError`]: the machine must not run.
    pub(crate) fn confine_others(&self) -> Result<(), SandboxError> {
        let (mut others, mut known) = (Vec::new(), Vec::new());
        for (thread, kind) in threads::with_kinds(threads::others, threads::NAMING)? {
            known.push(thread.id);
            others.push((thread, filter(self.mode, &self.parts, kind)?));
        }
        threads::confine(others, self.restrictions)?;
        // The parent of a new thread may not have been confined yet.
        match threads::started_since(&known, threads::others()?) {
            Some(thread) => Err(SandboxError::Late { thread }),
            None => Ok(()),
        }
    }

    /// Confines the calling thread, a vCPU.
    ///
    /// # Errors
    /// [`SandboxError`]: the machine must not run.
    pub(crate) fn confine_vcpu(&self) -> Result<(), SandboxError> {
        self.confine(&self.vcpu)
    }

    /// Confines the calling thread, the event loop. Call it last: threads inherit the limits of the one that starts them.
    ///
    /// # Errors
    /// [`SandboxError`]: the machine must not run.
    pub(crate) fn confine_event_loop(&self) -> Result<(), SandboxError> {
        self.confine(&self.event_loop)
    }

    fn confine(&self, filter: &BpfProgram) -> Result<(), SandboxError> {
        self.restrictions.confine(filter).map_err(|Failure { step, source }| {
            let thread = std::thread::current().name().unwrap_or("without a name").to_owned();
            SandboxError::Refused { thread, step: step.action(), source }
        })
    }
}

/// Refuses a machine that cannot run in a sandbox, before anything is reserved for it. `is_returned_here` if this process would
/// have to return its slices.
///
/// # Errors
/// [`SandboxError::Slice`] and [`SandboxError::NoKeeper`].
pub(crate) fn check(mode: Mode, spec: &Spec, is_returned_here: bool) -> Result<(), SandboxError> {
    if !mode.is_on() {
        return Ok(());
    }
    if let Some(id) = parts::slice_device(spec) {
        return Err(SandboxError::Slice { id: id.to_owned() });
    }
    match is_returned_here && needs_return(spec) {
        true => Err(SandboxError::NoKeeper),
        false => Ok(()),
    }
}

/// Keeps all threads from moving a mapping to other bytes of its file, from now on: a slice's file holds all slices of its
/// region. Call it before a thread is confined.
///
/// # Errors
/// [`SandboxError`]: the machine must not run.
pub(crate) fn keep_mappings() -> Result<(), SandboxError> {
    let failed = |source| SandboxError::Prepare { step: "keep mappings as they are", source };
    let filter = compile::kept_mappings(ARCHITECTURE).map_err(|error| failed(io::Error::other(error)))?;
    apply_filter_all_threads(&filter).map_err(|error| failed(io::Error::other(error)))
}

fn filter(mode: Mode, parts: &[MachinePart], kind: ThreadKind) -> Result<BpfProgram, SandboxError> {
    let program = compile::program(kind, parts, std::process::id(), mode, ARCHITECTURE);
    program.map_err(|source| SandboxError::Filter { kind, source })
}

/// Prepares the process: it reports refused calls and, with [`Mode::Strict`], keeps out debuggers of this user.
fn prepare(mode: Mode) -> Result<(), SandboxError> {
    let failed = |step| move |source: io::Error| SandboxError::Prepare { step, source };
    register_signal_handler(libc::SIGSYS, sys::on_refused)
        .map_err(|error| failed("catch refused system calls")(io::Error::from_raw_os_error(error.errno())))?;
    if mode == Mode::Strict {
        // A change of the user may have set it to what `fs.suid_dumpable` has.
        set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .map_err(|errno| failed("keep debuggers from this process")(errno.into()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
