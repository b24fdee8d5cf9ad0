//! `egm-vmm serve`: machines one after another, which the API creates, starts and ends.
//!
//! ```text
//!  wait ── vm.boot ─► launch ─► machine ─► its end ─► state in a sealed file ─► execution of this program ─► wait
//!    └── vmm.shutdown, signal ─► the end
//! ```
//! Each machine begins in an address space without a trace of the one before. The socket stays open meanwhile, so that
//! clients wait in it.

mod file;
mod handover;
mod served;
mod signals;

use std::cell::RefCell;
use std::ffi::CStr;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use egm_device::trust::parse_name;
use egm_report::show::Screen;
use rustix::process::{Signal, getpid, kill_process};

pub(super) use self::file::PathOrDescriptor;
use self::handover::{Inherited, InheritedMachine, Leaving, Left};
use self::served::Served;
use self::signals::Signals;
use super::run::{Hooks, launch, raise_open_files, report};
use super::{Outcome, print_message};
use crate::api::{
    CloudEvent, Created, EventMonitor, Order, Published, RestoreOrder, SavedCycle, Server, Upgrades,
    with_causes,
};
use crate::config::{OnReset, Overrides};
use crate::error::{Blame, Chain, Remedy, Report};
use crate::inherited;
use crate::launch::{Confined, Restored, rehearse};
use crate::listener::{Listener, leave_files};
use crate::machine::{self, ExitReason, Hold, monotonic_now};
use crate::reexec::{self, Holder};
use crate::reserve::Broker;
use crate::sandbox::Mode;
use crate::snapshot::{RestoreReason, StoredSnapshot};

/// The option of an execution that takes over the socket and the state of the one before; see [`reexec::execute`].
const RESUME: &str = "--resume";

/// Serve machines one after another, which clients create, start and end
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Listen for "egm-vmm ctl" and other HTTP clients at this socket, which only this user and root may use
    #[arg(long, value_name = "PATH")]
    api: PathBuf,
    #[command(flatten)]
    shared: SharedArgs,
    /// Refused, with the remedy
    #[arg(long, value_name = "NAME", hide = true)]
    user: Option<String>,
    /// Refused, with the remedy
    #[arg(long, value_name = "MODE", hide = true)]
    sandbox: Option<String>,
}

/// Options that `egm-vmm serve` and `cloud-hypervisor` share.
#[derive(Debug, clap::Args)]
pub(super) struct SharedArgs {
    /// Trust domain of the machines: machines of one domain share a region that a GPU reaches
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    trust_domain: Option<String>,
    /// Get EGM slices from the broker at this socket (required unless you are root)
    #[arg(long, value_name = "SOCKET")]
    broker: Option<PathBuf>,
    /// VM class that the broker's policy applies to
    #[arg(long, value_name = "CLASS", requires = "broker")]
    class: Option<String>,
    /// Wait until the broker has enough free memory
    #[arg(long, requires = "broker")]
    wait: bool,
    /// Take over the socket and the state of the execution before this one
    #[arg(long, hide = true)]
    pub(super) resume: bool,
}

/// A program that serves machines.
pub(super) struct Service<'a> {
    /// Name of the process.
    pub(super) name: &'static CStr,
    pub(super) api: PathOrDescriptor,
    pub(super) shared: &'a SharedArgs,
    /// File for events by cloud-hypervisor's names.
    pub(super) event_monitor: Option<PathOrDescriptor>,
    /// Whether the program ends with a guest that ends by itself, as cloud-hypervisor does.
    pub(super) ends_with_guest: bool,
}

const EXAMPLE: &str = "\
Example: a machine that is created, started, started again and removed

  egm-vmm serve --api vm.sock &
  egm-vmm ctl --api vm.sock create vm.json
  egm-vmm ctl --api vm.sock boot
  egm-vmm ctl --api vm.sock reboot
  egm-vmm ctl --api vm.sock delete
  egm-vmm ctl --api vm.sock put /api/v1/vmm.shutdown

