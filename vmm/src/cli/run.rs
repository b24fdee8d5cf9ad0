//! `egm-vmm run`: from a configuration file to a guest that has ended.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use egm_address::Printable;
use egm_device::progress::Bars;
use egm_device::trust::parse_name;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use super::{Outcome, print_message};
use crate::api::{Published, Server};
use crate::config::{self, OnReset, Overrides, Spec};
use crate::custody;
use crate::error::{Chain, Remedy, Report};
use crate::launch::{Confined, Reservation, Reserved, Restored};
use crate::listener::remove_stale;
use crate::machine::{self, ExitReason, HandOver, MachineStep, unsupported};
use crate::memory::Beginning;
use crate::reserve::Broker;
use crate::sandbox::{self, Mode};
use crate::snapshot::{MACHINE, RestoreError, RestoreReason, StoredSnapshot};
use crate::user::User;

/// Start the virtual machine of a configuration file and wait for its end
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Configuration of the machine ("-" is standard input); "egm-vmm schema" describes every key
    #[arg(value_name = "FILE", required_unless_present = "restore")]
    file: Option<PathBuf>,
    /// Make the machine of this snapshot, which runs on from there; without --prefault the folder must stay as it is until the
    /// machine ends
    #[arg(long, value_name = "DIR", conflicts_with_all = ["file", "kernel", "initramfs", "append"])]
    restore: Option<PathBuf>,
    /// Copy all memory of the snapshot in before the guest runs [default: read it as the guest touches it]; DIR may be deleted then
    #[arg(long, requires = "restore")]
    prefault: bool,
    /// Kernel, instead of "boot"."kernel" of the configuration
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Initial RAM disk, instead of "boot"."initramfs" of the configuration
    #[arg(long, value_name = "FILE")]
    initramfs: Option<PathBuf>,
    /// Text to add to "boot"."cmdline" of the configuration
    #[arg(long, value_name = "TEXT")]
    append: Option<String>,
    /// Become this user before the guest runs, by name or number (root only)
    ///
    /// Root opens and maps the machine's memory and opens the files that FILE names, so FILE must be trusted. Then all
    /// descriptors of regions are closed and all privileges are dropped; a second process of root returns the slices.
    /// Excludes --broker, because the machine would keep root's connection to it. An unprivileged user needs only --broker.
    #[arg(long, value_name = "NAME", conflicts_with = if egm_address::fault!("user-with-broker") { "class" } else { "broker" })]
    user: Option<String>,
    /// Restrict this process while the guest runs: strict, log or off
    ///
    /// strict: each thread may make the few system calls that it needs, no file is opened, no program is started, and no
    /// capability is kept. Another call ends the machine with exit code 4, and is named. A second process of root returns
    /// slices. log: the kernel logs calls that strict would refuse. Some scenarios of the lab fail
    /// with strict.
    #[arg(long, value_name = "MODE", value_enum, default_value_t, hide_possible_values = true)]
    sandbox: Mode,
    /// Descriptor of the process that returns the slices; it starts this one
    #[arg(long, hide = true)]
    keeper: Option<i32>,
    /// Trust domain of the machine: machines of one domain share a region that a GPU reaches
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
    /// Listen for "egm-vmm ctl" and other HTTP clients at this socket, which only this user and root may use
    #[arg(long, value_name = "PATH")]
    api: Option<PathBuf>,
}

impl Args {
    fn overrides(&self) -> Overrides {
        Overrides {
            kernel: self.kernel.clone(),
            initramfs: self.initramfs.clone(),
            append: self.append.clone(),
            trust_domain: self.trust_domain.clone(),
            default_on_reset: OnReset::Exit,
        }
    }

    /// The file with the configuration.
    fn file(&self) -> PathBuf {
        let restored = || self.restore.as_deref().map(|folder| folder.join(MACHINE));
        self.file.clone().or_else(restored).unwrap_or_default()
    }

    fn read(&self) -> Result<Described, Box<dyn Report>> {
        let snapshot = self.restore.as_deref().map(StoredSnapshot::open).transpose()?;
        let spec = match &snapshot {
            Some(snapshot) => spec_of(snapshot, &self.overrides())?,
            None => config::load_with(&self.file(), &self.overrides())?,
        };
        Ok(Described { spec, snapshot })
    }

