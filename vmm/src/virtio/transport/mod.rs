//! virtio over PCI (virtio 1.3 §4.1), modern only: the registers, and the ioeventfds by which a driver kicks a queue
//! without an exit to this process.
//!
//! [`registers`] defines the layout, [`core`] is the state machine, [`identity`] the configuration space,
//! [`interrupt`] the interrupts. The locks are here. Lock order: registers, then device; ioeventfds alone. A
//! notification and an MSI-X access take none of them.
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod core;
mod identity;
mod interrupt;
mod plugged;
mod registers;
mod saved;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use egm_address::PciAddress;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use self::core::{Core, Effect, QueueState};
use self::identity::{Layout, Profile, WindowAccess};
use self::interrupt::PciInterrupt;
pub use self::registers::BAR_SIZE;
use self::registers::{Area, Common, MAX_QUEUES, MAX_VECTORS, NOTIFY, NOTIFY_STRIDE};
use super::{Activation, Counter, Interrupt, VirtioDevice};
use crate::config::DeviceKind;
use crate::lock::lock;
use crate::pci::msix::Msix;
use crate::pci::{ConfigSpace, DecodedBar, PciFunction};
use crate::plan::{BarPlan, FunctionPlan, FunctionRole};

/// ioeventfds: the kernel turns a guest write to an address into a write to an eventfd, without an exit to user space.
pub trait Doorbell: Send + Sync {
    /// From now on every write that starts at guest physical address `gpa`, of any width and value, signals `fd`.
    ///
    /// # Errors
    /// The kernel's, for instance when another ioeventfd has this address.
    fn attach(&self, gpa: u64, fd: &EventFd) -> io::Result<()>;

    /// Removes the ioeventfd, with the same arguments.
    ///
    /// # Errors
    /// The kernel's, when there is no such ioeventfd.
    fn detach(&self, gpa: u64, fd: &EventFd) -> io::Result<()>;
}

/// The plan and the device do not fit each other: our own bug.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum TransportError {
    /// BAR 0 is missing or of the wrong size.
    #[error("virtio function {address}: the plan must give it BAR 0 of {BAR_SIZE:#x} bytes")]
    Bar { address: PciAddress },
    /// Too few or too many vectors.
    #[error("virtio function {address}: {vectors} MSI-X vectors, between 1 and {MAX_VECTORS} are possible")]
    Vectors { address: PciAddress, vectors: usize },
    /// Number or sizes of queues.
    #[error(
        "virtio function {address}: a device has at most {MAX_QUEUES} queues, one kick descriptor each, with sizes that are powers of two up to 32768"
    )]
    Queues { address: PciAddress },
    /// Capabilities outgrew the 192 bytes that there are for them.
    #[error("virtio function {address}: the capabilities do not fit into configuration space")]
    Capabilities { address: PciAddress },
}

/// Notification address and kick descriptor of an ioeventfd.
type Attached = (u64, Arc<EventFd>);

struct Registers {
    config: ConfigSpace,
    core: Core,
    msix_control: (bool, bool),
    /// Whether it left the guest for good: nothing activates the device any more.
    is_removed: bool,
}

/// A virtio device as a PCI function.
pub struct VirtioPci {
    /// What the device has of the host, for the operator.
    name: String,
    /// The planned BAR 0.
    bar: BarPlan,
    below_port: bool,
    device: Arc<Mutex<dyn VirtioDevice>>,
    memory: GuestMemoryMmap,
    doorbell: Arc<dyn Doorbell>,
    interrupt: Arc<PciInterrupt>,
    kicks: Box<[Arc<EventFd>]>,
    layout: Layout,
    registers: Mutex<Registers>,
    /// Attached ioeventfds. `None` once it left the guest for good: none is attached any more.
    ioeventfds: Mutex<Option<Vec<Attached>>>,
}