A machine that ends stays created, and a guest that resets starts again. Paths in a configuration are relative to the \
working directory of this program.

SIGTERM, SIGINT and SIGHUP end the machine after its disks are flushed, and then the program; while a machine starts, \
they end the program at once. SIGPWR presses the guest's power button.

Exit codes:

  0  a signal or the API ended the program
  2  the command line is wrong
  3  the host lacks something
  4  a bug in egm-vmm";

/// Why no machine can be served.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(
        "cannot serve machines of user {name:?}: each one opens its resources with the rights of the start"
    )]
    User { name: String },
    #[error(
        "cannot serve machines in a sandbox: the program executes itself after each one, which no filter permits"
    )]
    Sandbox,
    #[error("cannot serve the API at descriptor {number}")]
    Descriptor { number: RawFd, source: io::Error },
    #[error(
        "cannot serve the API at descriptor {number}: it is not a listening Unix stream socket with a path"
    )]
    Socket { number: RawFd },
    #[error("cannot write events to {to}")]
    Events { to: PathOrDescriptor, source: io::Error },
    #[error("cannot {step}")]
    Step { step: &'static str, source: io::Error },
}

impl Report for ServeError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::User { .. } => Blame::Configuration.help(
                "start egm-vmm serve as that user, with --broker SOCKET for its slices,\n\
                 or use egm-vmm run FILE --user NAME",
            ),
            Self::Sandbox => {
                Blame::Configuration.help("leave --sandbox out, or use egm-vmm run FILE --sandbox strict")
            }
            Self::Descriptor { .. } | Self::Socket { .. } => Blame::Configuration
                .help("pass a stream socket that is bound to a path and listens, or name a path"),
            Self::Events { .. } => Blame::Configuration.help("name a file or a pipe that you may write"),
            Self::Step { .. } => Blame::Host.into(),
        }
    }
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |source| ServeError::Step { step, source }
}

impl Args {
    fn check(&self) -> Result<(), ServeError> {
        match (&self.user, &self.sandbox) {
            (Some(name), _) => Err(ServeError::User { name: name.clone() }),
            (None, Some(mode)) if mode != "off" => Err(ServeError::Sandbox),
            _ => Ok(()),
        }
    }
}

impl SharedArgs {
    fn broker(&self) -> Option<Broker> {
        let socket = self.broker.clone()?;
        Some(Broker { socket, class: self.class.clone(), wait: self.wait })
    }
}

