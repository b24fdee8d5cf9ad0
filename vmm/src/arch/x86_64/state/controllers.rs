//! State of the interrupt controllers and of the clock that KVM has for its guests. There is no interval timer.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use serde::{Deserialize, Serialize};

use super::{failed, malformed, record};
use crate::arch::x86_64::vcpu::Controllers;
use crate::kvm::{KvmError, Vm};

/// State of a VM's interrupt controllers and clock.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControllersState {
    chips: Chips,
    /// Time of the guest's clock, in ns. It stands still while the state is in a file, as the vCPUs' counters do.
    clock_ns: u64,
}

/// State of the interrupt controllers of a board.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::arch::x86_64) struct Chips {
    #[serde(deserialize_with = "record::exact")]
    pic_master: kvm_irqchip,
    #[serde(deserialize_with = "record::exact")]
    pic_slave: kvm_irqchip,
    #[serde(deserialize_with = "record::exact")]
    ioapic: kvm_irqchip,
}

impl Chips {
    /// The present state of those of `vm`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(in crate::arch::x86_64) fn save(vm: &Vm) -> Result<Self, KvmError> {
        let chip = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            let read = vm.fd().get_irqchip(&mut chip);
            read.map(|()| chip).map_err(failed("KVM_GET_IRQCHIP"))
        };
        Ok(Self {
            pic_master: chip(KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: chip(KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: chip(KVM_IRQCHIP_IOAPIC)?,
        })
    }

    /// Returns those of `vm` to it, while no vCPU is in the guest.
    ///
    /// # Errors
    /// When the kernel refuses a value.
    pub(in crate::arch::x86_64) fn restore(&self, vm: &Vm) -> Result<(), KvmError> {
        let chips = [
            (KVM_IRQCHIP_PIC_MASTER, &self.pic_master),
            (KVM_IRQCHIP_PIC_SLAVE, &self.pic_slave),
            (KVM_IRQCHIP_IOAPIC, &self.ioapic),
        ];
        chips.into_iter().try_for_each(|(id, chip)| {
            if chip.chip_id != id {
                return Err(malformed("KVM_SET_IRQCHIP"));
            }
            vm.fd().set_irqchip(chip).map_err(failed("KVM_SET_IRQCHIP"))
        })
    }
}

impl ControllersState {
    /// The present state of those of `vm`, while no vCPU is in the guest.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn save(vm: &Vm, _: &Controllers) -> Result<Self, KvmError> {
        let clock = vm.fd().get_clock().map_err(failed("KVM_GET_CLOCK"))?;
        Ok(Self { chips: Chips::save(vm)?, clock_ns: clock.clock })
    }

    /// Returns those of `vm` to it, before its vCPUs: a register of theirs has KVM write the time to guest memory.
    ///
    /// # Errors
    /// When the kernel refuses a value.
    pub fn restore(&self, vm: &Vm, _: &Controllers) -> Result<(), KvmError> {
        self.chips.restore(vm)?;
        let clock = kvm_clock_data { clock: self.clock_ns, ..Default::default() };
        vm.fd().set_clock(&clock).map_err(failed("KVM_SET_CLOCK"))
    }
}
