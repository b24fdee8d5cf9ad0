//! A snapshot of a paused machine, written on the thread of the event loop.
//!
//! ```text
//!  gate: paused ─► event loop turns until no request is with the host ─► each vCPU saves itself on its own thread
//!    ─► interrupt controllers (on Arm they write tables to memory) ─► devices ─► memory ─► files
//! ```
//! Nothing here changes the machine: whatever fails, it is paused as before, and can resume.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::EventManager;
use serde_json::Value;
use vm_memory::GuestMemoryMmap;

use super::Subscriber;
use super::finish::{self, RunningDevice, RunningDevices};
use super::poison::Poison;
use super::reset::{MachineReset, VcpuReset};
use super::saved::{MachineState, guest_view};
use super::vcpu::Shared;
use crate::arch::boot::BootFiles;
use crate::arch::native::state::{ControllersState, VcpuState};
use crate::arch::native::vcpu::Controllers;
use crate::config::{DeviceKind, Spec};
use crate::console::Console;
use crate::error::Chain;
use crate::hotplug;
use crate::kept::KeptPart;
use crate::kvm::{KvmError, Vm};
use crate::lock::lock;
use crate::memory::GuestRam;
use crate::pci::RootComplex;
use crate::plan::{FunctionRole, Plan};
use crate::snapshot::{Contents, NewSnapshot, STATE, SaveReason, SnapshotError};

/// Time that storage has to answer the guest's requests.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A request for a snapshot, and the function that gets its result on the thread of the event loop.
pub(crate) struct SnapshotRequest {
    pub(crate) folder: PathBuf,
    /// Devices that were unplugged for it, as entries of `"devices"`: the restored machine plugs them in when it first runs.
    pub(crate) unplugged: Vec<Value>,
    /// Whether it is only checked that one could be written without what was plugged in.
    pub(crate) is_dry_run: bool,
    pub(crate) reply: Box<dyn FnOnce(Result<(), SnapshotError>) + Send>,
}

/// The next request for a snapshot, if there is one.
pub(crate) type NextSnapshot = Arc<Mutex<Option<SnapshotRequest>>>;

/// Of what a machine was made.
pub(super) struct Origin {
    /// Configuration of the machine; `None` in tests that have none.
    pub(super) spec: Option<Spec>,
    /// Devices that were unplugged for the snapshot that it began with, until it first runs.
    pub(super) unplugged: Unplugged,
    pub(super) console: Arc<Mutex<Console>>,
    /// Kernel and initramfs, where a reset loads them again.
    pub(super) boot: KeptPart,
}

impl Origin {
    /// Without a configuration, with duplicates of the files of `boot`.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(super) fn new(console: Arc<Mutex<Console>>, boot: Option<&BootFiles>) -> io::Result<Self> {
        let files = boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initramfs.as_ref()]).flatten();
        let boot = KeptPart::of(files.map(AsFd::as_fd))?;
        Ok(Self { spec: None, unplugged: Unplugged::default(), console, boot })
    }
}

/// Devices to plug in when the guest first runs, as entries of `"devices"`.
pub(crate) type Unplugged = Arc<Mutex<Vec<Value>>>;

/// The parts of a machine that its snapshot reads, beside those that run it.
pub(super) struct SnapshotParts {
    pub(super) plan: Plan,
    pub(super) origin: Origin,
    pub(super) root: Arc<RootComplex>,
    pub(super) controllers: Arc<Controllers>,
    pub(super) hotplug: Option<hotplug::Handle>,
    pub(super) devices: RunningDevices,
    pub(super) poison: Arc<Mutex<Poison>>,
}

/// The parts that run it.
pub(super) struct RunningParts<'a> {
    pub(super) vm: &'a Vm,
    pub(super) ram: &'a GuestRam,
    pub(super) shared: &'a Shared,
}

/// A machine that is held for a snapshot. Its drop starts the vhost workers again and opens the gate, also after a failure.
pub(super) struct Saving<'a> {
    shared: &'a Shared,
    /// Devices of which the vhost workers were stopped.
    devices: Vec<RunningDevice>,
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.devices.iter().for_each(|kept| kept.function.resume_vhost());
        self.shared.gate.end_save();
    }
}