impl Service<'_> {
    /// The first execution's socket and file for events, without a machine.
    fn begin(&self) -> Result<(Inherited, Signals), Box<dyn Report>> {
        // A named pipe waits for its reader; until then signals end the program at once.
        let event_monitor = self.event_monitor.as_ref().map(|to| {
            let opened = to.open().and_then(|file| EventMonitor::new(file, Duration::ZERO));
            opened.map_err(|source| ServeError::Events { to: to.clone(), source })
        });
        let event_monitor = event_monitor.transpose()?;
        let signals = Signals::new().map_err(failed("handle signals"))?;
        let listener = match &self.api {
            PathOrDescriptor::Path(path) => Server::listen(path)?,
            PathOrDescriptor::Descriptor(number) => {
                let number = *number;
                let socket = inherited::descriptor(number)
                    .map_err(|source| ServeError::Descriptor { number, source })?;
                Listener::inherited(socket).map_err(|_| ServeError::Socket { number })?
            }
        };
        if let Some(monitor) = &event_monitor {
            monitor.write(CloudEvent::Starting);
        }
        let cycle = SavedCycle::default();
        Ok((Inherited { listener, cycle, event_monitor, upgrade: None, machine: None }, signals))
    }

    /// What the execution before this one left; `None` where it was only to be tried, and can be taken over.
    fn resume(&self) -> Result<Option<(Inherited, Signals)>, Box<dyn Report>> {
        let signals = Signals::new().map_err(failed("handle signals"))?;
        reexec::restore_name(self.name);
        let left = handover::inherited(|socket, made| match &self.api {
            PathOrDescriptor::Path(path) => Listener::adopted(socket, path, made),
            PathOrDescriptor::Descriptor(_) => Listener::inherited(socket),
        });
        match left.map_err(failed("take over what the execution before left"))? {
            Left::Serve(inherited) => Ok(Some((*inherited, signals))),
            Left::Rehearse(created, view) => {
                rehearse(&created.spec(&self.overrides())?, &view)?;
                egm_report::show::print(handover::READY);
                Ok(None)
            }
        }
    }

    fn overrides(&self) -> Overrides {
        let trust_domain = self.shared.trust_domain.clone();
        Overrides { trust_domain, default_on_reset: OnReset::Reboot, ..Overrides::default() }
    }

    /// Serves until a client, a signal or a guest ends the program.
    pub(super) fn run(&self) -> Outcome {
        let begun = if self.shared.resume { self.resume()? } else { Some(self.begin()?) };
        let Some((inherited, mut signals)) = begun else { return Ok(ExitCode::SUCCESS) };
        raise_open_files();
        let Inherited { listener, cycle, event_monitor, upgrade, machine: taken } = inherited;
        let no_descriptor = failed("make an event descriptor");
        let machine = Published::serving(listener.path(), cycle).map_err(&no_descriptor)?;
        let machine = machine.with(event_monitor, self.ends_with_guest);
        let machine = machine.with_upgrades(Upgrades::new(upgrade, handover::rehearse));
        machine.announce().map_err(no_descriptor)?;
        let machine = Arc::new(machine);
        let outcome = self.serve(listener, taken, &machine, &mut signals);
        machine.note_program_end();
        outcome
    }

    /// Serves until the program ends, first with the machine `taken` over, if there is one. Does not return when the program
    /// executes itself for the next machine.
    fn serve(
        &self,
        listener: Listener,
        taken: Option<InheritedMachine>,
        machine: &Arc<Published>,
        signals: &mut Signals,
    ) -> Outcome {
        let server = RefCell::new(Some(Server::serve(listener, Arc::clone(machine))?));
        let (created, restore) = loop {
            match machine.order() {
                Order::End => return Ok(ExitCode::SUCCESS),
                Order::Wait if signals.is_end_requested() => {
                    signals.set_starting(true); // a second one ends a program that waits for the storage of a request
                    return Ok(ExitCode::SUCCESS);
                }
                Order::Wait => signals.wait_with(machine.orders()).map_err(failed("wait for requests"))?,
                Order::Boot(created) => break (created, None),
                Order::Restore(created, restore) => break (created, Some(restore)),
            }
        };
        signals.set_starting(true);
        // A signal before that is there now, and a later one ends the process.
        if taken.is_none() && signals.is_end_requested() {
            machine.note_end(None);
            return Ok(ExitCode::SUCCESS);
        }
        let is_restored = restore.is_some() || taken.is_some();
        machine.note(if is_restored { CloudEvent::Restoring } else { CloudEvent::Booting });
        let served = Served { server: &server, machine, signals };
        let outcome = self.run_machine(&created, restore.as_deref(), taken, &served);
        signals.set_starting(false);
        let outcome = outcome.inspect_err(|error| machine.failed(error.as_ref()));
        machine.end_upgrade(Some("the machine ended".to_owned()), None);
        // From now on clients wait in the socket, and signals in the kernel.
        let listener = server.take().and_then(Server::into_listener);
        signals.block().map_err(failed("block signals"))?;
        let saved = machine.saved().filter(|_| !signals.is_end_requested());
        machine.note_end(saved.as_ref());
        let (Some(listener), Some(cycle)) = (listener, saved) else { return outcome };
        if let Err(error) = &outcome {
            print_message(Chain(error.as_ref()).on(Screen::of_stderr()));
        }
        let error = Leaving { listener: &listener, machine }.again(cycle);
        Err(failed("execute this program again")(error).into())
    }

    /// Starts the machine of `created`, with the snapshot of `restore` or the state of the machine `taken` over if there is one,
    /// and runs it to its end.
    fn run_machine(
        &self,
        created: &Created,
        restore: Option<&RestoreOrder>,
        taken: Option<InheritedMachine>,
        served: &Served<'_>,
    ) -> Outcome {
        let Served { machine, signals, .. } = served;
        machine.begin_start();
        let restore = restore.map(|RestoreOrder { folder, copy, resume }| {
            let snapshot = StoredSnapshot::open(folder)?;
            if !created.is_of(snapshot.machine()) {
                return Err(RestoreReason::Changed { name: "machine.json" }.of(folder));
            }
            Restored::new(snapshot, *copy, *resume)
        });
        let mut restore = restore.transpose()?;
        let taken = RefCell::new(taken);
        leave_files(taken.borrow().is_some());
        let state_published = || {
            leave_files(false);
            // From here on the machine's parts have its files.
            if let Some(InheritedMachine { holder, runs, paused, failed, .. }) = taken.take() {
                let pause = runs.then(|| monotonic_now().saturating_sub(paused));
                let machine = Arc::clone(machine);
                // Not before: a further execution would not wait for the holder.
                Holder::release(holder, move || machine.end_upgrade(failed, pause));
            }
        };
        let started = || {
            let has_waited = signals.is_received();
            signals.set_starting(false);
            // One that waited over the execution ends the machine now, in order.
            if has_waited {
                let _ = kill_process(getpid(), Signal::TERM);
            }
        };
        let hand_over = |program: &Path, hold: Hold<'_>| served.hand_over(program, hold);
        let hooks = Hooks { started: &started, state_published: &state_published, hand_over: &hand_over };
        let launched = (|| {
            if let Some(taken) = &*taken.borrow() {
                restore = Some(taken.restored()?);
            }
            let spec = created.spec(&self.overrides())?;
            let confined = Confined::new(None, None, Mode::Off)?;
            machine.stage("configuration");
            let broker = self.shared.broker();
            launch(&spec, broker.as_ref(), confined, restore, machine, &hooks)
        })();
        let why = match &launched {
            Err(error) => Some(with_causes(error.as_ref())),
            Ok((machine::Ended { reason: ExitReason::Signal(_) | ExitReason::Requested, .. }, _)) => None,
            Ok((ended, _)) => Some(ended.reason.to_string()),
        };
        // Still here where the guest did not run.
        if let (Some(taken), Some(why)) = (taken.take(), why) {
            served.give_back(taken, why);
        }
        leave_files(false);
        let (ended, reservation) = launched?;
        machine.ended(&ended.reason);
        let outcome = report(ended);
        drop(reservation);
        outcome
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    args.check()?;
    let api = PathOrDescriptor::Path(args.api.clone());
    let shared = &args.shared;
    Service { name: c"egm-vmm", api, shared, event_monitor: None, ends_with_guest: false }.run()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Args {
        Line::parse_from(line.split(' ')).args
    }

    #[test]
    fn what_cannot_last_over_an_execution_is_refused_with_a_remedy() {
        for line in ["serve --api s --user vms", "serve --api s --sandbox strict"] {
            let error = args(line).check().unwrap_err();
            assert_eq!((error.blame(), error.help().is_some()), (Blame::Configuration, true), "{error}");
        }
        assert!(args("serve --api s --sandbox off").check().is_ok());
    }

    #[test]
    fn an_execution_that_takes_over_has_the_option() {
        assert!(!args("serve --api s").shared.resume);
        assert!(args(&format!("serve --api s {RESUME}")).shared.resume);
    }
}
