//! A virtio function in the slot of a hot-plug port.

use std::io;

use super::{Registers, VirtioPci, identity};
use crate::lock::lock;
use crate::pci::Plugged;

impl VirtioPci {
    /// Whether the last reset is over: the device touches no guest memory until it is activated again.
    pub(crate) fn is_quiescent(&self) -> bool {
        lock(&self.device).is_quiescent()
    }

    /// Takes the error of making the guest's writes durable, if the guest has not received it.
    pub(crate) fn take_loss(&self) -> Option<io::Error> {
        lock(&self.device).take_loss()
    }

    fn power_on(&self, registers: &mut Registers) {
        registers.core.reset();
        lock(&self.device).reset();
        self.interrupt.reset();
        self.interrupt.msix().reset();
        registers.msix_control = (false, false);
        if let Some((config, _)) = identity::config_space(&self.profile()) {
            registers.config = config;
        }
    }
}

impl Plugged for VirtioPci {
    fn reset(&self, _together: &[&str]) {
        self.power_on(&mut self.registers());
    }

    fn end(&self) {
        let mut registers = self.registers();
        self.power_on(&mut registers);
        // A write of another vCPU can be on its way still.
        registers.is_removed = true;
        drop(registers);
        // As can its update of what decodes where.
        for (gpa, kick) in lock(&self.ioeventfds).take().into_iter().flatten() {
            let _ = self.doorbell.detach(gpa, &kick);
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Self::counters(self)
    }
}