impl Saving<'_> {
    fn stop_vhost(&mut self, devices: &[RunningDevice]) -> Result<(), SaveReason> {
        for kept in devices {
            self.devices.push(kept.clone());
            let stopped = kept.function.stop_vhost();
            stopped.map_err(|error| {
                SaveReason::Kernel(format!("cannot read the queues of {}: {error}", kept.name))
            })?;
        }
        Ok(())
    }
}

pub(super) fn refused(what: impl Into<String>, remedy: impl Into<String>) -> SaveReason {
    SaveReason::Refused { what: what.into(), remedy: remedy.into() }
}

fn kvm(error: &KvmError) -> SaveReason {
    SaveReason::Kernel(Chain(error).to_string())
}

impl SnapshotParts {
    /// The reset of the same machine, which loads `files` again.
    pub(super) fn reset(
        &self,
        vcpus: Arc<VcpuReset>,
        files: BootFiles,
        memory: GuestMemoryMmap,
    ) -> MachineReset {
        MachineReset {
            plan: self.plan.clone(),
            files,
            memory,
            root: Arc::clone(&self.root),
            vcpus,
            hotplug: self.hotplug.clone(),
            devices: Arc::clone(&self.devices),
            poison: Arc::clone(&self.poison),
        }
    }

    /// Checks all that can be checked of a snapshot in `folder` while the guest runs, but for what was plugged in.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(super) fn dry_run(&self, folder: &Path) -> Result<(), SnapshotError> {
        let checked = self.check_planned().and_then(|()| self.configuration());
        checked.map_err(|reason| SnapshotError { folder: folder.to_owned(), reason })?;
        NewSnapshot::begin(folder).map(drop)
    }

    /// Writes a snapshot into `folder`, and runs the event loop meanwhile. The restored machine will plug in the devices
    /// `unplugged`.
    ///
    /// # Errors
    /// [`SnapshotError`]; the machine is as before.
    pub(super) fn carry_out(
        &self,
        folder: &Path,
        unplugged: Vec<Value>,
        running: &RunningParts<'_>,
        events: &mut EventManager<Subscriber>,
    ) -> Result<(), SnapshotError> {
        let failed = |reason| SnapshotError { folder: folder.to_owned(), reason };
        self.check().map_err(failed)?;
        let machine = self.configuration().map_err(failed)?;
        // Before the machine is held: most requests that fail do so here.
        let new = NewSnapshot::begin(folder)?;
        let (_saving, state) = self.hold(unplugged, running, events).map_err(failed)?;
        let state = serde_json::to_vec(&state).map_err(|error| {
            failed(SaveReason::File { step: "cannot write", name: STATE.to_owned(), source: error.into() })
        })?;
        let contents = Contents { machine: &machine, state: &state, memory: running.ram.saved_pieces() };
        // What came or broke meanwhile is in no snapshot either.
        let ends = || running.shared.exit.is_set();
        new.write(&contents, |file| running.ram.save(file, &ends), || self.check())
    }

    /// Holds the paused machine, and reads its state but for its memory. It is held as long as the first value lives.
    ///
    /// # Errors
    /// [`SaveReason`]; the machine is as before.
    pub(super) fn hold<'a>(
        &self,
        mut unplugged: Vec<Value>,
        running: &RunningParts<'a>,
        events: &mut EventManager<Subscriber>,
    ) -> Result<(Saving<'a>, MachineState), SaveReason> {
        if !running.shared.gate.begin_save(self.plan.vcpus.len()) {
            return Err(SaveReason::NotPaused);
        }
        let mut saving = Saving { shared: running.shared, devices: Vec::new() };
        // Interrupts of what completes belong to the state of the vCPUs.
        self.quiesce(events, running.shared)?;
        saving.stop_vhost(&lock(&self.devices))?;
        running.shared.gate.save_vcpus();
        let vcpus = running.shared.states.take().map_err(|error| kvm(&error))?;
        // One of a machine that ends waits no more.
        if vcpus.len() != self.plan.vcpus.len() {
            return Err(SaveReason::NotPaused);
        }
        unplugged.extend(lock(&self.origin.unplugged).iter().cloned());
        Ok((saving, self.state(vcpus, unplugged, running)?))
    }

    /// Refuses a machine with something that no snapshot has.
    pub(super) fn check(&self) -> Result<(), SaveReason> {
        self.check_planned()?;
        let Some(hotplug) = &self.hotplug else { return Ok(()) };
        if hotplug.is_plugging() {
            return Err(refused("a device is being plugged in", "try again when that is answered"));
        }
        let planned = self.plan.device_addresses();
        match hotplug.devices().keys().find(|id| !planned.contains_key(*id)) {
            Some(id) => Err(refused(
                format!("device \"{id}\" was plugged in while the guest ran"),
                "let its guest release it: egm-vmm ctl --api SOCKET resume, then snapshot --unplug DIR, or upgrade --unplug",
            )),
            None => Ok(()),
        }
    }

    /// The same without what was plugged in.
    pub(super) fn check_planned(&self) -> Result<(), SaveReason> {
        for function in &self.plan.pci {
            if let FunctionRole::Endpoint { device, .. } = &function.role
                && device.kind.is_assigned()
            {
                let id = &device.id;
                let what = match &device.kind {
                    DeviceKind::VfioUser { .. } => format!("device \"{id}\" is served by another process"),
                    DeviceKind::Egm { .. } => format!("slice \"{id}\" is a PCI function"),
                    _ => format!("device \"{id}\" is a function of the host: its state cannot be read"),
                };
                return Err(refused(what, "start the machine without it"));
            }
        }
        if let Some(backing) = self.plan.backings.iter().find(|backing| backing.guest_memfd) {
            let what = format!("\"{}\" is memory of the VM itself (guest_memfd)", backing.id);
            return Err(refused(what, "give \"region\" another value, and start the machine again"));
        }
        if lock(&self.poison).has_bad_ram() {
            return Err(refused("some of its memory is bad", "shut the guest down, and start it again"));
        }
        Ok(())
    }

    /// The text of `machine.json`. It sets `"vhost": false` for a network device that this process serves: vhost may lack a feature
    /// that the guest uses.
    fn configuration(&self) -> Result<String, SaveReason> {
        let spec =
            self.origin.spec.as_ref().ok_or_else(|| refused("it has no configuration", "use egm-vmm run"))?;
        let mut spec = spec.clone();
        let running = lock(&self.devices);
        let uses_vhost = |id: &str| running.iter().any(|kept| kept.id == id && kept.function.uses_vhost());
        for device in &mut spec.devices {
            if let DeviceKind::VirtioNet { vhost, .. } = &mut device.kind
                && !uses_vhost(&device.id)
            {
                *vhost = Some(false);
            }
        }
        let file = spec.to_file();
        let file = file.map_err(|error| {
            refused(error.to_string(), "change the configuration, and start the machine again")
        })?;
        Ok(file.to_json())
    }

    /// Runs the event loop until the host has no request of the guest; its vCPUs wait.
    fn quiesce(&self, events: &mut EventManager<Subscriber>, shared: &Shared) -> Result<(), SaveReason> {
        let devices = lock(&self.devices).clone();
        let start = Instant::now();
        while let Some(busy) = devices.iter().find(|kept| kept.function.is_busy()) {
            let left = TIMEOUT.saturating_sub(start.elapsed());
            if shared.exit.is_set() {
                return Err(SaveReason::NotPaused);
            }
            if left.is_zero() || !finish::turn(events, left.min(finish::SILENCE)) {
                return Err(SaveReason::Silent { name: busy.name.clone() });
            }
        }
        Ok(())
    }

    fn state(
        &self,
        vcpus: Vec<VcpuState>,
        unplugged: Vec<Value>,
        running: &RunningParts<'_>,
    ) -> Result<MachineState, SaveReason> {
        let controllers = ControllersState::save(running.vm, &self.controllers);
        let devices = lock(&self.devices);
        let device = |kept: &RunningDevice| (kept.id.clone(), kept.function.saved());
        Ok(MachineState {
            guest: guest_view(&self.plan),
            vcpus,
            controllers: controllers.map_err(|error| kvm(&error))?,
            ports: running.shared.ports.saved(),
            mmio: running.shared.memory.saved(),
            bridges: self.root.saved(),
            devices: devices.iter().map(device).collect(),
            unplugged,
        })
    }
}
