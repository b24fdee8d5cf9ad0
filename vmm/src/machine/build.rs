//! From plan and resources to a machine: straight-line code, one function a stage.

use std::io;
use std::sync::{Arc, Mutex};

use egm_device::region::RegionKind;
use egm_vfio::memory::HostMemory;
use event_manager::EventManager;

use super::board::Board;
use super::error::BuildError;
use super::exit::ExitLatch;
use super::finish::{RunningDevice, RunningDevices};
use super::live::{DeviceCounters, Live, LiveParts};
use super::load::{Loaded, acpi_line, load_guest, pulse};
use super::pause::PauseGate;
use super::plugged::{DeviceMaker, ServedMemory};
use super::poison::{Interrupt, Poison, Reports, SliceDevice};
use super::reset::{ResetLine, VcpuReset};
use super::save::{Origin, SnapshotParts};
use super::signals::Signals;
use super::slices::SliceLists;
use super::tree::{self, Connections};
use super::vcpu::{Shared, Vcpu};
use super::vcpu_states::VcpuStates;
use super::virtio::{Changes, Running};
use super::{Machine, MachineStep, Subscriber, Wake};
use crate::api::{Journal, MachineEvent};
use crate::arch::native::reset::InitialState;
use crate::arch::native::state::VcpuInterface;
use crate::arch::native::vcpu::{Created, configure, create};
use crate::arch::native::vm::CACHED_PFNMAP;
use crate::hotplug::{self, Controller, Devices, Event, Handle, Occupant, Slot};
use crate::kvm::{Routes, SlotTable, Vm};
use crate::lock::lock;
use crate::memory::GuestRam;
use crate::pci::RootComplex;
use crate::plan::{POWER_BUTTON, Plan};
use crate::reserve::Leases;
use crate::resources::{OpenDevice, OpenedDevice, Resources, ThreadError};

