//! EGM devices, opened for their first slice and then kept.
//!
//! A second open would be refused, and closing would let any other process take the whole device. The kernel may zero
//! all of it in that open, for minutes. So the broker opens a device once for all clients: a client that gives up
//! leaves the open in progress to the others and the next.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::backing::{self, BackingError, OpenResult};
use crate::ledger::{Memory, Progress, Watch};
use crate::region::{Region, RegionKind, Slice};

/// Interval at which a waiting client gets progress and its cancel flag is checked.
const TICK: Duration = Duration::from_millis(200);

type Opener = dyn Fn(&Region, &Slice) -> Result<File, BackingError> + Send + Sync;

/// A ledger's memory, with its EGM devices kept open.
pub(super) struct OpenDevices {
    memory: Arc<dyn Memory>,
    open: Arc<Opener>,
    devices: Mutex<BTreeMap<String, Arc<Device>>>,
}

#[derive(Default)]
struct Device {
    state: Mutex<OpenState>,
    changed: Condvar,
}

#[derive(Default)]
enum OpenState {
    #[default]
    Closed,
    Opening,
    Open(File),
    /// The error for one of the waiting clients.
    Failed(BackingError),
}

impl Device {
    fn state(&self) -> MutexGuard<'_, OpenState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenDevices {
    pub(super) fn new(memory: Arc<dyn Memory>) -> Self {
        let devices = Arc::clone(&memory);
        let open = move |region: &Region, slice: &Slice| {
            let device = devices.open(region, slice, &Watch::unobserved())?;
            device.file().try_clone().map_err(|source| not_open(region, source))
        };
        Self { memory, open: Arc::new(open), devices: Mutex::default() }
    }

    fn device(&self, region: &Region) -> Arc<Device> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.entry(region.name.clone()).or_default().clone()
    }

    pub(super) fn is_open(&self, region: &Region) -> bool {
        matches!(*self.device(region).state(), OpenState::Open(_))
    }

    /// A duplicate of the region's descriptor. Clients wait only for an open of the same device.
    fn duplicate(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> Result<File, BackingError> {
        let device = self.device(region);
        let (begun, mut waited) = (Instant::now(), false);
        let mut state = device.state();
        loop {
            match std::mem::take(&mut *state) {
                OpenState::Open(file) => {
                    let duplicate = file.try_clone().map_err(|source| not_open(region, source));
                    *state = OpenState::Open(file);
                    return duplicate;
                }
                OpenState::Failed(error) if waited => return Err(error),
                OpenState::Closed | OpenState::Failed(_) => {
                    self.begin(&device, region, slice)?;
                    *state = OpenState::Opening;
                }
                OpenState::Opening => *state = OpenState::Opening,
            }
            if watch.cancel.load(Ordering::Relaxed) {
                return Err(BackingError::Cancelled { region: region.name.clone(), device: path(region) });
            }
            let waiting = device.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner);
            (state, waited) = (waiting.0, true);
            (watch.progress)(Progress::Opening(begun.elapsed()));
        }
    }

    /// Opens the device on a thread, which continues when its client leaves.
    fn begin(&self, device: &Arc<Device>, region: &Region, slice: &Slice) -> Result<(), BackingError> {
        let (device, open) = (device.clone(), self.open.clone());
        let (of, slice) = (region.clone(), slice.clone());
        let work = move || {
            let outcome = open(&of, &slice);
            *device.state() = outcome.map_or_else(OpenState::Failed, OpenState::Open);
            device.changed.notify_all();
        };
        let thread = thread::Builder::new().name("broker-open".into()).spawn(work);
        thread.map(drop).map_err(|source| not_open(region, source))
    }
}

fn path(region: &Region) -> PathBuf {
    match &region.kind {
        RegionKind::Egm { device } => device.clone(),
        _ => "/proc/self/fd".into(),
    }
}

fn not_open(region: &Region, source: io::Error) -> BackingError {
    BackingError::open(region, &path(region), source)
}

impl Memory for OpenDevices {
    fn open(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        match region.kind {
            RegionKind::Egm { .. } => backing::adopt(region, slice, self.duplicate(region, slice, watch)?),
            _ => self.memory.open(region, slice, watch),
        }
    }

    fn reopen(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        match region.kind {
            RegionKind::Egm { .. } => self.open(region, slice, watch),
            _ => self.memory.reopen(region, slice, watch),
        }
    }

    fn renew(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        match region.kind {
            RegionKind::Egm { .. } => self.open(region, slice, watch),
            _ => self.memory.renew(region, slice, watch),
        }
    }

    fn release(&self, region: &Region, slice: &Slice) {
        self.memory.release(region, slice);
    }

    fn set_aside(&self, region: &Region, slice: &Slice) -> Result<(), BackingError> {
        self.memory.set_aside(region, slice)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::sync::mpsc;

    use super::*;
    use crate::backing::tests::{region, slice};
    use crate::ledger::HostMemory;

    fn egm() -> Region {
        region(RegionKind::Egm { device: "/dev/egm4".into() }, 0x2000, 0x1000)
    }

    /// A device that counts its opens; each open waits for its result from the test.
    fn slow() -> (Arc<OpenDevices>, Arc<AtomicUsize>, mpsc::Sender<io::Result<()>>) {
        let (opens, (go, wait)) = (Arc::new(AtomicUsize::new(0)), mpsc::channel());
        let (count, wait) = (opens.clone(), Mutex::new(wait));
        let open = move |region: &Region, _: &Slice| {
            count.fetch_add(1, Ordering::SeqCst);
            let outcome: io::Result<()> = wait.lock().unwrap().recv().unwrap();
            outcome.and_then(|()| tempfile::tempfile()).map_err(|source| not_open(region, source))
        };
        let memory = Arc::new(HostMemory::without_devices());
        let kept = OpenDevices { memory, open: Arc::new(open), devices: Mutex::default() };
        (Arc::new(kept), opens, go)
    }

    #[test]
    fn a_user_that_leaves_during_the_first_open_leaves_it_to_the_others() {
        let (kept, opens, go) = slow();
        let leaves = AtomicBool::new(false);
        let leave = |_| leaves.store(true, Ordering::Relaxed);
        let watch = Watch { progress: &leave, cancel: &leaves, near: None, pace: None };
        let left = kept.duplicate(&egm(), &slice(0, 0x1000), &watch);
        assert!(matches!(left, Err(BackingError::Cancelled { .. })));
        assert!(!kept.is_open(&egm()));
        go.send(Ok(())).unwrap();
        for offset in [0, 0x1000] {
            assert!(kept.duplicate(&egm(), &slice(offset, 0x1000), &Watch::unobserved()).is_ok());
        }
        assert!(opens.load(Ordering::SeqCst) == 1 && kept.is_open(&egm()));
    }

    #[test]
    fn an_open_that_fails_is_reported_and_tried_anew_for_the_next() {
        let (kept, opens, go) = slow();
        go.send(Err(io::ErrorKind::ResourceBusy.into())).unwrap();
        go.send(Ok(())).unwrap();
        let open = || kept.duplicate(&egm(), &slice(0, 0x1000), &Watch::unobserved());
        assert!(matches!(open(), Err(BackingError::Open { .. })));
        assert!(open().is_ok());
        assert_eq!(opens.load(Ordering::SeqCst), 2);
    }
}
