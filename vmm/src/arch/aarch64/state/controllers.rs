//! State of a GICv3 and its ITS (KVM devices/arm-vgic-v3.rst and arm-vgic-its.rst).
//!
//! Tables of message interrupts lie in guest memory. KVM keeps what it needs of them and writes it there at a save, so the save
//! comes before the copy of memory; a restore reads it, and comes after memory is there and vCPUs are made. `KVM_IRQFD` of
//! messages comes after a restore.

use kvm_bindings::{
    KVM_DEV_ARM_ITS_RESTORE_TABLES, KVM_DEV_ARM_ITS_SAVE_TABLES, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_ITS_REGS, KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO, KVM_DEV_ARM_VGIC_LINE_LEVEL_INFO_SHIFT,
    KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES, VGIC_LEVEL_INFO_LINE_LEVEL,
};
use kvm_ioctls::DeviceFd;
use serde::{Deserialize, Serialize};

use crate::arch::aarch64::gic::read::read;
use crate::arch::aarch64::gic::registers::{
    DISTRIBUTOR, IMPLEMENTATION, ITS, ITS_CONTROL, Part, REDISTRIBUTOR, low, malformed,
};
use crate::arch::aarch64::gic::{Controllers, attribute};
use crate::arch::aarch64::interrupts::LINES;
use crate::kvm::{KvmError, Vm};

/// Levels of 32 interrupt lines from `first` on, as an attribute.
const fn levels(first: u32) -> u64 {
    ((VGIC_LEVEL_INFO_LINE_LEVEL << KVM_DEV_ARM_VGIC_LINE_LEVEL_INFO_SHIFT) | first) as u64
}

/// State of a VM's interrupt controllers. Lists of registers have the order of `gic::registers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControllersState {
    /// The distributor's implementation, with the revision of KVM's interface.
    implementation: u32,
    distributor: Vec<u32>,
    /// Levels of the lines of shared interrupts, 32 in each number.
    lines: Vec<u32>,
    /// In the order of the vCPUs.
    vcpus: Vec<VcpuInterrupts>,
    its: Vec<u64>,
    its_control: u64,
}

/// The part of the GIC that a vCPU has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VcpuInterrupts {
    redistributor: Vec<u32>,
    /// Levels of the lines of private interrupts.
    lines: u32,
    cpu_interface: Vec<u64>,
}

impl ControllersState {
    /// The present state of `controllers`, while no vCPU is in the guest; writes their tables to guest memory.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn save(_: &Vm, controllers: &Controllers) -> Result<Self, KvmError> {
        let Controllers { gic, its, hardware_ids } = controllers;
        request(gic, KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES, "KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES")?;
        request(its, KVM_DEV_ARM_ITS_SAVE_TABLES, "KVM_DEV_ARM_ITS_SAVE_TABLES")?;
        let distributor = Part::distributor(gic);
        let shared = distributor.with_group(KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO);
        let lines = LINES.step_by(32).map(|first| shared.get(levels(first)).map(low));
        let of_its = |register| read(its, KVM_DEV_ARM_VGIC_GRP_ITS_REGS, register);
        Ok(Self {
            implementation: low(distributor.get(IMPLEMENTATION)?),
            distributor: distributor.save(&DISTRIBUTOR)?,
            lines: lines.collect::<Result<_, _>>()?,
            vcpus: hardware_ids.iter().map(|id| VcpuInterrupts::save(gic, *id)).collect::<Result<_, _>>()?,
            its: ITS.into_iter().map(of_its).collect::<Result<_, _>>()?,
            its_control: of_its(ITS_CONTROL)?,
        })
    }

    /// Returns new `controllers` to it, while no vCPU is in the guest: redistributors, distributor, CPU interfaces, then the ITS
    /// (arm-vgic-its.rst, "ITS Restore Sequence").
    ///
    /// # Errors
    /// When the kernel refuses a value, or the machine has another number of vCPUs.
    pub fn restore(&self, _: &Vm, controllers: &Controllers) -> Result<(), KvmError> {
        let Controllers { gic, its, hardware_ids } = controllers;
        if self.vcpus.len() != hardware_ids.len() || self.lines.len() != LINES.step_by(32).len() {
            return Err(malformed());
        }
        let distributor = Part::distributor(gic);
        distributor.set(IMPLEMENTATION, self.implementation.into())?;
        let vcpus = || self.vcpus.iter().zip(hardware_ids);
        vcpus().try_for_each(|(vcpu, id)| vcpu.restore_redistributor(gic, *id))?;
        let shared = distributor.with_group(KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO);
        let mut lines = LINES.step_by(32).zip(&self.lines);
        lines.try_for_each(|(first, level)| shared.set(levels(first), (*level).into()))?;
        distributor.restore(&DISTRIBUTOR, &self.distributor)?;
        vcpus().try_for_each(|(vcpu, id)| vcpu.restore_cpu_interface(gic, *id))?;
        self.restore_its(its)
    }

    fn restore_its(&self, its: &DeviceFd) -> Result<(), KvmError> {
        if self.its.len() != ITS.len() {
            return Err(malformed());
        }
        let set = |register: u64, value: &u64| {
            let attribute = attribute(KVM_DEV_ARM_VGIC_GRP_ITS_REGS, register, value);
            its.set_device_attr(&attribute).map_err(|e| KvmError::call("KVM_SET_DEVICE_ATTR of the ITS", e))
        };
        ITS.into_iter().zip(&self.its).try_for_each(|(register, value)| set(register, value))?;
        request(its, KVM_DEV_ARM_ITS_RESTORE_TABLES, "KVM_DEV_ARM_ITS_RESTORE_TABLES")?;
        set(ITS_CONTROL, &self.its_control)
    }
}