    /// Whether another process returns the slices of the machine, if it has any: in a sandbox no file of the ledger is
    /// opened. That process starts this one again, which reads the configuration then.
    fn may_need_keeper(&self) -> bool {
        let is_read_once = self.file().as_os_str() == "-";
        let has_own_slices = self.broker.is_none() && geteuid().is_root();
        self.keeper.is_none() && self.sandbox.is_on() && has_own_slices && !is_read_once
    }

    /// Runs this command line once more, as the machine, and returns its slices at its end.
    fn keep(&self) -> Outcome {
        let bars = Bars::default();
        let kept = custody::keep("--keeper", &|slice, step| bars.report(slice, step));
        // The machine's process may not have the right to remove its socket.
        let _ = self.api.as_deref().map(remove_stale);
        kept
    }

    fn broker(&self) -> Option<Broker> {
        let socket = self.broker.clone()?;
        Some(Broker { socket, class: self.class.clone(), wait: self.wait })
    }
}

const EXAMPLE: &str = "\
Example: a machine of 1 GiB, of which 256 MiB are an EGM slice, with the console here

  cat > vm.json <<'JSON'
  {
    \"boot\": {
      \"kernel\": \"/vmlinuz\",
      \"initramfs\": \"/initrd.img\",
      \"cmdline\": \"console=ttyS0 break\"
    },
    \"memory\": { \"size\": \"768MiB\" },
    \"egm\": [{ \"region\": \"local\", \"size\": \"256MiB\", \"node\": 1 }]
  }
  JSON
  egm-vmm plan vm.json
  egm-vmm run vm.json

Debian's initramfs starts a shell for the word \"break\"; /sys/devices/system/node shows the slice as node1.

On a terminal every key goes to the guest, Ctrl-C too. SIGTERM, SIGINT and SIGHUP end the machine after its disks are \
flushed: from another terminal, kill PID. Unresponsive storage delays the end by at most 30 s, or until a second signal. \
SIGPWR presses the guest's power button (kill -PWR PID); software in the guest decides whether to shut down. Before the \
guest runs, SIGPWR has no effect, and the other signals end the program at once.

Exit codes:

  0  the guest powered off, or a signal or the API ended it
  1  the guest failed: panic, triple fault, or reset with \"on_reset\": \"exit\"
  2  the configuration or the command line is wrong
  3  the host lacks something
  4  a bug in egm-vmm";

/// The guest did not end as it should.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
struct Ended {
    reason: ExitReason,
    remedy: Remedy,
}

impl Report for Ended {
    fn remedy(&self) -> Remedy {
        self.remedy.clone()
    }
}

/// Lets this process have as many open files as it may: the usual 1024 is there for programs that use select(2), which
/// this one does not, and the connections of one vsock device alone fill it.
pub(super) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // A process may always raise its soft limit to the hard one: should it fail, the limit is as it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

pub(super) fn run(args: &Args) -> Outcome {
    if let (Some(name), None) = (&args.user, args.keeper) {
        User::find(name)?;
        return args.keep();
    }
    let confined = Confined::new(args.user.as_deref(), args.keeper, args.sandbox)?;
    let confined = confined.with_api(args.api.clone());
    raise_open_files();
    // Until there is a guest, its power button does nothing; an unhandled signal would end this process.
    let _ = signal_hook::flag::register(libc::SIGPWR, Arc::default());
    let machine = Arc::new(Published::new(args.file()));
    // Before the API starts: it is the machine's process that listens. The keeper has neither a thread nor the socket.
    let known = args.may_need_keeper().then(|| args.read());
    if let Some(Ok(Described { spec, .. })) = &known
        && sandbox::needs_return(spec)
    {
        sandbox::check(args.sandbox, spec, false)?;
        return args.keep();
    }
    // Dropped last: it removes its socket when the machine's slices are returned.
    let _api = args.api.as_ref().map(|path| Server::start(path, Arc::clone(&machine))).transpose()?;
    let outcome = run_machine(args, known, confined, &machine);
    outcome.inspect_err(|error| machine.failed(error.as_ref()))
}

/// Runs the machine of `args` to its end, and publishes each step. `known` is its configuration, if that is read
/// already.
fn run_machine(
    args: &Args,
    known: Option<Result<Described, Box<dyn Report>>>,
    confined: Confined,
    machine: &Published,
) -> Outcome {
    let Described { spec, snapshot } = known.unwrap_or_else(|| args.read())?;
    let restored = snapshot.map(|snapshot| Restored::new(snapshot, args.prefault, true)).transpose()?;
    machine.stage("configuration");
    let (ended, reservation) =
        launch(&spec, args.broker().as_ref(), confined, restored, machine, &Hooks::default())?;
    machine.ended(&ended.reason);
    let outcome = report(ended);
    drop(reservation);
    outcome
}

