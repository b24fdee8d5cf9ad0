//! The board: the plan's platform devices and windows, each with the device that answers there. A plan for x86 has
//! platform devices at I/O ports, one for Arm in windows.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::Subscriber;
use super::bus::{Bus, BusDevice, Overlap};
use super::error::BuildError;
use super::exit::ExitLatch;
use super::platform::{Clock, Pvpanic, ResetRegister, SleepControl};
use super::reset::ResetLine;
use super::serial::{ArmSerialPort, ConsoleInput, Port, SerialLine, SerialPort};
use crate::console::Console;
use crate::eventfd;
use crate::kvm::Vm;
use crate::pci::{CONFIG_PORT, CONFIG_PORTS, ConfigPorts, Ecam, PciMemory, RootComplex};
use crate::plan::{Plan, WindowKind};

const SERIAL: &str = "serial";

pub(super) struct Board<'a> {
    plan: &'a Plan,
    vm: &'a Vm,
    pub(super) ports: Bus,
    /// Memory that is not RAM.
    pub(super) memory: Bus,
}

/// The addresses of `count` I/O ports from `first`.
fn range(first: u16, count: u16) -> Range<u64> {
    let first = u64::from(first);
    first..first.saturating_add(count.into())
}

impl<'a> Board<'a> {
    /// A board with the devices that need nothing but `exit` and `reset`.
    pub(super) fn new(
        plan: &'a Plan,
        vm: &'a Vm,
        exit: &Arc<ExitLatch>,
        reset: &ResetLine,
    ) -> Result<Self, BuildError> {
        let mut board = Self { plan, vm, ports: Bus::default(), memory: Bus::default() };
        let device = |name: &str| -> Option<Arc<dyn BusDevice>> {
            Some(match name {
                "sleep" => Arc::new(SleepControl(Arc::clone(exit))),
                "reset" => Arc::new(ResetRegister(reset.clone())),
                "pvpanic" => Arc::new(Pvpanic(Arc::clone(exit))),
                "clock" => Arc::new(Clock::default()),
                _ => return None,
            })
        };
        for planned in &plan.ports {
            if let Some(device) = device(&planned.owner) {
                board.ports.add(range(planned.first, planned.count), device)?;
            }
        }
        for window in plan.windows.iter().filter(|window| window.kind == WindowKind::Device) {
            if let Some(device) = device(&window.label) {
                board.memory.add(window.span.start().get()..window.span.end().get(), device)?;
            }
        }
        Ok(board)
    }

    /// Adds the serial port. Returns the part of the event loop that carries typed bytes to it.
    pub(super) fn serial(&mut self, console: Arc<Mutex<Console>>) -> Result<Subscriber, BuildError> {
        let gsi = self.plan.line(SERIAL).ok_or(BuildError::Missing("serial interrupt"))?;
        let port: Arc<dyn Port> = if let Some(span) = self.plan.device(SERIAL) {
            let port = ArmSerialPort::new(self.vm.line(gsi), Arc::clone(&console))?;
            self.memory.add(span.start().get()..span.end().get(), Arc::clone(&port) as Arc<dyn BusDevice>)?;
            port
        } else {
            let planned = self.plan.ports.iter().find(|port| port.owner == SERIAL);
            let planned = planned.ok_or(BuildError::Missing("serial port"))?;
            let line = Arc::new(eventfd::new()?);
            self.vm.connect_line(gsi, &line)?;
            let port = SerialPort::new(SerialLine(line), Arc::clone(&console))?;
            let device = Arc::clone(&port) as Arc<dyn BusDevice>;
            self.ports.add(range(planned.first, planned.count), device)?;
            port
        };
        Ok(Arc::new(Mutex::new(ConsoleInput::new(port, console))))
    }

    /// The windows of PCI, and where there are I/O ports those of its configuration space.
    pub(super) fn pci(&mut self, root: &Arc<RootComplex>) -> Result<(), Overlap> {
        if !self.plan.ports.is_empty() {
            let ports = Arc::new(ConfigPorts::new(Arc::clone(root)));
            self.ports.add(range(CONFIG_PORT, CONFIG_PORTS), ports)?;
        }
        for window in &self.plan.windows {
            let device: Arc<dyn BusDevice> = match window.kind {
                WindowKind::Ecam => Arc::new(Ecam(Arc::clone(root))),
                WindowKind::PciMemory32 | WindowKind::PciMemory64 => {
                    Arc::new(PciMemory::new(Arc::clone(root), window.span))
                }
                WindowKind::Firmware
                | WindowKind::OptionRoms
                | WindowKind::Interrupts
                | WindowKind::Device
                | WindowKind::Reserved => continue,
            };
            self.memory.add(window.span.start().get()..window.span.end().get(), device)?;
        }
        Ok(())
    }
}