impl VirtioPci {
    /// The function that `plan` describes, in front of `device`.
    ///
    /// # Errors
    /// [`TransportError`] when the plan does not fit the device.
    pub fn new(
        device: Arc<Mutex<dyn VirtioDevice>>,
        plan: &FunctionPlan,
        msix: Arc<Msix>,
        memory: GuestMemoryMmap,
        doorbell: Arc<dyn Doorbell>,
    ) -> Result<Self, TransportError> {
        let address = plan.address;
        let bar = plan.bars.iter().find(|bar| bar.index == 0 && bar.span.size() == BAR_SIZE);
        let bar = bar.ok_or(TransportError::Bar { address })?;
        let vectors = msix.len();
        if !(1..=MAX_VECTORS).contains(&vectors) {
            return Err(TransportError::Vectors { address, vectors });
        }
        let (core, kicks, device_type) = {
            let device = lock(&device);
            let sizes = device.queue_sizes();
            let valid = sizes.len() <= MAX_QUEUES
                && sizes.len() == device.kicks().len()
                && sizes.iter().all(|size| Queue::new(*size).is_ok());
            if !valid {
                return Err(TransportError::Queues { address });
            }
            let core = Core::new(device.features(), sizes, u16::try_from(vectors).unwrap_or(0));
            (core, device.kicks().iter().cloned().collect::<Box<[_]>>(), device.device_type())
        };
        let below_port = address.bus() != 0;
        let profile = Profile { device_type, bar, vectors, below_port };
        let (config, layout) =
            identity::config_space(&profile).ok_or(TransportError::Capabilities { address })?;
        Ok(Self {
            name: name(&plan.role),
            bar: bar.clone(),
            below_port,
            interrupt: Arc::new(PciInterrupt::new(msix, kicks.len())),
            device,
            memory,
            doorbell,
            kicks,
            layout,
            registers: Mutex::new(Registers {
                config,
                core,
                msix_control: (false, false),
                is_removed: false,
            }),
            ioeventfds: Mutex::new(Some(Vec::new())),
        })
    }

    /// Things that the driver did against the specification, since the start.
    pub fn mistakes(&self) -> u64 {
        self.registers().core.mistakes()
    }

    /// Counts of transport and device since the start.
    pub fn counters(&self) -> Vec<Counter> {
        let of_device = lock(&self.device).counters();
        let own = [
            ("wrong register accesses", self.mistakes()),
            ("refused interrupts", self.interrupt.msix().refused()),
        ];
        own.into_iter().chain(of_device).collect()
    }

