//! `egm-device serve`: slices as PCI functions for VMMs that know vfio-user.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use egm_address::{ByteSize, PciAddress, SpanSet};
use egm_report::show::print;
use egm_report::{Blame, Chain, Remedy, Report};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Outcome;
use super::access::{open, raise_descriptor_limit};
use super::signals::Signals;
use crate::device::config::Id;
use crate::device::core::Facts;
use crate::device::{Function, Setup};
use crate::host::LocalHost;
use crate::ledger::Watch;
use crate::mapping::Mapping;
use crate::poison::{self, Event, RetiredListPoll};
use crate::progress::with_bar;
use crate::region::{RegionKind, near_node};
use crate::scrub::ScrubError;
use crate::serve::{
    self, DeviceConfig, DeviceServer, FileError, ServedSlice, SliceError, Socket, SocketError,
};
use crate::trust;

/// Interval at which an EGM device's list of retired pages is read; there is no event when it grows.
const LOOK: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Serve slices as PCI functions over vfio-user, for cloud-hypervisor, QEMU and egm-vmm
///
/// The slice is a 64-bit BAR of the guest. It stays through reboots and changes of clients. SIGUSR1 requests the slices from
/// guests and VMMs; SIGTERM does too, gives them time to answer, and returns the slices scrubbed.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("what").required(true).args(["config", "region"]))]
pub(super) struct Args {
    /// File that describes the devices, as JSON
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve only the device of this name from the file
    #[arg(long, value_name = "NAME", requires = "config")]
    slice: Option<String>,
    /// Region of a single device, by name or kind
    #[arg(long, value_name = "REGION", requires = "size")]
    region: Option<String>,
    /// Size of the slice, such as 64GiB
    #[arg(long, value_name = "SIZE", requires = "region")]
    size: Option<ByteSize>,
    /// Socket for clients [default: the one that systemd passes]
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    socket: Option<PathBuf>,
    /// Name of the device, and of its socket in systemd
    #[arg(long, value_name = "NAME", default_value = "slice", conflicts_with = "config")]
    name: String,
    /// Proximity domain of the slice in the guest
    #[arg(long, value_name = "NODE", conflicts_with = "config")]
    pxm: Option<u32>,
    /// Scrub the slice at every reset of the function
    #[arg(long, conflicts_with = "config")]
    scrub_on_reset: bool,
    /// Leave MSI-X out: QEMU (11.1 and older) aborts when a vfio-user function with MSI-X is unplugged
    #[arg(long, conflicts_with = "config")]
    no_msix: bool,
    /// Accept unprivileged clients even if all slices of the region are one file, which they can map as a whole
    #[arg(long, conflicts_with = "config")]
    whole_device: bool,
    /// PCI vendor and device id to use
    #[arg(long, value_name = "ID", conflicts_with = "config")]
    id: Option<Id>,
    /// Trust domain of the guest: owners of one domain share a region that a GPU reaches
    #[arg(long, value_name = "NAME", value_parser = trust::parse_name, conflicts_with_all = ["config", "broker"])]
    trust_domain: Option<String>,
    /// GPU of the guest, such as 0009:01:00.0; its region is then exclusive to the trust domain
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["config", "broker"])]
    gpu: Vec<PciAddress>,
    /// Get slices from the broker at this socket (required unless you are root)
    #[arg(long, value_name = "SOCKET")]
    broker: Option<PathBuf>,
    /// Seconds that a guest has to release its slice on request
    #[arg(long, alias = "patience", value_name = "SECONDS", default_value_t = 5)]
    timeout: u64,
    #[command(flatten)]
    host: LocalHost,
}