impl VcpuInterrupts {
    fn save(gic: &DeviceFd, id: u32) -> Result<Self, KvmError> {
        let redistributor = Part::redistributor(gic, id);
        let private = redistributor.with_group(KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO);
        let interface = Part::cpu_interface(gic, id);
        let registers = interface.registers()?.into_iter().map(|register| interface.get(register));
        Ok(Self {
            redistributor: redistributor.save(&REDISTRIBUTOR)?,
            lines: low(private.get(levels(0))?),
            cpu_interface: registers.collect::<Result<_, _>>()?,
        })
    }

    fn restore_redistributor(&self, gic: &DeviceFd, id: u32) -> Result<(), KvmError> {
        let redistributor = Part::redistributor(gic, id);
        let private = redistributor.with_group(KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO);
        private.set(levels(0), self.lines.into())?;
        redistributor.restore(&REDISTRIBUTOR, &self.redistributor)
    }

    /// The host's CPU interface has as many bits of priority as the one that was saved, or the lists differ in length.
    fn restore_cpu_interface(&self, gic: &DeviceFd, id: u32) -> Result<(), KvmError> {
        let interface = Part::cpu_interface(gic, id);
        let registers = interface.registers()?;
        if registers.len() != self.cpu_interface.len() {
            return Err(malformed());
        }
        let mut registers = registers.into_iter().zip(&self.cpu_interface);
        registers.try_for_each(|(register, value)| interface.set(register, *value))
    }
}

/// Has `device` read or write its tables in guest memory.
fn request(device: &DeviceFd, what: u32, call: &'static str) -> Result<(), KvmError> {
    let attribute = attribute(KVM_DEV_ARM_VGIC_GRP_CTRL, what, &());
    device.set_device_attr(&attribute).map_err(|error| KvmError::call(call, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_lines_are_read_by_32_from_the_first_shared_interrupt_on() {
        let attributes: Vec<_> = LINES.step_by(32).map(levels).collect();
        assert_eq!(attributes, [32]);
        assert_eq!(levels(0), 0);
    }

    #[test]
    fn a_file_has_every_field_and_no_other() {
        let vcpus = vec![VcpuInterrupts { redistributor: vec![1], lines: 2, cpu_interface: vec![u64::MAX] }];
        let its = vec![0x8000_0000_1234_0000; ITS.len()];
        let (distributor, lines) = (vec![3, 4], vec![5]);
        let state =
            ControllersState { implementation: 0x43b, distributor, lines, vcpus, its, its_control: 1 };
        let mut file = serde_json::to_value(&state).unwrap();
        assert_eq!(serde_json::from_value::<ControllersState>(file.clone()).unwrap(), state);
        file["lpis"] = 7.into();
        assert!(serde_json::from_value::<ControllersState>(file).is_err());
    }
}
