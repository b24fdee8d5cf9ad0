//! Functions that come and go while the guest runs.
//!
//! ```text
//!  Handle ── plug, unplug, remove ─────────┐
//!  host   ── wants it back, error, gone ───┤► Controller (one thread) ─► Port: insert, press, pull, fresh
//!  guest  ── power off, bus reset ─► Port ─┘                          └► Plugged: reset, end
//! ```
//! All slow work runs on the controller's thread, one step after the other, so that no two steps overlap: opening,
//! resetting and unmapping take up to seconds, and no vCPU waits for them.

mod controller;
mod error;
mod event;

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use egm_address::PciAddress;
use vmm_sys_util::eventfd::EventFd;

pub(crate) use controller::{Controller, Maker, New, Occupant, Slot};
pub use error::HotplugError;
pub use event::{Event, EventKind, Removal};

use crate::pci::Plugged;

/// Time that a guest has to release a function that the host wants back. Linux takes 6 s of its own time.
pub const UNPLUG_TIMEOUT: Duration = Duration::from_secs(60);

/// The function to plug in.
pub enum Source {
    /// A function of the host, bound to VFIO.
    Host(PciAddress),
    /// A function of this process, as it is after its reset.
    Function(Arc<dyn Plugged>),
}

/// A request to the controller.
pub(crate) enum Request {
    Plug { id: String, source: Source, answer: Sender<Result<u16, HotplugError>> },
    Unplug { id: String, timeout: Duration, answer: Sender<Result<Removal, HotplugError>> },
    End,
}

/// Plugs functions in and out, from any thread.
#[derive(Clone)]
pub struct Handle {
    requests: Sender<Request>,
    wake: Arc<EventFd>,
}

impl Handle {
    /// Puts `source` into the first free slot that its BARs fit into, where the guest finds it as `id`. Returns the slot's
    /// number once it is there; the guest then takes its time.
    ///
    /// # Errors
    /// [`HotplugError`].
    pub fn plug(&self, id: &str, source: Source) -> Result<u16, HotplugError> {
        let (answer, answered) = channel();
        self.ask(Request::Plug { id: id.to_owned(), source, answer })?;
        answered.recv().map_err(|_| HotplugError::Ended)?
    }

    /// Asks the guest to release `id`, and takes it after `timeout` (zero: at once). Returns when the host has it back.
    ///
    /// # Errors
    /// [`HotplugError`].
    pub fn unplug(&self, id: &str, timeout: Duration) -> Result<Removal, HotplugError> {
        let (answer, answered) = channel();
        self.ask(Request::Unplug { id: id.to_owned(), timeout, answer })?;
        answered.recv().map_err(|_| HotplugError::Ended)?
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
    /// Ends every function: quiet, reset, nowhere mapped. The vCPUs have stopped. Returns all counters, in words.
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
