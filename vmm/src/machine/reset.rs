//! A reset of the guest in place: the machine keeps its slices, descriptors and threads.
//!
//! ```text
//!  guest ─► ResetLine ─► gate closes ─► vCPUs complete their accesses and wait
//!             ┌───────────────────────────┘
//!             └─► event loop, MachineReset: virtio ─► host functions, bridges ─► virtio is quiescent
//!                   ─► board, interrupt controllers ─► tables and kernel
//!             ┌───────┘
//!             └─► each vCPU, VcpuReset: its registers ─► gate opens
//! ```
//! The guest's other memory keeps its bytes, as it does through a warm reset of hardware (PCI Express Base 6.0 §6.6.1).

use std::sync::mpsc::{TryRecvError, sync_channel};
use std::sync::{Arc, Mutex};

use event_manager::EventManager;
use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;

use super::Subscriber;
use super::bus::Bus;
use super::exit::{ExitLatch, ExitReason};
use super::finish::{self, RunningDevices};
use super::load::reload_guest;
use super::pause::PauseGate;
use super::poison::{Interrupt, Poison};
use crate::arch::boot::BootFiles;
use crate::arch::native::boot::Entry;
use crate::arch::native::reset::InitialState;
use crate::config::OnReset;
use crate::error::{Chain, Report};
use crate::hotplug;
use crate::kvm::{KvmError, Vm};
use crate::lock::lock;
use crate::pci::{Plugged, RootComplex};
use crate::plan::Plan;

/// Line by which the guest resets its machine: a write of a register, or a firmware call.
#[derive(Clone)]
pub(super) struct ResetLine {
    exit: Arc<ExitLatch>,
    /// The gate of a machine that a reset does not end.
    gate: Option<Arc<PauseGate>>,
}

impl ResetLine {
    /// The line of a machine that `exit` ends, with its vCPUs behind `gate`.
    pub(super) fn new(on_reset: OnReset, exit: &Arc<ExitLatch>, gate: &Arc<PauseGate>) -> Self {
        let gate = (on_reset == OnReset::Reboot).then(|| Arc::clone(gate));
        Self { exit: Arc::clone(exit), gate }
    }

    /// A function that requests a reset; `None` where that ends the machine.
    pub(super) fn request(&self) -> Option<Interrupt> {
        let line = self.clone();
        self.gate.is_some().then(|| Box::new(move || line.assert()) as Interrupt)
    }

    /// Requests a reset, or ends the machine.
    pub(super) fn assert(&self) {
        match &self.gate {
            Some(gate) => {
                gate.request_reset();
                let _ = self.exit.wake().write(1); // a full counter has woken the event loop already
            }
            None if egm_address::fault!("reset-as-power-off") => self.exit.set(ExitReason::PoweredOff),
            None => self.exit.set(ExitReason::Reset),
        }
    }
}

/// State of vCPUs and interrupt controllers after a reset.
pub(super) struct VcpuReset {
    initial: InitialState,
    /// Where the first vCPU begins in the kernel that was loaded last.
    entry: Mutex<Entry>,
}

impl VcpuReset {
    /// With `initial`, which only machines that a reset does not end read, and `entry`.
    ///
    /// # Errors
    /// Those of `initial`.
    pub(super) fn of(
        on_reset: OnReset,
        initial: impl FnOnce() -> Result<InitialState, KvmError>,
        entry: Entry,
    ) -> Result<Option<Arc<Self>>, KvmError> {
        let initial = (on_reset == OnReset::Reboot).then(initial).transpose()?;
        Ok(initial.map(|initial| Arc::new(Self { initial, entry: Mutex::new(entry) })))
    }

    /// Resets vCPU `index`, on its own thread.
    ///
    /// # Errors
    /// [`ExitReason::Hypervisor`].
    pub(super) fn restore(&self, index: u32, fd: &VcpuFd) -> Result<(), ExitReason> {
        if egm_address::fault!("reset-keeps-registers") {
            return Ok(());
        }
        let position = usize::try_from(index).unwrap_or(usize::MAX);
        let restored = self.initial.restore_vcpu(position, fd, &lock(&self.entry));
        restored.map_err(|error| ExitReason::Hypervisor {
            vcpu: index,
            what: format!("cannot reset it: {}", Chain(&error)),
        })
    }
}

