//! A running machine as other threads see and control it.

use std::sync::{Arc, Mutex};

use super::exit::{ExitLatch, ExitReason};
use super::poison::Interrupt;
use crate::kvm::Message;
use crate::lock::lock;
use crate::virtio::Counter;

/// Access to a machine from any thread, while it runs.
#[derive(Clone)]
pub struct Live {
    exit: Arc<ExitLatch>,
    /// `None` once the machine ends: from then on this keeps neither its memory nor its descriptors.
    parts: Arc<Mutex<Option<LiveParts>>>,
}

/// Parts of a machine that other threads use, as functions that neither wait nor fail.
pub(crate) struct LiveParts {
    /// Presses the power button, where the guest's tables have one.
    pub(crate) button: Option<Interrupt>,
    /// Counters of each device.
    pub(crate) counters: Box<dyn Fn() -> Vec<DeviceCounters> + Send>,
    /// Message interrupts that vectors use.
    pub(crate) messages: Box<dyn Fn() -> Vec<Message> + Send>,
}

/// Counters of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Id in the machine.
    pub id: String,
    /// Counters since the start.
    pub counters: Vec<Counter>,
}

/// Why a machine does not do what was requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlError {
    /// The machine is ending already.
    Ending,
    /// Its guest has a device tree, which has no power button.
    NoButton,
}

impl Live {
    pub(crate) fn new(exit: Arc<ExitLatch>, parts: LiveParts) -> Self {
        Self { exit, parts: Arc::new(Mutex::new(Some(parts))) }
    }

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn press_power_button(&self) -> Result<(), ControlError> {
        let parts = lock(&self.parts);
        let Some(parts) = parts.as_ref().filter(|_| !self.is_ending()) else {
            return Err(ControlError::Ending);
        };
        parts.button.as_ref().map(|button| button()).ok_or(ControlError::NoButton)
    }

    /// Ends the machine, with its disks flushed. Without effect once it ends: clients of cloud-hypervisor request
    /// `vm.shutdown` and then `vmm.shutdown`.
    pub fn stop(&self) {
        self.exit.set(ExitReason::Requested);
    }

    /// Whether the machine ends.
    pub fn is_ending(&self) -> bool {
        self.exit.is_set()
    }

    /// Counters of each device; `None` once the machine ends.
    pub fn counters(&self) -> Option<Vec<DeviceCounters>> {
        lock(&self.parts).as_ref().map(|parts| (parts.counters)())
    }

    /// Message interrupts that vectors use; `None` once the machine ends.
    pub fn messages(&self) -> Option<Vec<Message>> {
        lock(&self.parts).as_ref().map(|parts| (parts.messages)())
    }

    /// Releases the machine's parts. No other thread uses them when this returns.
    pub(super) fn close(&self) {
        drop(lock(&self.parts).take());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn live(button: Option<Interrupt>) -> Live {
        let (counters, messages) = (Box::new(Vec::<DeviceCounters>::new), Box::new(Vec::<Message>::new));
        Live::new(ExitLatch::new().unwrap(), LiveParts { button, counters, messages })
    }

    #[test]
    fn a_press_reaches_the_guest_unless_it_has_no_button_or_ends() {
        let pressed = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&pressed);
        let live_one = live(Some(Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        })));
        assert_eq!(live_one.press_power_button(), Ok(()));
        live_one.stop();
        assert_eq!(live_one.press_power_button(), Err(ControlError::Ending));
        assert_eq!(pressed.load(Ordering::Relaxed), 1);
        assert_eq!(live(None).press_power_button(), Err(ControlError::NoButton));
    }

    #[test]
    fn the_first_request_ends_the_machine_and_the_second_changes_nothing() {
        let live = live(None);
        live.stop();
        assert_eq!((live.exit.reason(), live.exit.is_hurried()), (Some(&ExitReason::Requested), false));
        live.stop();
        assert!(!live.exit.is_hurried(), "its disks are not waited for");
    }

    /// A slice is not returned while a reference to its memory is left.
    #[test]
    fn nothing_of_a_machine_is_left_once_it_is_closed() {
        let memory = Arc::new(());
        let kept = Arc::clone(&memory);
        let counters =
            Box::new(move || vec![DeviceCounters { id: format!("{kept:?}"), counters: Vec::new() }]);
        let parts = LiveParts { button: None, counters, messages: Box::new(Vec::<Message>::new) };
        let live = Live::new(ExitLatch::new().unwrap(), parts);
        let other = live.clone();
        assert_eq!((other.counters().unwrap().len(), Arc::strong_count(&memory)), (1, 2));
        live.close();
        assert_eq!((other.counters(), other.messages(), Arc::strong_count(&memory)), (None, None, 1));
    }
}
