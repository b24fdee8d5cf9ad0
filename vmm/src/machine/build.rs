//! From plan and resources to a machine: straight-line code, one function a stage.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use egm_address::Gpa;
use egm_device::device::Function;
use egm_vfio::memory::HostMemory;
use event_manager::EventManager;
use kvm_bindings::CpuId;
use kvm_ioctls::Cap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::bus::{Bus, BusDevice, Overlap};
use super::exit::ExitLatch;
use super::platform::{Pvpanic, ResetRegister, SleepControl};
use super::poison::Poison;
use super::serial::{ConsoleInput, Line, SERIAL_PORTS, SerialPort};
use super::signals::Signals;
use super::tree::{self, Connections, TreeError};
use super::vcpu::{Shared, Vcpu};
use super::{Machine, Subscriber, Wake};
use crate::arch::x86_64::boot::{self, BootError, BootFiles, Entry};
use crate::arch::x86_64::cpuid::{Host, Topology, is_amd};
use crate::arch::x86_64::layout::KVM_TSS;
use crate::arch::x86_64::machine_check::{self, Reporter};
use crate::arch::x86_64::vcpu::{configure, is_emulated};
use crate::config::Device;
use crate::console::Console;
use crate::error::{Blame, Report};
use crate::firmware::{self, FirmwareError};
use crate::hotplug::{Controller, Event, Maker, Occupant, Running, Slot};
use crate::kvm::{Hypervisor, KvmError, SlotTable, Vm, setup_machine_checks};
use crate::memory::GuestRam;
use crate::pci::{CONFIG_PORT, CONFIG_PORTS, ConfigPorts, Ecam, PciMemory, RootComplex};
use crate::plan::{Plan, WindowKind};
use crate::resources::{OpenDevice, Resources, ThreadError};