/// The specification of a machine, and the snapshot that it begins with, if there is one.
struct Described {
    spec: Spec,
    snapshot: Option<StoredSnapshot>,
}

/// Specification of the machine of `snapshot`.
fn spec_of(snapshot: &StoredSnapshot, overrides: &Overrides) -> Result<Spec, RestoreError> {
    let spec = config::parse_with(&snapshot.path().join(MACHINE), snapshot.machine().to_vec(), overrides);
    spec.map_err(|errors| RestoreReason::Configuration(errors.to_string()).of(snapshot.path()))
}

/// What a program adds to the life of its machine.
pub(super) struct Hooks<'a> {
    /// Called when the vCPUs run, or wait in a restored machine.
    pub(super) started: &'a dyn Fn(),
    /// Called when it is published that the machine runs or is paused, each time.
    pub(super) state_published: &'a dyn Fn(),
    pub(super) hand_over: HandOver<'a>,
}

impl Default for Hooks<'_> {
    /// Nothing, and no other program takes the machine over.
    fn default() -> Self {
        Self { started: &|| (), state_published: &|| (), hand_over: &unsupported }
    }
}

/// Starts the machine of `spec`, in the state of `restored` if that is given, and runs it to its end with `hooks`; publishes each
/// step.
/// Its plan is kept where there is an API. The machine's reservation ends when the second value is dropped.
pub(super) fn launch(
    spec: &Spec,
    broker: Option<&Broker>,
    confined: Confined,
    restored: Option<Restored>,
    machine: &Published,
    hooks: &Hooks<'_>,
) -> Result<(machine::Ended, Reservation), Box<dyn Report>> {
    let waiting = |slice: &str, why: &str| print_message(format_args!("{slice} waits: {}", Printable(why)));
    let has_memory = restored.as_ref().is_some_and(Restored::has_memory);
    let mut reserved = Reserved::of(spec, broker, confined, has_memory, &waiting)?;
    let beginning =
        restored.as_ref().map_or(Beginning::Kernel, |restored| restored.beginning(reserved.plan()));
    if beginning.image().is_some_and(|image| !image.copy) {
        reserved = reserved.on_demand();
    }
    machine.stage("reservation");
    if machine.journal().is_open() {
        machine.planned(reserved.plan().clone(), reserved.slices().clone());
    }
    let opened = reserved.open(beginning)?;
    machine.stage("resources");
    if let Some(present) = opened.present() {
        print_message(present.line());
        present.warning().iter().for_each(|warning| tracing::warn!("{warning}"));
    }
    if let Some(name) = opened.pty_name() {
        print_message(format_args!("console: {name}"));
        machine.record_terminal(&name);
    }
    let built = opened.build(restored.as_ref(), machine.journal())?;
    let resumes = restored.is_some_and(|restored| restored.resume);
    machine.stage("machine");
    let live = built.live();
    let step = |step| {
        if matches!(step, MachineStep::Started | MachineStep::Restored) {
            (hooks.started)();
            if resumes {
                let _ = live.resume(); // it is paused, and may only end meanwhile
            }
        }
        machine.step(step, &live);
        if step != MachineStep::Restored {
            (hooks.state_published)();
        }
    };
    Ok(built.run(&step, hooks.hand_over))
}

/// Prints how the machine ended.
pub(super) fn report(ended: machine::Ended) -> Outcome {
    let machine::Ended { reason, mut unfinished, counted } = ended;
    if let Some(counted) = counted {
        print_message(format_args!("counted: {counted}"));
    }
    if let Some(last) = unfinished.pop() {
        print_message(&reason);
        unfinished.iter().for_each(|other| print_message(Chain(other)));
        return Err(Box::new(last));
    }
    if let ExitReason::Signal(_) | ExitReason::Requested = reason {
        print_message(format_args!("{reason}; disks are flushed")); // confirms to the operator that the request was heeded
    }
    match reason.remedy() {
        None => Ok(ExitCode::SUCCESS),
        Some(remedy) => Err(Box::new(Ended { reason, remedy })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_may_have_as_many_open_files_as_the_operator_allows() {
        let limit = getrlimit(Resource::Nofile);
        let lower = limit.maximum.map(|maximum| maximum.saturating_sub(1));
        setrlimit(Resource::Nofile, Rlimit { current: lower, ..limit }).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
    }
}
