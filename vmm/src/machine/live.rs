//! A running machine as other threads see and control it.

use std::sync::{Arc, Mutex, OnceLock};

use super::exit::{ExitLatch, ExitReason};
use super::grants::{self, PluggedSlice};
use super::hand_over::{NextUpgrade, UpgradeRequest};
use super::pause::{PauseGate, PauseState};
use super::poison::Interrupt;
use super::save::{NextSnapshot, SnapshotRequest};
use crate::config::{Device, NewSlice};
use crate::hotplug::{self, DeviceAddresses, HotplugError, Plug, PluggedDevice, Reply};
use crate::kvm::Message;
use crate::lock::lock;
use crate::reserve::Granter;
use crate::virtio::Counter;

/// Access to a machine from any thread, while it runs.
#[derive(Clone)]
pub struct Live {
    exit: Arc<ExitLatch>,
    gate: Arc<PauseGate>,
    /// `None` once the machine ends: from then on this keeps neither its memory nor its descriptors.
    parts: Arc<Mutex<Option<LiveParts>>>,
    snapshot: NextSnapshot,
    upgrade: NextUpgrade,
    /// Grants further slices; unset in a machine of --user.
    granter: Arc<OnceLock<Arc<Granter>>>,
}

/// Parts of a machine that other threads use, as functions that neither wait nor fail.
pub(crate) struct LiveParts {
    /// Presses the power button, where the guest's tables have one.
    pub(crate) button: Option<Interrupt>,
    /// Resets the guest in place, unless a reset ends the machine.
    pub(crate) reset: Option<Interrupt>,
    /// Plugs devices in and out, where there is a function of the host or a hot-plug port.
    pub(crate) hotplug: Option<hotplug::Handle>,
    /// Whether a sandbox forbids to open further devices.
    pub(crate) is_confined: bool,
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
    /// A reset ends it.
    EndsAtReset,
    /// It is paused already, or about to be.
    Paused,
    /// It is not paused.
    NotPaused,
    /// It has no hot-plug port.
    NoPorts,
    /// Its guest is paused, and releases no device.
    GuestPaused,
    /// Its sandbox forbids to open a device.
    Confined,
    /// Its sandbox forbids to open the files of a snapshot.
    ConfinedSnapshot,
    /// Another request for a snapshot waits.
    Saving,
    /// Another request for a slice is being carried out.
    Granting,
    /// It runs with --user, without access to the ledger.
    NoGranter,
    /// The host has no thread left.
    NoThread,
}

impl Live {
    pub(crate) fn new(exit: Arc<ExitLatch>, gate: Arc<PauseGate>, parts: LiveParts) -> Self {
        Self {
            exit,
            gate,
            parts: Arc::new(Mutex::new(Some(parts))),
            snapshot: NextSnapshot::default(),
            upgrade: NextUpgrade::default(),
            granter: Arc::default(),
        }
    }

    /// Has `granter` grant it slices that are plugged in.
    pub(crate) fn set_granter(&self, granter: Granter) {
        let _ = self.granter.set(Arc::new(granter)); // set once, before the guest runs
    }

    /// Requests that the vCPUs leave the guest; they have when [`pause_state`](Self::pause_state) is [`PauseState::Paused`],
    /// which [`MachineStep::Paused`](super::MachineStep) reports.
    ///
    /// # Errors
    /// [`ControlError`].
    pub(crate) fn pause(&self) -> Result<(), ControlError> {
        self.change(|gate| gate.close().then_some(()).ok_or(ControlError::Paused))
    }

    /// Lets the vCPUs of a paused machine run.
    ///
    /// # Errors
    /// [`ControlError`].
    pub(crate) fn resume(&self) -> Result<(), ControlError> {
        self.change(|gate| gate.open().then_some(()).ok_or(ControlError::NotPaused))
    }

    /// Requests a snapshot of the paused machine, which the event loop writes.
    ///
    /// # Errors
    /// [`ControlError`], without a call of the reply.
    pub(crate) fn snapshot(&self, request: SnapshotRequest) -> Result<(), ControlError> {
        if self.is_ending() {
            return Err(ControlError::Ending);
        }
        if lock(&self.parts).as_ref().is_some_and(|parts| parts.is_confined) {
            return Err(ControlError::ConfinedSnapshot);
        }
        if self.pause_state() != PauseState::Paused && !request.is_dry_run {
            return Err(ControlError::NotPaused);
        }
        let mut next = lock(&self.snapshot);
        if next.is_some() {
            return Err(ControlError::Saving);
        }
        *next = Some(request);
        drop(next);
        let _ = self.exit.wake().write(1); // a full counter has woken it already
        Ok(())
    }