    /// Identity of the function, of which its configuration space is made.
    fn profile(&self) -> Profile<'_> {
        Profile {
            device_type: lock(&self.device).device_type(),
            bar: &self.bar,
            vectors: self.interrupt.msix().len(),
            below_port: self.below_port,
        }
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        lock(&self.registers)
    }

    fn common_read(&self, register: Option<Common>, data: &mut [u8]) {
        let value = match register {
            Some(Common::ConfigGeneration) => self.interrupt.generation().into(),
            Some(register) => {
                let mut registers = self.registers();
                self.settle(&mut registers.core);
                registers.core.read(register)
            }
            None => return self.registers().core.mistake(),
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// Ends a reset that the device has come to the end of.
    fn settle(&self, core: &mut Core) {
        if core.is_resetting() && lock(&self.device).is_quiescent() {
            core.rested();
        }
    }

    /// The register lock is held until the effect is done, which never waits for the outside world.
    fn common_write(&self, register: Option<Common>, data: &[u8]) {
        let mut registers = self.registers();
        let Some(register) = register else { return registers.core.mistake() };
        if registers.is_removed {
            return;
        }
        self.settle(&mut registers.core);
        let mut value = [0; 4];
        for (to, from) in value.iter_mut().zip(data) {
            *to = *from;
        }
        let effect = registers.core.write(register, u32::from_le_bytes(value));
        if !self.carry_out(effect, &registers.core) {
            registers.core.needs_reset();
            drop(registers);
            self.interrupt.config(); // §2.1.2: a driver learns of it by a configuration change
        }
    }

    /// False when the device cannot do its part and needs a reset.
    fn carry_out(&self, effect: Effect, core: &Core) -> bool {
        match effect {
            Effect::None => {}
            Effect::ConfigVector(vector) => self.interrupt.set_config(vector),
            Effect::QueueVector(queue, vector) => {
                self.interrupt.set_queue(queue, vector);
                return lock(&self.device).vector_changed(queue).is_ok();
            }
            Effect::Reset => {
                lock(&self.device).reset();
                self.interrupt.reset();
            }
            Effect::Activate => return self.activate(core),
        }
        true
    }

    fn activate(&self, core: &Core) -> bool {
        let features = core.features();
        let queues =
            core.queues().iter().map(|state| self.queue(state, features)).collect::<Option<Vec<_>>>();
        let Some(queues) = queues else { return false };
        let interrupt = Arc::clone(&self.interrupt) as Arc<dyn Interrupt>;
        let activation = Activation { memory: self.memory.clone(), queues, features, interrupt };
        lock(&self.device).activate(activation).is_ok()
    }

    /// `Some(None)` for a queue that is not enabled, `None` for one with invalid addresses.
    fn queue(&self, state: &QueueState, features: u64) -> Option<Option<Queue>> {
        if !state.enabled {
            return Some(None);
        }
        let mut queue = Queue::new(state.max_size).ok()?;
        queue.try_set_size(state.size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(state.descriptor)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(state.driver)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(state.device)).ok()?;
        queue.set_event_idx(features & super::RING_EVENT_IDX != 0);
        queue.set_ready(true);
        queue.is_valid(&self.memory).then_some(Some(queue))
    }

    fn notify(&self, queue: u16) {
        match self.kicks.get(usize::from(queue)) {
            // A full counter is a kick that still waits to be seen.
            Some(kick) => drop(kick.write(1)),
            None => self.registers().core.mistake(),
        }
    }

    /// The window's access, or a counted mistake.
    fn window(&self, registers: &mut Registers) -> Option<WindowAccess> {
        let access = self.layout.window(&registers.config);
        if access.is_none() {
            registers.core.mistake();
        }
        access
    }
}

/// What a device has of the host, for messages that name its id, too.
fn name(role: &FunctionRole) -> String {
    let FunctionRole::Endpoint { device, .. } = role else { return String::new() };
    match &device.kind {
        DeviceKind::VirtioBlk { path, .. } => format!("disk {}", path.display()),
        DeviceKind::VirtioNet { tap, .. } => format!("tap {tap}"),
        DeviceKind::VirtioVsock { cid, .. } => format!("the vsock device with context id {cid}"),
        _ => "the entropy device".to_owned(),
    }
}

impl PciFunction for VirtioPci {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let mut registers = self.registers();
        // A driver that dumps all registers reads the window's data too: no mistake where no window was set up.
        if self.layout.is_window(offset, data.len())
            && !self.layout.is_idle(&registers.config)
            && let Some(access) = self.window(&mut registers)
        {
            drop(registers); // the access may need it
            let mut value = [0; 4];
            if let Some(value) = value.get_mut(..access.length) {
                self.bar_read(0, access.offset.into(), value);
            }
            registers = self.registers();
            registers.config.put(self.layout.window_data(), &value);
        }
        registers.config.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> bool {
        let mut registers = self.registers();
        if registers.is_removed {
            return false;
        }
        let moved = registers.config.write(offset, data);
        let control = self.layout.msix_control(&registers.config);
        if control != registers.msix_control {
            registers.msix_control = control;
            self.interrupt.msix().set_control(control.0, control.1);
        }
        if self.layout.is_window(offset, data.len())
            && let Some(access) = self.window(&mut registers)
        {
            let value = registers.config.u32(self.layout.window_data()).to_le_bytes();
            drop(registers); // the access may need it
            self.bar_write(0, access.offset.into(), value.get(..access.length).unwrap_or_default());
        }
        moved
    }

    fn decoded(&self) -> Vec<DecodedBar> {
        self.registers().config.decoded()
    }

    /// An ioeventfd that cannot be attached costs an exit to this process for each kick, nothing else.
    fn place(&self, bars: &[DecodedBar]) {
        let mut ioeventfds = lock(&self.ioeventfds);
        let Some(ioeventfds) = ioeventfds.as_mut() else { return };
        let start = bars.iter().find(|bar| bar.index == 0).map(|bar| bar.span.start().get());
        let first = start.and_then(|start| start.checked_add(NOTIFY.into()));
        if ioeventfds.first().map(|(gpa, _)| *gpa) == first {
            return;
        }
        for (gpa, kick) in ioeventfds.drain(..) {
            let _ = self.doorbell.detach(gpa, &kick);
        }
        let Some(first) = first else { return };
        for (gpa, kick) in (first..=u64::MAX).step_by(NOTIFY_STRIDE as usize).zip(&self.kicks) {
            if self.doorbell.attach(gpa, kick).is_ok() {
                ioeventfds.push((gpa, Arc::clone(kick)));
            }
        }
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if bar != 0 {
            return;
        }
        match Area::decode(offset, data.len()) {
            Area::Common(register) => self.common_read(register, data),
            Area::Isr => {
                if let Some(first) = data.first_mut() {
                    *first = self.interrupt.take_isr();
                }
            }
            Area::Device(at) => lock(&self.device).config_read(at, data),
            Area::Table(at) => self.interrupt.msix().table_read(at, data),
            Area::Pending(at) => self.interrupt.msix().pending_read(at, data),
            Area::Notify(_) | Area::Hole => {}
        }
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        if bar != 0 {
            return;
        }
        match Area::decode(offset, data.len()) {
            Area::Common(register) => self.common_write(register, data),
            Area::Device(at) => lock(&self.device).config_write(at, data),
            Area::Notify(queue) => self.notify(queue),
            Area::Table(at) => self.interrupt.msix().table_write(at, data),
            Area::Isr | Area::Pending(_) | Area::Hole => {}
        }
    }
}

#[cfg(test)]
mod tests;
