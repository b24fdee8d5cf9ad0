//! Devices in the slots of a machine.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use egm_vfio::backend::InterruptKind;

use super::event::{Event, EventKind, Removal};
use crate::passthrough::HostEvents;
use crate::pci::Plugged;

/// A device, and what it has outside the controller's thread.
pub(crate) struct New {
    pub(crate) function: Arc<dyn Plugged>,
    /// Events that the host reports of it.
    pub(crate) host_events: Option<HostEvents>,
    pub(crate) member: Option<Box<dyn Member>>,
}

/// The part of a device in the event loop and in the lists of the machine.
pub(crate) trait Member: Send {
    /// Whether nothing there uses the device any more. Called until it returns true, after [`Plugged::end`].
    fn has_left(&mut self) -> bool;

    /// Takes the error of making the guest's writes durable.
    fn take_loss(&mut self) -> Option<io::Error>;

    /// Called once the device is closed. The returned function runs after the removal is reported.
    fn end(self: Box<Self>) -> Option<Box<dyn FnOnce()>> {
        None
    }
}

/// A device that the guest has.
pub(crate) struct Occupant {
    pub(crate) id: String,
    pub(crate) new: New,
    /// When it is removed, once the guest was requested to release it.
    pub(super) leaving: Option<Instant>,
    /// Whether the loss of its device was reported, after which a fixed function stays in the guest.
    pub(super) is_lost: bool,
}

impl Occupant {
    pub(crate) fn new(id: &str, new: New) -> Self {
        Self { id: id.to_owned(), new, leaving: None, is_lost: false }
    }

    pub(super) fn event(&self, what: EventKind) -> Event {
        Event { id: self.id.clone(), function: self.new.function.name().to_owned(), what }
    }

    pub(super) fn take_events(&mut self) -> Vec<InterruptKind> {
        self.new.host_events.as_mut().map(HostEvents::take).unwrap_or_default()
    }

    /// Whether its device is gone. Reads the device only after `events` of the host.
    pub(super) fn is_gone(&self, events: &[InterruptKind]) -> bool {
        let function = &self.new.function;
        if events.is_empty() { function.is_lost() } else { function.look_if_lost() }
    }
}

/// A device that the guest has no more, and that something still uses.
pub(super) struct Departing {
    pub(super) occupant: Occupant,
    pub(super) left: Removal,
}
