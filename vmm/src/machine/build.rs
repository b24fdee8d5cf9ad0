//! From plan and resources to a machine: straight-line code, one function a stage.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use egm_address::Gpa;
use egm_device::device::Function;
use egm_vfio::memory::HostMemory;
use event_manager::EventManager;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::board::Board;
use super::bus::Overlap;
use super::exit::ExitLatch;
use super::poison::Poison;
use super::signals::Signals;
use super::tree::{self, Connections, TreeError};
use super::vcpu::{Shared, Vcpu};
use super::{Machine, Subscriber, Wake};
use crate::arch::boot::{BootError, BootFiles};
use crate::arch::native::boot::{self, Entry};
use crate::arch::native::vcpu::{configure, create};
use crate::config::Device;
use crate::error::{Blame, Report};
use crate::firmware::{self, FirmwareError};
use crate::hotplug::{Controller, Event, Maker, Occupant, Running, Slot};
use crate::kvm::{KvmError, SlotTable, Vm};
use crate::memory::GuestRam;
use crate::pci::RootComplex;
use crate::plan::Plan;
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
    let vcpus = create(&hypervisor, &vm, plan)?;

    let mut board = Board::new(plan, &vm, &exit)?;
    let mut subscribers: Vec<Subscriber> = vec![board.serial(console)?];

    let slices: Vec<_> = devices.iter().filter_map(slice).collect();
    let connections = Connections::new(&vm, ram.memory.clone(), &spaces, plan)?;
    let tree = tree::build(plan, devices, &connections)?;
    subscribers.extend(tree.subscribers);
    let root = Arc::new(tree.root);
    let maker = connections.passer.maker(spaces.kernel());
    let hotplug = keep(&root, tree.hotplug_slots, tree.fixed, maker)?;
    board.pci(&root)?;

    let entry = load_guest(plan, &ram.memory, &mut boot)?;
    let reporter = configure(&hypervisor, plan, &vcpus, &entry)?;
    let planned = vcpus.into_iter().zip(&plan.vcpus);
    let vcpus =
        planned.map(|(fd, vcpu)| Vcpu { index: vcpu.index, fd, host_cpus: vcpu.host_cpus.clone() }).collect();
    let poison = Poison::new(plan, &ram, &leases, &slices, reporter)?;
    let checks = poison.checks();
    let poison = Arc::new(Mutex::new(poison));
    subscribers.push(Arc::clone(&poison) as Subscriber);
    let events = EventManager::new().map_err(io::Error::other)?;
    subscribers.push(Arc::new(Mutex::new(Wake(Arc::clone(&exit)))));
    subscribers.push(Arc::new(Mutex::new(Signals::new(Arc::clone(&exit))?))); // until here they end the process
    let Board { ports, memory, .. } = board;
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
    boot::load(plan, memory, files, &image).map_err(error)
}
