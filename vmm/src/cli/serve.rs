//! `egm-vmm serve`: machines one after another, which the API creates, starts and ends.
//!
//! ```text
//!  wait ── vm.boot ─► launch ─► machine ─► its end ─► state in a sealed file ─► execution of this program ─► wait
//!    └── vmm.shutdown, signal ─► the end
//! ```
//! Each machine begins in an address space without a trace of the one before. The socket stays open meanwhile, so that
//! clients wait in it.

mod signals;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use egm_device::trust::parse_name;
use egm_report::show::Screen;
use serde::{Deserialize, Serialize};

use self::signals::Signals;
use super::Outcome;
use super::run::{launch, raise_open_files, report};
use crate::api::{Created, Order, Published, SavedCycle, Server};
use crate::config::Overrides;
use crate::error::{Blame, Chain, Remedy, Report};
use crate::launch::Confined;
use crate::listener::Listener;
use crate::reexec;
use crate::reserve::Broker;
use crate::sandbox::Mode;

/// The option of an execution that takes over the socket and the state of the one before; see [`reexec::execute`].
const RESUME: &str = "--resume";

/// Serve machines one after another, which clients create, start and end
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Listen for "egm-vmm ctl" and other HTTP clients at this socket, which only this user and root may use
    #[arg(long, value_name = "PATH")]
    api: PathBuf,
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
    /// Refused, with the remedy
    #[arg(long, value_name = "NAME", hide = true)]
    user: Option<String>,
    /// Refused, with the remedy
    #[arg(long, value_name = "MODE", hide = true)]
    sandbox: Option<String>,
    /// Take over the socket and the state of the execution before this one
    #[arg(long, hide = true)]
    resume: bool,
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
            Self::Step { .. } => Blame::Host.into(),
        }
    }
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |source| ServeError::Step { step, source }
}

/// The state that an execution passes to the next one, beside the socket.
#[derive(Debug, Serialize, Deserialize)]
struct Handover {
    cycle: SavedCycle,
    /// Device and number of the socket's file.
    socket: [u64; 2],
}

/// The socket and the life cycle that this execution begins with.
struct Inherited {
    listener: Listener,
    cycle: SavedCycle,
}

impl Args {
    fn check(&self) -> Result<(), ServeError> {
        match (&self.user, &self.sandbox) {
            (Some(name), _) => Err(ServeError::User { name: name.clone() }),
            (None, Some(mode)) if mode != "off" => Err(ServeError::Sandbox),
            _ => Ok(()),
        }
    }

    /// The socket and the state of the execution before this one; a new socket in the first one.
    fn inherit(&self) -> Result<Inherited, Box<dyn Report>> {
        if !self.resume {
            return Ok(Inherited { listener: Server::listen(&self.api)?, cycle: SavedCycle::default() });
        }
        reexec::restore_name();
        let [socket, state] = reexec::inherited().map_err(failed("take over the socket and the state"))?;
        let state: Handover = reexec::unsealed(state.into()).map_err(failed("read the state"))?;
        let listener = Listener::adopted(socket, &self.api, state.socket);
        Ok(Inherited { listener, cycle: state.cycle })
    }

    fn broker(&self) -> Option<Broker> {
        let socket = self.broker.clone()?;
        Some(Broker { socket, class: self.class.clone(), wait: self.wait })
    }

    /// Starts the machine of `created`, and runs it to its end.
    fn run_machine(&self, created: &Created, machine: &Published, signals: &Signals) -> Outcome {
        machine.begin_start();
        let overrides = Overrides { trust_domain: self.trust_domain.clone(), ..Overrides::default() };
        let spec = created.spec(&overrides)?;
        let confined = Confined::new(None, None, Mode::Off)?;
        machine.stage("configuration");
        let broker = self.broker();
        let (ended, reservation) =
            launch(&spec, broker.as_ref(), confined, machine, &|| signals.set_starting(false))?;
        machine.ended(&ended.reason);
        let outcome = report(ended);
        drop(reservation);
        outcome
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    args.check()?;
    let mut signals = Signals::new().map_err(failed("handle signals"))?;
    raise_open_files();
    let Inherited { listener, cycle } = args.inherit()?;
    let machine = Published::serving(&args.api, cycle).map_err(failed("make an event descriptor"))?;
    machine.announce().map_err(failed("make an event descriptor"))?;
    let machine = Arc::new(machine);
    let server = Server::serve(listener, Arc::clone(&machine))?;
    let created = loop {
        match machine.order() {
            Order::End => return Ok(ExitCode::SUCCESS),
            Order::Wait if signals.is_end_requested() => return Ok(ExitCode::SUCCESS),
            Order::Wait => signals.wait_with(machine.orders()).map_err(failed("wait for requests"))?,
            Order::Boot(created) => break created,
        }
    };
    signals.set_starting(true);
    // A signal before that is there now, and a later one ends the process.
    if signals.is_end_requested() {
        return Ok(ExitCode::SUCCESS);
    }
    let outcome = args.run_machine(&created, &machine, &signals);
    signals.set_starting(false);
    let outcome = outcome.inspect_err(|error| machine.failed(error.as_ref()));
    // From now on clients wait in the socket, and signals in the kernel.
    let listener = server.into_listener();
    signals.block().map_err(failed("block signals"))?;
    let (Some(listener), Some(cycle)) = (listener, machine.saved()) else { return outcome };
    if signals.is_end_requested() {
        return outcome;
    }
    if let Err(error) = &outcome {
        eprintln!("{}", Chain(error.as_ref()).on(Screen::of_stderr()));
    }
    let state =
        reexec::sealed(&Handover { cycle, socket: listener.made() }).map_err(failed("keep the state"))?;
    let error = reexec::execute(RESUME, &listener, &state);
    Err(failed("execute this program again")(error).into())
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
        assert!(!args("serve --api s").resume);
        assert!(args(&format!("serve --api s {RESUME}")).resume);
    }
}