/// Builds the machine of `plan`, with its events in `journal`.
///
/// # Errors
/// [`BuildError`]; `resources` are released.
pub fn build(plan: &Plan, resources: Resources, journal: &Arc<Journal>) -> Result<Machine, BuildError> {
    let Resources { hypervisor, vm, ram, mut boot, console, devices, spaces, leases, is_restored, .. } =
        resources;
    let console = Arc::new(Mutex::new(console));
    let exit = ExitLatch::new()?;
    let lacks_caching = lacks_caching(&vm, plan, &leases)?;
    map_memory(&vm, &ram)?;
    let Created { vcpus, controllers } = create(&hypervisor, &vm, plan)?;
    let states = VcpuStates::new(VcpuInterface::of(&hypervisor)?);

    let gate: Arc<PauseGate> = Arc::default();
    let reset = ResetLine::new(plan.on_reset, &exit, &gate);
    let mut board = Board::new(plan, &vm, &exit, &reset)?;
    let mut subscribers: Vec<Subscriber> = vec![board.serial(Arc::clone(&console))?];

    let slices: Vec<_> = devices.iter().filter_map(slice).collect();
    let connections = Connections::new(&vm, ram.memory.clone(), &spaces, plan)?;
    let mut tree = tree::build(plan, devices, &connections)?;
    subscribers.extend(tree.subscribers);
    let root = Arc::new(tree.root);
    let routes = Arc::clone(&connections.assigner.routes);
    let changes = Changes::new(Arc::clone(&exit));
    let devices: RunningDevices = Arc::new(Mutex::new(tree.devices));
    let running = Running { changes: changes.clone(), devices: Arc::clone(&devices) };
    board.pci(&root)?;

    let Loaded { entry, errors } =
        load_guest(plan, &vm, &ram.memory, boot.as_mut().filter(|_| !is_restored))?;
    let reporter = configure(&hypervisor, plan, &vcpus, &entry)?;
    let initial = || InitialState::of(&hypervisor, &states.interface, &vm, &controllers, &vcpus);
    let vcpu_reset = VcpuReset::of(plan.on_reset, initial, entry)?;
    let vcpus = Vcpu::all(vcpus, &plan.vcpus);
    let reports = Reports { reporter, errors, journal: Arc::clone(journal) };
    let (poison, checks) = Poison::new(plan, &ram, &leases, &slices, reports)?.shared();
    subscribers.extend([Arc::clone(&poison) as Subscriber, Arc::new(Mutex::new(Wake(Arc::clone(&exit))))]);
    let lists = SliceLists::of(leases, &poison, journal, &slices, &mut tree.hotplug_slots);
    let maker = maker(running, &connections, ServedMemory::new(plan, &ram), lists, lacks_caching);
    let hotplug = keep(plan, &root, tree.hotplug_slots, tree.fixed, maker, journal)?;
    let events = EventManager::new().map_err(io::Error::other)?;
    let button = || acpi_line(plan, POWER_BUTTON).map(|gsi| pulse(&vm, gsi));
    let handle = hotplug.as_ref().map(|running| running.handle.clone());
    let snapshot = SnapshotParts {
        plan: plan.clone(),
        origin: Origin::new(console, boot.as_ref())?,
        root,
        controllers,
        hotplug: handle.clone(),
        devices: Arc::clone(&devices),
        poison: Arc::clone(&poison),
    };
    let machine_reset = vcpu_reset.clone().zip(boot);
    let machine_reset = machine_reset.map(|(vcpus, files)| snapshot.reset(vcpus, files, ram.memory.clone()));
    let parts = parts(button(), reset.request(), handle, Arc::clone(&devices), routes);
    let live = Live::new(Arc::clone(&exit), Arc::clone(&gate), parts);
    // Until here signals end the process.
    subscribers.push(Arc::new(Mutex::new(Signals::new(Arc::clone(&exit), button())?)));
    let Board { ports, memory, .. } = board;
    let shared = Arc::new(Shared { ports, memory, exit, checks, gate, reset, vcpu_reset, states });
    Ok(Machine {
        events,
        changes,
        vcpus,
        shared,
        devices,
        hotplug,
        poison,
        live,
        subscribers,
        sandbox: None,
        machine_reset,
        snapshot,
        first_step: MachineStep::Started,
        vm,
        ram,
    })
}

/// Makes devices for hot-plug ports.
fn maker(
    running: Running,
    connections: &Connections<'_>,
    memory: ServedMemory,
    lists: SliceLists,
    lacks_caching: Option<u32>,
) -> DeviceMaker {
    let (wiring, assigner) = (connections.wiring.clone(), connections.assigner.clone());
    let (lines, domain) = (connections.lines.clone(), connections.domain.clone());
    let vm = connections.vm.clone();
    DeviceMaker { running, domain, wiring, assigner, memory, lines, vm, lists, lacks_caching }
}

/// The parts of the machine that other threads use.
fn parts(
    button: Option<Interrupt>,
    reset: Option<Interrupt>,
    hotplug: Option<Handle>,
    devices: RunningDevices,
    routes: Arc<Routes>,
) -> LiveParts {
    let counters = move || -> Vec<DeviceCounters> {
        let counters = |kept: &RunningDevice| {
            let counters = kept.function.counters();
            DeviceCounters { id: kept.id.clone(), counters }
        };
        lock(&devices).iter().map(counters).collect()
    };
    let messages = Box::new(move || routes.messages());
    LiveParts { button, reset, hotplug, is_confined: false, counters: Box::new(counters), messages }
}

/// The PCI function of a slice, if the device is one.
fn slice(OpenedDevice { device, opened }: &OpenedDevice) -> Option<SliceDevice> {
    match opened {
        OpenDevice::Slice(slice) => {
            Some(SliceDevice { id: device.id.clone(), function: slice.function.clone() })
        }
        _ => None,
    }
}

