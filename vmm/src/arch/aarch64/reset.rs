//! State of vCPUs and interrupt controllers before the guest's first instruction, to which a reset returns them.
//!
//! KVM resets a vCPU and an ITS by a request. It has none for a GICv3: its registers are written (Arm IHI 0069, 12.9).
//! The control register of the CPU interface stays: kernels write it before they enable interrupts.

use std::ops::Range;

use kvm_bindings::{
    KVM_DEV_ARM_ITS_CTRL_RESET, KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_DIST_REGS, KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, kvm_vcpu_init,
};
use kvm_ioctls::{DeviceFd, VcpuFd};

use super::boot::Entry;
use super::gic::{Controllers, attribute};
use super::interrupts::LINES;
use super::vcpu::{begin, initialize, model};
use crate::kvm::{Hypervisor, KvmError, Vm};

/// State of a VM's vCPUs and interrupt controllers.
pub struct InitialState {
    controllers: Controllers,
    model: kvm_vcpu_init,
}

/// Registers with one value each.
struct Registers {
    /// Offset of the first.
    first: u32,
    count: u32,
    value: u32,
}

const fn registers(first: u32, count: u32, value: u32) -> Registers {
    Registers { first, count, value }
}

const ALL: u32 = u32::MAX;
/// Shared interrupts: a register has 32, 16, 4 or, in two words, one of them.
const SHARED: Range<u32> = LINES;

/// Registers of the distributor: control, then group, enable, pending, active, priority, configuration, target of shared
/// interrupts. A write of a pending register from user space replaces all its bits.
const DISTRIBUTOR: [Registers; 8] = [
    registers(0x0000, 1, 0),
    registers(0x0080 + SHARED.start / 8, SHARED.end.div_ceil(32) - SHARED.start / 32, ALL),
    registers(0x0180 + SHARED.start / 8, SHARED.end.div_ceil(32) - SHARED.start / 32, ALL),
    registers(0x0200 + SHARED.start / 8, SHARED.end.div_ceil(32) - SHARED.start / 32, 0),
    registers(0x0380 + SHARED.start / 8, SHARED.end.div_ceil(32) - SHARED.start / 32, ALL),
    registers(0x0400 + SHARED.start, (SHARED.end - SHARED.start) / 4, 0),
    registers(0x0c00 + SHARED.start / 4, (SHARED.end - SHARED.start) / 16, 0),
    registers(0x6000 + SHARED.start * 8, (SHARED.end - SHARED.start) * 2, 0),
];
/// Registers of a redistributor: control, tables of message interrupts, then those of private interrupts as above.
const REDISTRIBUTOR: [Registers; 8] = [
    registers(0x0000, 1, 0),
    registers(0x0070, 4, 0),
    registers(0x1_0080, 1, ALL),
    registers(0x1_0180, 1, ALL),
    registers(0x1_0200, 1, 0),
    registers(0x1_0380, 1, ALL),
    registers(0x1_0400, 8, 0),
    registers(0x1_0c04, 1, 0),
];

/// Number of a system register for KVM (devices/arm-vgic-v3.rst): op0, op1, CRn, CRm, op2.
const fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2
}

/// Registers of the CPU interface that are zero after a reset: PMR, BPR0, BPR1, AP0R0, AP1R0, IGRPEN0, IGRPEN1.
const CPU_INTERFACE: [u64; 7] = [
    system(3, 0, 4, 6, 0),
    system(3, 0, 12, 8, 3),
    system(3, 0, 12, 12, 3),
    system(3, 0, 12, 8, 4),
    system(3, 0, 12, 9, 0),
    system(3, 0, 12, 12, 6),
    system(3, 0, 12, 12, 7),
];

impl InitialState {
    /// That of vCPUs of this host's model, and of `controllers`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn of(
        hypervisor: &Hypervisor,
        vm: &Vm,
        controllers: Controllers,
        _: &[VcpuFd],
    ) -> Result<Self, KvmError> {
        Ok(Self { controllers, model: model(hypervisor, vm)? })
    }

    /// Returns the interrupt controllers to it, while no vCPU is in the guest.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_controllers(&self, _: &Vm) -> Result<(), KvmError> {
        let Controllers { gic, its, hardware_ids } = &self.controllers;
        let reset = attribute(KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_ITS_CTRL_RESET, &());
        its.set_device_attr(&reset).map_err(|e| KvmError::call("KVM_DEV_ARM_ITS_CTRL_RESET", e))?;
        write(gic, KVM_DEV_ARM_VGIC_GRP_DIST_REGS, 0, &DISTRIBUTOR)?;
        for id in hardware_ids {
            write(gic, KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, *id, &REDISTRIBUTOR)?;
            for register in CPU_INTERFACE {
                set(gic, KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, *id, register, &0_u64)?;
            }
        }
        Ok(())
    }

    /// Returns vCPU `index` to it, on its own thread; the first begins at `entry`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_vcpu(&self, index: usize, fd: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
        initialize(fd, &self.model, index)?;
        if index == 0 { begin(fd, entry) } else { Ok(()) }
    }
}

fn write(gic: &DeviceFd, group: u32, id: u32, registers: &[Registers]) -> Result<(), KvmError> {
    registers.iter().try_for_each(|Registers { first, count, value }| {
        (0..*count).try_for_each(|number| {
            let offset = first.saturating_add(number.saturating_mul(4));
            set(gic, group, id, offset.into(), value)
        })
    })
}

/// Sets a register of the processor with the affinity `id`.
fn set<T>(gic: &DeviceFd, group: u32, id: u32, register: u64, value: &T) -> Result<(), KvmError> {
    let attribute = attribute(group, u64::from(id) << 32 | register, value);
    gic.set_device_attr(&attribute).map_err(|e| KvmError::call("KVM_SET_DEVICE_ATTR of the GIC", e))
}