/// Why a machine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The hypervisor refused.
    #[error("cannot build the virtual machine")]
    Kvm(#[from] KvmError),
    /// Kernel or initramfs.
    #[error("cannot boot {}", file.display())]
    Boot {
        /// That of the two which the reason is about.
        file: PathBuf,
        /// The reason.
        #[source]
        source: BootError,
    },
    /// The tables.
    #[error("cannot write the guest's firmware tables")]
    Firmware(#[from] FirmwareError),
    /// Descriptors ran out.
    #[error("cannot make an event descriptor")]
    Descriptor(#[from] io::Error),
    /// The thread that plugs functions in and out.
    #[error("cannot take care of host functions")]
    Thread(#[from] ThreadError),
    /// The PCI tree.
    #[error("cannot build the PCI tree")]
    Tree(#[from] TreeError),
    /// Two devices want one address.
    #[error("the plan contradicts itself")]
    Overlap(#[from] Overlap),
    /// The plan lacks something that every machine has.
    #[error("the plan has no {0}")]
    Missing(&'static str),
}

impl Report for BuildError {
    fn blame(&self) -> Blame {
        match self {
            Self::Kvm(error) => error.blame(),
            Self::Boot { source, .. } => source.blame(),
            Self::Firmware(error) => error.blame(),
            Self::Descriptor(_) | Self::Thread(_) | Self::Tree(TreeError::Device { .. }) => Blame::Host,
            Self::Tree(TreeError::Passed { source, .. }) => source.blame(),
            Self::Tree(_) | Self::Overlap(_) | Self::Missing(_) => Blame::Internal,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Kvm(error) => error.help(),
            Self::Firmware(error) => error.help(),
            Self::Boot { source, .. } => source.help(),
            Self::Descriptor(_) | Self::Tree(TreeError::Device { .. }) => {
                Some("raise the limit of open files: ulimit -n 65536".to_owned())
            }
            Self::Thread(_) => Some(ThreadError::HELP.to_owned()),
            Self::Tree(TreeError::Passed { source, .. }) => source.help(),
            Self::Tree(_) | Self::Overlap(_) | Self::Missing(_) => None,
        }
    }
}

/// Builds the machine of `plan`.
///
/// # Errors
/// [`BuildError`]; everything is given back.
pub fn build(plan: &Plan, resources: Resources) -> Result<Machine, BuildError> {
    let Resources { hypervisor, vm, ram, mut boot, console, devices, spaces, leases } = resources;
    let exit = ExitLatch::new()?;
    lend_memory(&vm, &ram)?;
    vm.reserve_tss(Gpa::new(KVM_TSS))?;
    vm.create_interrupt_controller()?;

    let mut subscribers: Vec<Subscriber> = Vec::new();
    let mut ports = platform_ports(plan, &exit)?;
    let serial = serial(plan, &vm, console, &mut subscribers)?;
    add_port(
        &mut ports,
        plan.port("serial").ok_or(BuildError::Missing("serial port"))?,
        SERIAL_PORTS,
        serial,
    )?;

    let slices: Vec<_> = devices.iter().filter_map(slice).collect();
    let connections = Connections::new(&vm, ram.memory.clone(), &spaces, plan);
    let tree = tree::build(plan, devices, &connections)?;
    subscribers.extend(tree.subscribers);
    let root = Arc::new(tree.root);
    let maker = connections.passer.maker(spaces.kernel());
    let hotplug = keep(&root, tree.hotplug_slots, tree.fixed, maker)?;
    add_port(&mut ports, CONFIG_PORT, CONFIG_PORTS, Arc::new(ConfigPorts::new(Arc::clone(&root))))?;
    let memory = pci_windows(plan, &root)?;

    let entry = load_guest(plan, &ram.memory, &mut boot)?;
    let host = hypervisor.supported_cpuid()?;
    let capability = machine_check::capability(hypervisor.machine_check_bits()?);
    let vcpus = make_vcpus(plan, &host, &hypervisor, &vm, &entry)?;
    for vcpu in &vcpus {
        capability.map_or(Ok(()), |capability| setup_machine_checks(&vcpu.fd, capability))?;
    }
    let reporter = capability.map(|_| Reporter { amd: is_amd(host.as_slice()) });
    let poison = Poison::new(plan, &ram, &leases, &slices, reporter)?;
    let checks = poison.checks();
    let poison = Arc::new(Mutex::new(poison));
    subscribers.push(Arc::clone(&poison) as Subscriber);
    let events = EventManager::new().map_err(io::Error::other)?;
    subscribers.push(Arc::new(Mutex::new(Wake(Arc::clone(&exit)))));
    subscribers.push(Arc::new(Mutex::new(Signals::new(Arc::clone(&exit))?))); // until here they end the process
    let shared = Arc::new(Shared { ports, memory, exit, checks });
    Ok(Machine { events, vcpus, shared, devices: tree.devices, hotplug, poison, subscribers, _vm: vm, ram })
}

/// A slice that is a device, and its function.
fn slice((device, opened): &(Device, OpenDevice)) -> Option<(String, Function)> {
    match opened {
        OpenDevice::Slice(slice) => Some((device.id.clone(), slice.function.clone())),
        _ => None,
    }
}

/// Starts the controller of functions, where there are any, or can be.
fn keep(
    root: &Arc<RootComplex>,
    slots: Vec<Slot>,
    fixed: Vec<Occupant>,
    maker: Maker,
) -> Result<Option<Running>, BuildError> {
    if slots.is_empty() && fixed.is_empty() {
        return Ok(None);
    }
    let report = Box::new(|event: &Event| eprintln!("{event}"));
    let controller = Controller::new(Arc::clone(root), slots, fixed, maker, report)?;
    Ok(Some(controller.start().map_err(ThreadError::from)?))
}

fn lend_memory(vm: &Vm, ram: &GuestRam) -> Result<(), BuildError> {
    for piece in &ram.pieces {
        vm.slots().add(piece.gpa, Arc::clone(&piece.lent) as Arc<dyn HostMemory>)?;
    }
    Ok(())
}

fn platform_ports(plan: &Plan, exit: &Arc<ExitLatch>) -> Result<Bus, BuildError> {
    let mut ports = Bus::default();
    let devices: [(&'static str, Arc<dyn BusDevice>); 3] = [
        ("sleep", Arc::new(SleepControl(Arc::clone(exit)))),
        ("reset", Arc::new(ResetRegister(Arc::clone(exit)))),
        ("pvpanic", Arc::new(Pvpanic(Arc::clone(exit)))),
    ];
    for (owner, device) in devices {
        let planned = plan.ports.iter().find(|p| p.owner == owner).ok_or(BuildError::Missing(owner))?;
        add_port(&mut ports, planned.first, planned.count, device)?;
    }
    Ok(ports)
}

fn add_port(ports: &mut Bus, first: u16, count: u16, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
    let first = u64::from(first);
    ports.add(first..first.saturating_add(u64::from(count)), device)
}

fn serial(
    plan: &Plan,
    vm: &Vm,
    console: Console,
    subscribers: &mut Vec<Subscriber>,
) -> Result<Arc<SerialPort>, BuildError> {
    let line = EventFd::new(EFD_NONBLOCK)?;
    vm.connect_line(plan.line("serial").ok_or(BuildError::Missing("serial interrupt"))?, &line)?;
    let console = Arc::new(Mutex::new(console));
    let port = SerialPort::new(Line(line), Arc::clone(&console))?;
    subscribers.push(Arc::new(Mutex::new(ConsoleInput::new(Arc::clone(&port), console))));
    Ok(port)
}

fn pci_windows(plan: &Plan, root: &Arc<RootComplex>) -> Result<Bus, BuildError> {
    let mut bus = Bus::default();
    for window in &plan.windows {
        let range = window.span.start().get()..window.span.end().get();
        match window.kind {
            WindowKind::Ecam => bus.add(range, Arc::new(Ecam(Arc::clone(root))))?,
            WindowKind::PciMemory32 | WindowKind::PciMemory64 => {
                bus.add(range, Arc::new(PciMemory::new(Arc::clone(root), window.span)))?;
            }
            WindowKind::Firmware
            | WindowKind::OptionRoms
            | WindowKind::Interrupts
            | WindowKind::Device
            | WindowKind::Reserved => {}
        }
    }
    Ok(bus)
}

fn load_guest(plan: &Plan, memory: &GuestMemoryMmap, files: &mut BootFiles) -> Result<Entry, BuildError> {
    let image = firmware::build(plan)?;
    let error = |source: BootError| {
        let initramfs = plan.boot.initramfs.as_ref().filter(|_| source.is_about_initramfs());
        BuildError::Boot { file: initramfs.unwrap_or(&plan.boot.kernel).clone(), source }
    };
    let at = |gpa: Gpa| GuestAddress(gpa.get());
    memory
        .write_slice(&image.bytes, at(image.base))
        .map_err(|_| error(BootError::Memory { at: image.base.get() }))?;
    boot::load(plan, memory, files, image.rsdp).map_err(error)
}

fn make_vcpus(
    plan: &Plan,
    host: &CpuId,
    hypervisor: &Hypervisor,
    vm: &Vm,
    entry: &Entry,
) -> Result<Vec<Vcpu>, BuildError> {
    let machine = Host { tsc_deadline: hypervisor.has(Cap::TscDeadlineTimer), emulated: is_emulated() };
    let topology = Topology::new(&plan.vcpus, plan.address_bits, machine);
    plan.vcpus
        .iter()
        .map(|vcpu| {
            let fd = vm.create_vcpu(vcpu.hardware_id)?;
            configure(&fd, host, topology, vcpu, entry)?;
            Ok(Vcpu { index: vcpu.index, fd, host_cpus: vcpu.host_cpus.clone() })
        })
        .collect()
}