/// The parts of a machine that its reset changes or reads.
pub(super) struct MachineReset {
    pub(super) plan: Plan,
    /// Open since the start, and read again.
    pub(super) files: BootFiles,
    pub(super) memory: GuestMemoryMmap,
    pub(super) root: Arc<RootComplex>,
    pub(super) vcpus: Arc<VcpuReset>,
    pub(super) hotplug: Option<hotplug::Handle>,
    pub(super) devices: RunningDevices,
    pub(super) poison: Arc<Mutex<Poison>>,
}

impl MachineReset {
    /// Resets all but the vCPUs, which wait outside the guest, and runs the event loop meanwhile; `buses` have the devices of
    /// the board. A machine that ends is left as it is.
    ///
    /// # Errors
    /// The reason why the guest cannot start again.
    pub(super) fn carry_out(
        &mut self,
        vm: &Vm,
        exit: &Arc<ExitLatch>,
        buses: [&Bus; 2],
        events: &mut EventManager<Subscriber>,
    ) -> Result<(), ExitReason> {
        let devices = lock(&self.devices).clone();
        if !egm_address::fault!("reset-keeps-functions") {
            devices.iter().for_each(|kept| kept.function.reset(&[]));
        }
        self.reset_host_functions(events, exit)?;
        let ends = || exit.is_set();
        let busy = finish::wait_for_all(&devices, events, "SIGTERM ends the machine", &ends);
        if ends() {
            return Ok(());
        }
        if let Some(busy) = busy {
            // It still writes to memory, which the next kernel would own.
            return Err(ExitReason::NotInPlace(format!("{} does not answer", busy.name)));
        }
        if lock(&self.poison).has_bad_ram() {
            let what = "some of its memory is bad, which a new start leaves out";
            return Err(ExitReason::NotInPlace(what.to_owned()));
        }
        if !egm_address::fault!("reset-keeps-board") {
            buses.iter().for_each(|bus| bus.warm_reset());
        }
        if !egm_address::fault!("reset-keeps-controllers") {
            self.vcpus.initial.restore_controllers(vm).map_err(|error| internal(&error))?;
        }
        let entry = reload_guest(&self.plan, vm, &self.memory, &mut self.files);
        *lock(&self.vcpus.entry) = entry.map_err(|error| internal(&error))?;
        Ok(())
    }

    /// Resets host functions and bridges, on the controller's thread if there is one: functions take up to seconds.
    fn reset_host_functions(
        &self,
        events: &mut EventManager<Subscriber>,
        exit: &Arc<ExitLatch>,
    ) -> Result<(), ExitReason> {
        let Some(hotplug) = &self.hotplug else {
            self.root.warm_reset();
            return Ok(());
        };
        let (done, reply) = sync_channel(1);
        let wake = Arc::clone(exit);
        let sent = hotplug.reset(Box::new(move || {
            let _ = done.send(());
            let _ = wake.wake().write(1);
        }));
        let lost =
            || ExitReason::Internal("cannot reset the machine: no thread resets its devices".to_owned());
        sent.map_err(|_| lost())?;
        loop {
            match reply.try_recv() {
                Ok(()) => return Ok(()),
                Err(TryRecvError::Empty) if exit.is_set() => return Ok(()),
                Err(TryRecvError::Empty) if finish::turn(events, finish::SILENCE) => {}
                Err(_) => return Err(lost()),
            }
        }
    }
}

fn internal(error: &dyn Report) -> ExitReason {
    ExitReason::Internal(format!("cannot reset the machine: {}", Chain(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_closes_the_gate_of_a_machine_that_reboots_and_ends_any_other() {
        let (exit, gate) = (ExitLatch::new().unwrap(), Arc::new(PauseGate::default()));
        ResetLine::new(OnReset::Reboot, &exit, &gate).assert();
        assert_eq!((exit.reason(), gate.is_reset_due(0), exit.wake().read().unwrap()), (None, true, 1));
        ResetLine::new(OnReset::Exit, &exit, &gate).assert();
        assert_eq!(exit.reason(), Some(&ExitReason::Reset));
    }
}
