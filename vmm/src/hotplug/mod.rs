//! Functions that come and go while the guest runs.
//!
//! ```text
//!  Handle ── plug, unplug ─────────────────┐
//!  host   ── requests it, error, gone ─────┤► Controller (one thread) ─► Port: insert, press, pull, fresh
//!  guest  ── power off, bus reset ─► Port ─┘                          └► Plugged: reset, end
//! ```
//! All slow work runs on the controller's thread, one step after the other, so that no two steps overlap: opening,
//! resetting and unmapping take up to seconds, and no vCPU waits for them.

mod controller;
mod error;
mod event;

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use egm_address::PciAddress;
use vmm_sys_util::eventfd::EventFd;

pub(crate) use controller::{Controller, Maker, New, Occupant, Slot};
pub(crate) use error::HotplugError;
pub(crate) use event::{Event, EventKind, Removal};

use crate::lock::lock;

/// Time that a guest has to release a function that the host requests back. Linux takes 6 s of its own time.
pub(crate) const UNPLUG_TIMEOUT: Duration = Duration::from_secs(60);

/// A function of the host to plug in, bound to VFIO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewFunction {
    /// Its id in the machine; without one it is the first free of `vfio0`, `vfio1`, ….
    pub(crate) id: Option<String>,
    pub(crate) function: PciAddress,
    /// GPUDirect clique of an NVIDIA GPU, 0 to 15.
    pub(crate) clique: Option<u8>,
}

/// A function that the guest finds from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PluggedDevice {
    /// Its id in the machine.
    pub(crate) id: String,
    /// PCI address in the guest.
    pub(crate) address: PciAddress,
}

/// Called once with the result, on the controller's thread.
pub(crate) type Reply<T> = Box<dyn FnOnce(Result<T, HotplugError>) + Send>;

/// A request to the controller.
enum Request {
    Plug { new: NewFunction, reply: Reply<PluggedDevice> },
    Unplug { id: String, reply: Reply<()> },
    End,
}

/// PCI address in the guest of each device of the machine, by id.
pub(crate) type DeviceAddresses = BTreeMap<String, PciAddress>;

/// Plugs functions in and out, from any thread.
#[derive(Clone)]
pub(crate) struct Handle {
    requests: Sender<Request>,
    wake: Arc<EventFd>,
    devices: Arc<Mutex<DeviceAddresses>>,
}

impl Handle {
    /// Puts `new` into the first free slot that its BARs fit into, without waiting for the guest.
    ///
    /// # Errors
    /// [`HotplugError::Ended`]; `reply` gets all others.
    pub(crate) fn plug(&self, new: NewFunction, reply: Reply<PluggedDevice>) -> Result<(), HotplugError> {
        self.ask(Request::Plug { new, reply })
    }

    /// Requests `id` back from the guest, and takes it after [`UNPLUG_TIMEOUT`]. `reply` is called after the request;
    /// [`EventKind::Removed`] reports that the host has it back.
    ///
    /// # Errors
    /// [`HotplugError::Ended`]; `reply` gets all others.
    pub(crate) fn unplug(&self, id: String, reply: Reply<()>) -> Result<(), HotplugError> {
        self.ask(Request::Unplug { id, reply })
    }

    /// The devices that the machine has now.
    pub(crate) fn devices(&self) -> DeviceAddresses {
        lock(&self.devices).clone()
    }

    fn ask(&self, request: Request) -> Result<(), HotplugError> {
        self.requests.send(request).map_err(|_| HotplugError::Ended)?;
        let _ = self.wake.write(1); // a full counter has woken it already
        Ok(())
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
