//! Devices that come and go while the guest runs.
//!
//! ```text
//!  Handle ── plug, unplug ─────────────────┐                          ┌► Maker: plan, make
//!  host   ── requests it, error, gone ─────┤► Controller (one thread) ┼► Port: insert, press, pull, fresh
//!  guest  ── power off, bus reset ─► Port ─┘                          └► Plugged: reset, end; Member: has it left?
//! ```
//! All slow work runs on the controller's thread, one step after the other, so that no two steps overlap: opening,
//! resetting and unmapping take up to seconds, and no vCPU waits for them.

mod controller;
mod error;
mod event;
mod maker;
mod occupant;

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use egm_address::PciAddress;
use vmm_sys_util::eventfd::EventFd;

pub(crate) use controller::{Controller, Slot};
pub(crate) use error::HotplugError;
pub(crate) use event::{Event, EventKind, Removal};
pub(crate) use maker::{Candidate, Maker};
pub(crate) use occupant::{Member, New, Occupant};

use crate::config::{Device, NewDevice};
use crate::lock::lock;
use crate::passed::Passed;
use crate::plan::{FunctionPlan, FunctionRole, Plan};
use crate::reserve::GrantedMemory;

/// Time that a guest has to release a device that the host requests back. Linux takes 6 s of its own time.
pub(crate) const UNPLUG_TIMEOUT: Duration = Duration::from_secs(60);

/// A device to plug in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plug {
    pub(crate) device: NewDevice,
    /// Whether it is only planned: nothing is opened, and the machine stays as it is.
    pub(crate) is_dry_run: bool,
    /// Descriptors that the device names by their numbers: kept until it is made.
    pub(crate) passed: Passed,
    /// Its memory, if it is a slice.
    pub(crate) slice: Option<PlugMemory>,
}

/// Memory of a slice that is plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlugMemory {
    /// Its size in bytes, which its BAR has room for.
    pub(crate) size: u64,
    /// Where it lies, once it is granted.
    pub(crate) granted: Option<Box<GrantedMemory>>,
}

/// A device that the guest finds from now on, or would find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PluggedDevice {
    /// Its id in the machine.
    pub(crate) id: String,
    /// Number of the slot.
    pub(crate) slot: u16,
    /// PCI address, BARs and vectors in the guest.
    pub(crate) function: FunctionPlan,
}

/// Called once with the result, on the thread that carried out the request.
pub(crate) type Reply<T> = Box<dyn FnOnce(Result<T, HotplugError>) + Send>;

/// A request to the controller.
enum Request {
    Plug {
        plug: Plug,
        reply: Reply<PluggedDevice>,
    },
    Unplug {
        id: String,
        reply: Reply<()>,
    },
    /// The guest was reset.
    Reset {
        reply: Box<dyn FnOnce() + Send>,
    },
    End,
}

/// PCI address in the guest of each device of the machine, by id.
pub(crate) type DeviceAddresses = BTreeMap<String, PciAddress>;

/// Devices that the machine has now.
#[derive(Debug, Default)]
struct CurrentDevices {
    addresses: DeviceAddresses,
    /// Those that were plugged in since the start.
    plugged: Vec<Device>,
    /// Number of plugs that are requested and not answered.
    requested: usize,
}

/// Devices of a machine at its start.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    /// Name of the machine.
    pub(crate) machine: String,
    pub(crate) addresses: DeviceAddresses,
    /// The device that has a resource of the host for itself, by the resource.
    pub(crate) owners: BTreeMap<String, String>,
}

impl From<&Plan> for Devices {
    fn from(plan: &Plan) -> Self {
        let mut owners = BTreeMap::new();
        for function in &plan.pci {
            if let FunctionRole::Endpoint { device, .. } = &function.role {
                owners.extend(device.exclusive().into_iter().map(|what| (what, device.id.clone())));
            }
        }
        Self { machine: plan.name.clone(), addresses: plan.device_addresses(), owners }
    }
}

/// Plugs devices in and out, from any thread.
#[derive(Clone)]
pub(crate) struct Handle {
    requests: Sender<Request>,
    wake: Arc<EventFd>,
    current: Arc<Mutex<CurrentDevices>>,
}

impl Handle {
    /// Puts a device into the first free slot that its BARs fit into, without waiting for the guest.
    ///
    /// # Errors
    /// [`HotplugError::Ended`]; `reply` gets all others.
    pub(crate) fn plug(&self, plug: Plug, reply: Reply<PluggedDevice>) -> Result<(), HotplugError> {
        let requested = usize::from(!plug.is_dry_run);
        lock(&self.current).requested += requested;
        self.ask(Request::Plug { plug, reply }).inspect_err(|_| lock(&self.current).requested -= requested)
    }

    /// Counts a plug that another thread prepares, until the value is dropped.
    pub(crate) fn prepare(&self) -> Preparation {
        lock(&self.current).requested += 1;
        Preparation(Arc::clone(&self.current))
    }

    /// Requests `id` back from the guest, and takes it after [`UNPLUG_TIMEOUT`]. `reply` is called after the request;
    /// [`EventKind::Removed`] reports that the host has it back.
    ///
    /// # Errors
    /// [`HotplugError::Ended`]; `reply` gets all others.
    pub(crate) fn unplug(&self, id: String, reply: Reply<()>) -> Result<(), HotplugError> {
        self.ask(Request::Unplug { id, reply })
    }

    /// Resets all functions and ports, while no vCPU is in the guest, and then calls `reply`.
    ///
    /// # Errors
    /// [`HotplugError::Ended`], without a call of `reply`.
    pub(crate) fn reset(&self, reply: Box<dyn FnOnce() + Send>) -> Result<(), HotplugError> {
        self.ask(Request::Reset { reply })
    }

    /// The devices that the machine has now.
    pub(crate) fn devices(&self) -> DeviceAddresses {
        lock(&self.current).addresses.clone()
    }

    /// Those of them that were plugged in since the start, by their slots.
    pub(crate) fn plugged(&self) -> Vec<Device> {
        let current = lock(&self.current);
        let mut plugged = current.plugged.clone();
        plugged.sort_by_key(|device| current.addresses.get(&device.id));
        plugged
    }

    /// Whether a device is being plugged in.
    pub(crate) fn is_plugging(&self) -> bool {
        lock(&self.current).requested > 0
    }

    fn ask(&self, request: Request) -> Result<(), HotplugError> {
        self.requests.send(request).map_err(|_| HotplugError::Ended)?;
        let _ = self.wake.write(1); // a full counter has woken it already
        Ok(())
    }
}

/// A plug that is prepared.
pub(crate) struct Preparation(Arc<Mutex<CurrentDevices>>);

impl Drop for Preparation {
    fn drop(&mut self) {
        lock(&self.0).requested -= 1;
    }
}

pub(crate) struct Running {
    pub(crate) handle: Handle,
    thread: Option<JoinHandle<Vec<String>>>,
}

impl Running {
    /// Quiesces, resets and unmaps every function; the vCPUs have stopped. Returns all counters above zero, in words.
    pub(crate) fn end(&mut self) -> Vec<String> {
        let _ = self.handle.ask(Request::End);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