const EXAMPLES: &str = "\
Examples: one slice for one guest; those of a file, from the broker; cloud-hypervisor and QEMU as clients

  egm-device serve --region egm4 --size 64GiB --pxm 1 \\
    --socket /run/egm-serve/vm1.sock
  egm-device serve --config configs/serve/grace.json \\
    --broker /run/egm-broker.sock
  cloud-hypervisor … --memory size=4G,shared=on \\
    --user-device socket=/run/egm-serve/vm1.sock
  qemu-system-x86_64 … -device '{\"driver\": \"vfio-user-pci\", \"socket\":
    {\"type\": \"unix\", \"path\": \"/run/egm-serve/vm1.sock\"}}'

Exit codes:

  0  ended by a signal, after the slices were returned
  2  the command line or a file is wrong
  3  the host lacks something or forbids it, such as a region or free memory
  4  a bug in egm-device";

/// A failure that stops a server.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
struct ServeError {
    what: &'static str,
    source: io::Error,
}

impl Report for ServeError {
    fn remedy(&self) -> Remedy {
        Blame::Host.into()
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |source| ServeError { what, source }
}

struct RunningDevice {
    held: Arc<ServedSlice>,
    server: Arc<DeviceServer>,
    /// Held so that bad pages are reported, where the kernel maps all of the memory at once.
    mapping: Option<Mapping>,
    list_poll: Option<RetiredListPoll>,
    thread: JoinHandle<()>,
    /// Dropped last: the path is free only after the function is gone.
    _socket: Socket,
}

pub(super) fn run(args: &Args) -> Outcome {
    let configs = args.configs()?;
    let passed = serve::passed()?;
    raise_descriptor_limit();
    let mut signals = Signals::new().map_err(failed("receive signals"))?;
    let mut watch = poison::PoisonWatch::new().map_err(failed("receive notifications of bad memory"))?;
    let slices = args.take(&configs)?;
    let mut devices = begin(&configs, slices, passed, &mut watch)?;
    for config in &configs {
        let at = config
            .socket
            .as_ref()
            .map_or_else(|| "systemd's socket".into(), |path| path.display().to_string());
        print(format!("device {}: {} of {} at {at}\n", config.name, config.size, config.region));
    }
    let waited = wait(&mut signals, &mut watch, &mut devices);
    let ended = end(devices, &configs, Duration::from_secs(args.timeout), &mut watch);
    waited?;
    ended
}

/// Starts a server for each slice of `configs`. If one cannot start, all slices are returned.
fn begin(
    configs: &[DeviceConfig],
    slices: Vec<ServedSlice>,
    passed: PassedSockets,
    watch: &mut poison::PoisonWatch,
) -> Result<Vec<RunningDevice>, Box<dyn Report>> {
    let sockets = match sockets(configs, passed) {
        Ok(sockets) => sockets,
        Err(error) => {
            return_slices(configs, slices);
            return Err(error.into());
        }
    };
    let mut devices = Vec::new();
    let mut left = configs.iter().zip(slices).zip(sockets);
    while let Some(((config, held), socket)) = left.next() {
        let held = Arc::new(held);
        match RunningDevice::begin(config, &held, socket, watch) {
            Ok(served) => devices.push(served),
            Err(error) => {
                let begun = devices.len();
                // First those that listen already: a client may be there, and is not waited for.
                if let Err(other) = end(devices, configs, Duration::ZERO, watch) {
                    tracing::info!("{}", Chain(other.as_ref()));
                }
                let rest = Arc::into_inner(held).into_iter().chain(left.map(|((_, held), _)| held));
                return_slices(configs.get(begun..).unwrap_or_default(), rest.collect());
                return Err(error);
            }
        }
    }
    Ok(devices)
}

/// A socket for each of `configs`. They are made after the slices: waiting for the file is waiting for the device.
fn sockets(configs: &[DeviceConfig], mut passed: PassedSockets) -> Result<Vec<Socket>, SocketError> {
    let open = |config: &DeviceConfig| Socket::open(&config.name, config.socket.as_deref(), &mut passed);
    let sockets = configs.iter().map(open).collect::<Result<_, _>>()?;
    if !passed.is_empty() {
        return Err(SocketError::Unused { names: passed.into_keys().collect() });
    }
    Ok(sockets)
}

/// Returns slices that were never served, in the order of `configs`; notes failures, as the caller has another error.
fn return_slices(configs: &[DeviceConfig], slices: Vec<ServedSlice>) {
    for (DeviceConfig { name, .. }, held) in configs.iter().zip(slices) {
        if let Err(error) = back(name, held) {
            tracing::info!("{}", Chain(&error));
        }
    }
}

fn back(name: &str, held: ServedSlice) -> Result<(), SliceError> {
    with_bar(name, |progress| held.return_slice(name, &Watch { progress, ..Watch::unobserved() }))
}

/// Sockets that systemd passed, by name.
type PassedSockets = BTreeMap<String, UnixListener>;

impl Args {
    fn configs(&self) -> Result<Vec<DeviceConfig>, FileError> {
        if let Some(path) = &self.config {
            return serve::load(path, self.slice.as_deref());
        }
        let config = DeviceConfig {
            name: self.name.clone(),
            region: self.region.clone().unwrap_or_default(),
            size: self.size.unwrap_or(ByteSize::new(0)),
            align: None,
            socket: self.socket.clone(),
            pxm: self.pxm,
            scrub_on_reset: self.scrub_on_reset,
            msix: !self.no_msix,
            whole_device: self.whole_device,
            id: self.id.unwrap_or_default(),
            trust_domain: self.trust_domain.clone(),
            gpus: self.gpu.clone(),
        };
        serve::check(std::slice::from_ref(&config)).map(|()| vec![config])
    }

    /// A slice for each device, or none for any: what was taken before one failed goes back.
    fn take(&self, configs: &[DeviceConfig]) -> Result<Vec<ServedSlice>, Box<dyn Report>> {
        if let Some(socket) = &self.broker {
            return Ok(take_all(configs, |config| ServedSlice::from_broker(config, socket))?);
        }
        let (ledger, survey) = (open(&self.host)?, self.host.survey()?);
        let grant = |config: &DeviceConfig| {
            with_bar(&config.name, |progress| {
                ServedSlice::from_ledger(config, &ledger, &survey, &Watch { progress, ..Watch::unobserved() })
            })
        };
        Ok(take_all(configs, grant)?)
    }
}

fn take_all(
    configs: &[DeviceConfig],
    take: impl Fn(&DeviceConfig) -> Result<ServedSlice, SliceError>,
) -> Result<Vec<ServedSlice>, SliceError> {
    let mut taken = Vec::new();
    for config in configs {
        match take(config) {
            Ok(held) => taken.push(held),
            Err(error) => {
                return_slices(configs, taken);
                return Err(error);
            }
        }
    }
    Ok(taken)
}

impl RunningDevice {
    fn begin(
        config: &DeviceConfig,
        held: &Arc<ServedSlice>,
        socket: Socket,
        watch: &mut poison::PoisonWatch,
    ) -> Result<Self, Box<dyn Report>> {
        let error = |source| SliceError::Descriptor { device: config.name.clone(), source };
        let backing = held.backing();
        let facts = Facts {
            size: backing.size(),
            base: held.slice().offset,
            page: held.region().page_size.get(),
            pxm: config.pxm,
            scrub_at_reset: config.scrub_on_reset,
            msix: config.msix,
        };
        let whose = held.clone();
        let bad = Box::new(move |bad: &SpanSet<_>| whose.retire(bad));
        let (name, near) = (config.name.clone(), held.region().node.and_then(near_node));
        let owner = held.clone();
        let scrubbed = Box::new(move |end: &Result<(), ScrubError>| owner.report_mismatch(&name, end));
        let setup = Setup { id: config.id, facts, retired: held.retired(), bad, scrubbed, near };
        let function = Function::new(setup, backing).map_err(error)?;
        let listener = socket.listener.try_clone().map_err(error)?;
        let root_only = held.region().kind.shares_file() && !config.whole_device;
        let server = Arc::new(DeviceServer::new(&config.name, function, listener, root_only).map_err(error)?);
        let mapping =
            backing.is_invisible().then(|| Mapping::new(backing, 0, backing.size(), 0).ok()).flatten();
        if let Some(mapping) = &mapping {
            watch.add(&config.name, egm_address::Offset::new(held.slice().offset), mapping);
        }
        let is_egm = matches!(held.region().kind, RegionKind::Egm { .. });
        let list_poll = is_egm.then(|| RetiredListPoll::new(held.region().clone()));
        let clients = server.clone();
        let spawned = thread::Builder::new().name(config.name.clone()).spawn(move || clients.run());
        let thread = spawned.map_err(|source| {
            mapping.iter().for_each(|mapping| watch.remove(mapping));
            error(source)
        })?;
        Ok(Self { held: held.clone(), server, mapping, list_poll, thread, _socket: socket })
    }

    /// Handles bad bytes of the region: keeps them from later owners, and reports them to the guest.
    fn bad(&self, event: &Event) {
        let bad = self.held.in_slice(&SpanSet::from_iter([event.span]));
        if !bad.is_empty() {
            let (span, name) = (event.span, &self.held.region().name);
            tracing::info!("bad memory in {name}: {:#x} bytes at {:#x}", span.size(), span.start());
            self.held.retire(&bad);
            self.server.function().retire(&bad);
        }
    }

    /// Reads an EGM device's list again; a failed read is repeated the next time.
    fn look(&mut self) {
        let events =
            self.list_poll.as_mut().and_then(|list_poll| list_poll.look(self.held.backing().file()).ok());
        events.into_iter().flatten().for_each(|event| self.bad(&event));
    }
}

/// Handles bad memory and requests for the guests' slices, until a signal ends it.
fn wait(
    signals: &mut Signals,
    watch: &mut poison::PoisonWatch,
    devices: &mut [RunningDevice],
) -> Result<(), ServeError> {
    loop {
        let mut wanted = [
            PollFd::new(&signals.end, PollFlags::IN),
            PollFd::new(&signals.ask, PollFlags::IN),
            PollFd::new(&*watch, PollFlags::IN),
        ];
        match poll(&mut wanted, Some(&LOOK)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed("wait for signals")(errno.into())),
        }
        if !wanted[0].revents().is_empty() {
            return Ok(());
        }
        if signals.is_asked() {
            devices.iter().for_each(|device| device.server.function().request_return());
            tracing::info!("requested the guests to release their slices");
        }
        for event in &watch.take_events().events {
            devices
                .iter()
                .filter(|device| device.server.name() == event.memory)
                .for_each(|device| device.bad(event));
        }
        devices.iter_mut().for_each(RunningDevice::look);
    }
}

/// Requests the slices from guests, ends clients, and returns every slice; the outcome is the first failure.
fn end(
    devices: Vec<RunningDevice>,
    configs: &[DeviceConfig],
    timeout: Duration,
    watch: &mut poison::PoisonWatch,
) -> Outcome {
    devices.iter().for_each(|device| device.server.function().request_return());
    let begun = std::time::Instant::now();
    for device in &devices {
        let _ = device.server.function().wait_unused(timeout.saturating_sub(begun.elapsed()));
        device.server.stop();
    }
    let mut outcome = Ok(ExitCode::SUCCESS);
    for (device, config) in devices.into_iter().zip(configs) {
        let RunningDevice { held, server, mapping, thread, .. } = device;
        // A panic of it was its own report.
        let _ = thread.join();
        mapping.iter().for_each(|mapping| watch.remove(mapping));
        drop((mapping, server));
        // With its server, every other holder of the slice is gone.
        let Some(held) = Arc::into_inner(held) else { continue };
        if let (Err(error), Ok(_)) = (back(&config.name, held), &outcome) {
            outcome = Err(error.into());
        }
    }
    outcome
}
