//! The end of the devices: the guest's writes are made durable, within a bounded time whatever storage does.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::EventManager;

use super::Subscriber;
use super::exit::ExitLatch;
use crate::config::{Device, DeviceKind};
use crate::error::{Blame, Remedy, Report};
use crate::lock::lock;
use crate::virtio::{VirtioDevice, VirtioPci};

/// Time limit for storage: longer than any flush that works at all, shorter than supervisors give a service.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Most counters in the line about them.
const MOST_COUNTERS: usize = 16;
/// After this long a message names the device that the machine waits for.
pub(super) const SILENCE: Duration = Duration::from_secs(1);

/// A device and its names for messages.
#[derive(Clone)]
pub(super) struct RunningDevice {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) device: Arc<Mutex<dyn VirtioDevice>>,
    pub(super) function: Arc<VirtioPci>,
}

/// The devices of a machine, which come and go while it runs.
pub(super) type RunningDevices = Arc<Mutex<Vec<RunningDevice>>>;

/// One line for the operator with the counters of `devices` that are not zero, and those of the host's functions, which
/// `functions` has in words. It ends after [`MOST_COUNTERS`].
pub(super) fn counted(devices: &[RunningDevice], functions: Vec<String>) -> Option<String> {
    let own = devices.iter().flat_map(|kept| kept.function.counters().into_iter().map(|c| (&kept.id, c)));
    let own = own.filter(|(_, (_, number))| *number > 0);
    let mut all: Vec<_> = own.map(|(id, (what, number))| format!("{number} {what} at \"{id}\"")).collect();
    all.extend(functions);
    if all.len() > MOST_COUNTERS {
        all.truncate(MOST_COUNTERS);
        all.push("and more".to_owned());
    }
    (!all.is_empty()).then(|| all.join(", "))
}

/// A device could not make the guest's writes durable.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Unfinished {
    #[error("{name} is not flushed: what the guest wrote since its last flush may be lost")]
    Flush {
        /// Name of the device.
        name: String,
        #[source]
        source: std::io::Error,
    },
    /// Storage did not answer.
    #[error(
        "{name} is not flushed: it did not answer, and what the guest wrote since its last flush may be lost"
    )]
    Silent {
        /// Name of the device.
        name: String,
    },
}

impl Report for Unfinished {
    fn remedy(&self) -> Remedy {
        Blame::Host.help(
            "look for what is wrong with the storage below it (dmesg), and check its file systems before the next start",
        )
    }
}

/// Quiesces `devices`, and runs the event loop meanwhile; the vCPUs have stopped. Ends early when the operator asks
/// once more.
pub(super) fn finish(
    devices: &[RunningDevice],
    events: &mut EventManager<Subscriber>,
    exit: &ExitLatch,
) -> Vec<Unfinished> {
    for RunningDevice { device, .. } in devices {
        lock(device).reset();
    }
    let ends = || exit.is_hurried();
    let _ = wait_for_all(devices, events, "one more SIGTERM ends the wait", &ends); // `unfinished` looks at each
    devices.iter().filter_map(RunningDevice::unfinished).collect()
}

/// Runs the event loop until `devices`, which were reset, are quiescent. Returns a device that is still busy at the time
/// limit, or when `ends` is true; `how` describes that to the operator.
pub(super) fn wait_for_all<'a>(
    devices: &'a [RunningDevice],
    events: &mut EventManager<Subscriber>,
    how: &str,
    ends: &dyn Fn() -> bool,
) -> Option<&'a RunningDevice> {
    let (start, mut limit) = (Instant::now(), SILENCE);
    while let Some(busy) = devices.iter().find(|kept| !lock(&kept.device).is_quiescent()) {
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() && limit == SILENCE {
            limit = TIMEOUT;
            let seconds = TIMEOUT.as_secs();
            tracing::info!("waiting for {}, at most {seconds} s; {how}", busy.name);
        } else if left.is_zero() || ends() || !turn(events, left) {
            return Some(busy);
        }
    }
    None
}

/// One turn of the event loop, of `limit` at most. Returns whether another is possible.
pub(super) fn turn(events: &mut EventManager<Subscriber>, limit: Duration) -> bool {
    let milliseconds = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).saturating_add(1);
    match events.run_with_timeout(milliseconds) {
        Ok(_) => true,
        Err(event_manager::Error::Epoll(error)) => error.errno() == libc::EINTR,
        Err(_) => false,
    }
}

impl RunningDevice {
    /// `device`, which is `virtio` behind `function`.
    pub(super) fn new(
        device: &Device,
        virtio: Arc<Mutex<dyn VirtioDevice>>,
        function: &Arc<VirtioPci>,
    ) -> Self {
        let id = device.id.clone();
        let name = match &device.kind {
            DeviceKind::VirtioBlk { path, .. } => format!("disk \"{id}\" ({})", path.display()),
            _ => format!("device \"{id}\""),
        };
        Self { id, name, device: virtio, function: Arc::clone(function) }
    }

    fn unfinished(&self) -> Option<Unfinished> {
        let (name, mut device) = (self.name.clone(), lock(&self.device));
        match device.take_loss() {
            Some(source) => Some(Unfinished::Flush { name, source }),
            None => (!device.is_quiescent()).then_some(Unfinished::Silent { name }),
        }
    }
}