/// Starts the controller of host functions and hot-plug ports, if there are any.
fn keep(
    plan: &Plan,
    root: &Arc<RootComplex>,
    slots: Vec<Slot>,
    fixed: Vec<Occupant>,
    maker: DeviceMaker,
    journal: &Arc<Journal>,
) -> Result<Option<hotplug::Running>, BuildError> {
    if slots.is_empty() && fixed.is_empty() {
        return Ok(None);
    }
    let (devices, maker) = (Devices::from(plan), Box::new(maker));
    let controller = Controller::new(Arc::clone(root), slots, fixed, devices, maker, reporter(journal))?;
    Ok(Some(controller.start().map_err(ThreadError::from)?))
}

/// Reports events of host functions to the operator, by messages and in `journal`.
fn reporter(journal: &Arc<Journal>) -> Box<dyn Fn(&Event) + Send> {
    let journal = Arc::clone(journal);
    Box::new(move |event| {
        tracing::info!("{event}");
        let (device, change, text) = (event.id.clone(), event.what.name(), event.to_string());
        journal.publish(&MachineEvent::Device { device, change, text });
    })
}

/// The capability that KVM lacks to map slices of EGM devices as cached.
///
/// # Errors
/// [`BuildError::NotCacheable`] for a machine that has such a slice.
fn lacks_caching(vm: &Vm, plan: &Plan, leases: &Leases) -> Result<Option<u32>, BuildError> {
    let kind = |id: &String| Some((id.clone(), leases.get(id)?.region().kind.clone()));
    let slices: Vec<_> = plan.backings.iter().filter_map(|backing| kind(&backing.id)).collect();
    let lacks = CACHED_PFNMAP.filter(|known| !vm.slots().supports(*known));
    check_caching(&slices, lacks).map(|()| lacks)
}

/// Refuses a slice of an EGM device if KVM lacks the capability `lacks`: without struct pages, KVM would not map it as
/// cached.
fn check_caching(slices: &[(String, RegionKind)], lacks: Option<u32>) -> Result<(), BuildError> {
    let egm = slices.iter().find(|(_, kind)| matches!(kind, RegionKind::Egm { .. }));
    match (egm, lacks) {
        (Some((backing, _)), Some(capability)) => {
            Err(BuildError::NotCacheable { backing: backing.clone(), capability })
        }
        _ => Ok(()),
    }
}

fn map_memory(vm: &Vm, ram: &GuestRam) -> Result<(), BuildError> {
    for piece in &ram.pieces {
        vm.slots().add(piece.gpa, Arc::clone(&piece.shared) as Arc<dyn HostMemory>)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Blame, Report};
    use crate::hotplug::EventKind;

    #[test]
    fn what_happens_to_a_function_is_in_the_journal() {
        let journal = Journal::opened();
        let (id, function) = ("gpu0".to_owned(), "0000:41:00.0".to_owned());
        reporter(&journal)(&Event { id, function, what: EventKind::Plugged(3) });
        let [event] = &journal.values()[..] else { panic!("{:?}", journal.values()) };
        assert_eq!((&event["event"], &event["device"]), (&"device".into(), &"gpu0".into()));
        assert_eq!(event["change"], "plugged");
        assert!(event["text"].as_str().unwrap().contains("slot 3"), "{event}");
    }

    #[test]
    fn only_a_slice_of_an_egm_device_needs_kvm_to_cache_memory_without_pages() {
        let egm = RegionKind::Egm { device: "/dev/egm4".into() };
        let slices = [("egm0".to_owned(), RegionKind::Hugetlb), ("egm1".to_owned(), egm)];
        assert!(check_caching(&slices, None).is_ok());
        assert!(check_caching(&slices[..1], Some(243)).is_ok());
        let error = check_caching(&slices, Some(243)).unwrap_err();
        assert!(error.to_string().contains("\"egm1\" as cached: it lacks capability 243"), "{error}");
        assert_eq!(error.blame(), Blame::Host);
    }
}