    /// The next snapshot to write.
    pub(super) fn next_snapshot(&self) -> NextSnapshot {
        Arc::clone(&self.snapshot)
    }

    /// Requests that another program takes the machine over, which the event loop carries out. A request that waits for that
    /// already is dropped with its reply.
    pub(crate) fn upgrade(&self, request: UpgradeRequest) {
        *lock(&self.upgrade) = Some(request.into());
        let _ = self.exit.wake().write(1); // a full counter has woken it already
    }

    /// The next request of an upgrade.
    pub(super) fn next_upgrade(&self) -> NextUpgrade {
        Arc::clone(&self.upgrade)
    }

    fn change(
        &self,
        change: impl FnOnce(&PauseGate) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        if self.is_ending() {
            return Err(ControlError::Ending);
        }
        change(&self.gate)?;
        let _ = self.exit.wake().write(1); // the event loop interrupts the vCPUs, and reports the step
        Ok(())
    }

    pub(crate) fn pause_state(&self) -> PauseState {
        self.gate.state()
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

    /// Requests a reset of the guest in place, which [`MachineStep::Reset`](super::MachineStep) reports.
    ///
    /// # Errors
    /// [`ControlError`].
    pub(crate) fn reset(&self) -> Result<(), ControlError> {
        let parts = lock(&self.parts);
        let Some(parts) = parts.as_ref().filter(|_| !self.is_ending()) else {
            return Err(ControlError::Ending);
        };
        parts.reset.as_ref().map(|reset| reset()).ok_or(ControlError::EndsAtReset)
    }

    /// Plugs a device in, or plans that.
    ///
    /// # Errors
    /// [`ControlError`], without a call of `reply`.
    pub(crate) fn plug(&self, plug: Plug, reply: Reply<PluggedDevice>) -> Result<(), ControlError> {
        self.check_plug()?;
        self.of_controller(|controller| controller.plug(plug, reply))
    }

    /// Grants a slice and plugs it in, or plans that. `reply` is called on another thread.
    ///
    /// # Errors
    /// [`ControlError`], without a call of `reply`.
    pub(crate) fn plug_slice(
        &self,
        slice: NewSlice,
        is_dry_run: bool,
        reply: Reply<PluggedSlice>,
    ) -> Result<(), ControlError> {
        self.check_plug()?;
        let granter = self.granter.get().ok_or(ControlError::NoGranter)?;
        let (granter, parts) = (Arc::clone(granter), lock(&self.parts));
        let controller = parts.as_ref().and_then(|parts| parts.hotplug.clone());
        drop(parts);
        let controller = controller.ok_or(ControlError::Ending)?;
        if !granter.acquire() {
            return Err(ControlError::Granting);
        }
        let began = grants::plug(slice, is_dry_run, Arc::clone(&granter), controller, reply);
        began.map_err(|_| {
            granter.release();
            ControlError::NoThread
        })
    }

    /// Whether a device can be plugged in at all.
    ///
    /// # Errors
    /// [`ControlError`].
    pub(crate) fn check_plug(&self) -> Result<(), ControlError> {
        let is_confined =
            |parts: &LiveParts| parts.is_confined && !egm_address::fault!("plug-while-confined");
        if lock(&self.parts).as_ref().is_some_and(is_confined) {
            return Err(ControlError::Confined);
        }
        self.of_controller(|_| Ok(()))
    }

    /// Requests the device `id` back from the guest; `reply` is called after the request.
    ///
    /// # Errors
    /// [`ControlError`], without a call of `reply`.
    pub(crate) fn unplug(&self, id: String, reply: Reply<()>) -> Result<(), ControlError> {
        if self.pause_state() != PauseState::Running {
            return Err(ControlError::GuestPaused);
        }
        self.of_controller(|controller| controller.unplug(id, reply))
    }

    fn of_controller(
        &self,
        request: impl FnOnce(&hotplug::Handle) -> Result<(), HotplugError>,
    ) -> Result<(), ControlError> {
        let parts = lock(&self.parts);
        let Some(parts) = parts.as_ref().filter(|_| !self.is_ending()) else {
            return Err(ControlError::Ending);
        };
        let controller = parts.hotplug.as_ref().ok_or(ControlError::NoPorts)?;
        request(controller).map_err(|_| ControlError::Ending) // the controller ends after the machine only
    }

    /// PCI addresses in the guest of the devices that the machine has now; `None` where none comes or goes, or once the
    /// machine ends.
    pub(crate) fn devices(&self) -> Option<DeviceAddresses> {
        lock(&self.parts).as_ref()?.hotplug.as_ref().map(hotplug::Handle::devices)
    }

    /// Devices that were plugged in since the start and did not leave, by their slots; empty once the machine ends.
    pub(crate) fn plugged(&self) -> Vec<Device> {
        let parts = lock(&self.parts);
        let controller = parts.as_ref().and_then(|parts| parts.hotplug.as_ref());
        controller.map(hotplug::Handle::plugged).unwrap_or_default()
    }

    /// Refuses from now on to open devices, as the sandbox does.
    pub(super) fn confine(&self) {
        if let Some(parts) = lock(&self.parts).as_mut() {
            parts.is_confined = true;
        }
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

    /// The steps of a machine of `vcpus` vCPUs, as its event loop reports them.
    #[cfg(test)]
    pub(crate) fn settle_pause(&self, vcpus: usize) -> [Option<super::MachineStep>; 2] {
        self.gate.settle(vcpus)
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
    use crate::config::NewDevice;
    use crate::passed::Passed;

    fn live(button: Option<Interrupt>) -> Live {
        let (counters, messages) = (Box::new(Vec::<DeviceCounters>::new), Box::new(Vec::<Message>::new));
        let parts = LiveParts { button, reset: None, hotplug: None, is_confined: false, counters, messages };
        Live::new(ExitLatch::new().unwrap(), Arc::default(), parts)
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

    #[test]
    fn a_pause_wakes_the_event_loop_once_and_a_machine_that_ends_has_none() {
        let live = live(None);
        assert_eq!(live.resume(), Err(ControlError::NotPaused));
        assert!(live.exit.wake().read().is_err(), "the event loop has nothing to do");
        assert_eq!((live.pause(), live.pause()), (Ok(()), Err(ControlError::Paused)));
        assert_eq!((live.exit.wake().read().unwrap(), live.pause_state()), (1, PauseState::Pausing));
        assert_eq!((live.resume(), live.pause_state()), (Ok(()), PauseState::Running));
        assert_eq!(live.exit.wake().read().unwrap(), 1);
        live.stop();
        assert_eq!((live.pause(), live.resume()), (Err(ControlError::Ending), Err(ControlError::Ending)));
    }

    #[test]
    fn a_confined_machine_opens_no_further_device() {
        let live = live(None);
        let plug = || {
            let device = NewDevice::parse(br#"{"type":"virtio-rng"}"#.to_vec()).unwrap();
            let plug = Plug { device, is_dry_run: false, passed: Passed::default(), slice: None };
            live.plug(plug, Box::new(|_| panic!("there is no controller")))
        };
        assert_eq!(plug(), Err(ControlError::NoPorts));
        live.confine();
        assert_eq!(plug(), Err(ControlError::Confined));
        assert_eq!(live.unplug("gpu0".to_owned(), Box::new(|_| ())), Err(ControlError::NoPorts));
        live.pause().unwrap();
        assert_eq!(live.unplug("gpu0".to_owned(), Box::new(|_| ())), Err(ControlError::GuestPaused));
        live.resume().unwrap();
        live.stop();
        assert_eq!(live.unplug("gpu0".to_owned(), Box::new(|_| ())), Err(ControlError::Ending));
    }

    /// A slice is not returned while a reference to its memory is left.
    #[test]
    fn nothing_of_a_machine_is_left_once_it_is_closed() {
        let memory = Arc::new(());
        let kept = Arc::clone(&memory);
        let counters =
            Box::new(move || vec![DeviceCounters { id: format!("{kept:?}"), counters: Vec::new() }]);
        let messages = Box::new(Vec::<Message>::new);
        let parts =
            LiveParts { button: None, reset: None, hotplug: None, is_confined: false, counters, messages };
        let live = Live::new(ExitLatch::new().unwrap(), Arc::default(), parts);
        let other = live.clone();
        assert_eq!((other.counters().unwrap().len(), Arc::strong_count(&memory)), (1, 2));
        live.close();
        assert_eq!((other.counters(), other.messages(), Arc::strong_count(&memory)), (None, None, 1));
    }
}
