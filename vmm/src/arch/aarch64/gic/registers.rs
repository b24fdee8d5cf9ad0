//! Registers of a GICv3 and of an ITS that KVM keeps (devices/arm-vgic-v3.rst and arm-vgic-its.rst), in the order in which it
//! takes them back (Arm IHI 0069, 12.9 to 12.11 and 12.19).

use std::ops::Range;

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, KVM_DEV_ARM_VGIC_GRP_DIST_REGS, KVM_DEV_ARM_VGIC_GRP_REDIST_REGS,
};
use kvm_ioctls::DeviceFd;

use super::attribute;
use super::read::read;
use crate::arch::aarch64::interrupts::LINES;
use crate::kvm::KvmError;

/// 32-bit registers with one meaning.
pub(in crate::arch::aarch64) struct Bank {
    /// Offset of the first.
    first: u32,
    /// Offset of the first that clears bits, for registers that only set them.
    clear: Option<u32>,
    count: u32,
    /// Value after a reset.
    initial: u32,
}

const fn bank(first: u32, count: u32, initial: u32) -> Bank {
    Bank { first, clear: None, count, initial }
}

/// Registers that set bits, beside others at `clear` that clear them.
const fn bits(first: u32, clear: u32, count: u32) -> Bank {
    Bank { first, clear: Some(clear), count, initial: 0 }
}

const ALL: u32 = u32::MAX;
/// Shared interrupts: a register has 32, 16, 4 or, in two words, one of them.
const SHARED: Range<u32> = LINES;
const WORDS: u32 = SHARED.end.div_ceil(32) - SHARED.start / 32;
const SKIPPED: u32 = SHARED.start / 8;
/// Offset of the control register of a distributor and of a redistributor.
const CONTROL: u32 = 0;

/// Offset of the distributor's implementation, which has the revision of KVM's interface.
pub(in crate::arch::aarch64) const IMPLEMENTATION: u64 = 0x8;

/// Registers of the distributor: group, enable, pending, active, priority, configuration, target of shared interrupts, then
/// control. A write of a pending register from user space replaces all its bits.
pub(in crate::arch::aarch64) const DISTRIBUTOR: [Bank; 8] = [
    bank(0x0080 + SKIPPED, WORDS, ALL),
    bits(0x0100 + SKIPPED, 0x0180 + SKIPPED, WORDS),
    bank(0x0200 + SKIPPED, WORDS, 0),
    bits(0x0300 + SKIPPED, 0x0380 + SKIPPED, WORDS),
    bank(0x0400 + SHARED.start, (SHARED.end - SHARED.start) / 4, 0),
    bank(0x0c00 + SHARED.start / 4, (SHARED.end - SHARED.start) / 16, 0),
    bank(0x6000 + SHARED.start * 8, (SHARED.end - SHARED.start) * 2, 0),
    bank(CONTROL, 1, 0),
];
/// Registers of a redistributor: tables of message interrupts, which KVM takes only while control has these off, then those of
/// private interrupts as above, then control.
pub(in crate::arch::aarch64) const REDISTRIBUTOR: [Bank; 8] = [
    bank(0x0070, 4, 0),
    bank(0x1_0080, 1, ALL),
    bits(0x1_0100, 0x1_0180, 1),
    bank(0x1_0200, 1, 0),
    bits(0x1_0300, 0x1_0380, 1),
    bank(0x1_0400, 8, 0),
    bank(0x1_0c04, 1, 0),
    bank(CONTROL, 1, 0),
];

/// Registers of an ITS, 64 bits each: implementation, command queue, position of its reader and its writer, eight tables. A
/// write of the command queue sets the reader's position to 0. The control register comes after the content of the tables.
pub(in crate::arch::aarch64) const ITS: [u64; 12] =
    [0x04, 0x80, 0x90, 0x88, 0x100, 0x108, 0x110, 0x118, 0x120, 0x128, 0x130, 0x138];
/// Offset of the control register of an ITS.
pub(in crate::arch::aarch64) const ITS_CONTROL: u64 = 0;

/// Number of a system register for KVM (devices/arm-vgic-v3.rst): op0, op1, CRn, CRm, op2.
const fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2
}

const PRIORITY_MASK: u64 = system(3, 0, 4, 6, 0);
const BINARY_POINT_0: u64 = system(3, 0, 12, 8, 3);
const BINARY_POINT_1: u64 = system(3, 0, 12, 12, 3);
const INTERFACE_CONTROL: u64 = system(3, 0, 12, 12, 4);
const SYSTEM_REGISTERS: u64 = system(3, 0, 12, 12, 5);
const ENABLE_0: u64 = system(3, 0, 12, 12, 6);
const ENABLE_1: u64 = system(3, 0, 12, 12, 7);
/// Active priorities of group 0 and 1: the first register of up to four.
const ACTIVE_0: u64 = system(3, 0, 12, 8, 4);
const ACTIVE_1: u64 = system(3, 0, 12, 9, 0);

/// Registers of the CPU interface that are zero after a reset.
const CPU_INTERFACE_CLEARED: [u64; 7] =
    [PRIORITY_MASK, BINARY_POINT_0, BINARY_POINT_1, ACTIVE_0, ACTIVE_1, ENABLE_0, ENABLE_1];

/// Registers of the CPU interface with the value `control` in its control register: 5, 6 or 7 bits of priority need one, two or
/// four registers of active priorities (Arm IHI 0069, 12.2.4).
fn cpu_interface(control: u64) -> Vec<u64> {
    let active = match control >> 8 & 7 {
        6 => 4,
        5 => 2,
        _ => 1,
    };
    let mut registers =
        vec![SYSTEM_REGISTERS, INTERFACE_CONTROL, PRIORITY_MASK, BINARY_POINT_0, BINARY_POINT_1];
    registers.extend(ACTIVE_0..ACTIVE_0.saturating_add(active));
    registers.extend(ACTIVE_1..ACTIVE_1.saturating_add(active));
    registers.extend([ENABLE_0, ENABLE_1]);
    registers
}

/// A part of the GIC: the distributor, or what belongs to the vCPU with an affinity.
#[derive(Clone, Copy)]
pub(in crate::arch::aarch64) struct Part<'a> {
    gic: &'a DeviceFd,
    group: u32,
    affinity: u64,
}

impl<'a> Part<'a> {
    pub(in crate::arch::aarch64) const fn distributor(gic: &'a DeviceFd) -> Self {
        Self { gic, group: KVM_DEV_ARM_VGIC_GRP_DIST_REGS, affinity: 0 }
    }

    pub(in crate::arch::aarch64) fn redistributor(gic: &'a DeviceFd, id: u32) -> Self {
        Self { gic, group: KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, affinity: id.into() }
    }

    pub(in crate::arch::aarch64) fn cpu_interface(gic: &'a DeviceFd, id: u32) -> Self {
        Self { gic, group: KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, affinity: id.into() }
    }

    /// Another group of attributes of the same part.
    pub(in crate::arch::aarch64) const fn with_group(self, group: u32) -> Self {
        Self { group, ..self }
    }

    /// Value of a register of up to 64 bits.
    pub(in crate::arch::aarch64) fn get(self, register: u64) -> Result<u64, KvmError> {
        read(self.gic, self.group, self.affinity << 32 | register)
    }

    /// Sets a register; KVM reads the lower half of `value` for one of 32 bits.
    pub(in crate::arch::aarch64) fn set(self, register: u64, value: u64) -> Result<(), KvmError> {
        let attribute = attribute(self.group, self.affinity << 32 | register, &value);
        self.gic.set_device_attr(&attribute).map_err(|e| KvmError::call("KVM_SET_DEVICE_ATTR of the GIC", e))
    }

    /// Values of all registers of `banks`.
    pub(in crate::arch::aarch64) fn save(self, banks: &[Bank]) -> Result<Vec<u32>, KvmError> {
        let registers = banks.iter().flat_map(|bank| (0..bank.count).map(|number| bank.first + number * 4));
        registers.map(|offset| self.get(offset.into()).map(low)).collect()
    }

    /// Returns the registers of `banks` to `values`, of which there must be as many.
    pub(in crate::arch::aarch64) fn restore(self, banks: &[Bank], values: &[u32]) -> Result<(), KvmError> {
        if values.len() != count(banks) {
            return Err(malformed());
        }
        self.set(CONTROL.into(), 0)?;
        let mut values = values.iter().copied();
        banks.iter().try_for_each(|bank| {
            (0..bank.count)
                .zip(values.by_ref())
                .try_for_each(|(number, value)| self.write(bank, number, value))
        })
    }

    /// Returns the registers of `banks` to their values after a reset.
    pub(in crate::arch::aarch64) fn reset(self, banks: &[Bank]) -> Result<(), KvmError> {
        self.set(CONTROL.into(), 0)?;
        banks.iter().try_for_each(|bank| {
            (0..bank.count).try_for_each(|number| self.write(bank, number, bank.initial))
        })
    }

    /// Registers of a CPU interface.
    pub(in crate::arch::aarch64) fn registers(self) -> Result<Vec<u64>, KvmError> {
        self.get(INTERFACE_CONTROL).map(cpu_interface)
    }

    /// Returns a CPU interface to its state after a reset.
    pub(in crate::arch::aarch64) fn reset_interface(self) -> Result<(), KvmError> {
        CPU_INTERFACE_CLEARED.into_iter().try_for_each(|register| self.set(register, 0))
    }

    /// Sets register `number` of `bank`.
    fn write(self, bank: &Bank, number: u32, value: u32) -> Result<(), KvmError> {
        let offset = |first: u32| u64::from(first.saturating_add(number.saturating_mul(4)));
        bank.clear.map_or(Ok(()), |clear| self.set(offset(clear), ALL.into()))?;
        self.set(offset(bank.first), value.into())
    }
}

/// Number of registers of `banks`.
fn count(banks: &[Bank]) -> usize {
    banks.iter().map(|bank| usize::try_from(bank.count).unwrap_or(usize::MAX)).sum()
}

/// The error of a list that has another length than the registers here.
pub(in crate::arch::aarch64) fn malformed() -> KvmError {
    KvmError::call("KVM_SET_DEVICE_ATTR of the GIC", kvm_ioctls::Error::new(libc::EINVAL))
}

/// The lower half of a register.
pub(in crate::arch::aarch64) const fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_interface_has_active_priorities_for_the_bits_that_its_control_register_reports() {
        for (bits, active, last) in [(5, 1, 0xc644), (6, 2, 0xc645), (7, 4, 0xc647)] {
            let registers = cpu_interface((bits - 1) << 8);
            assert_eq!(registers.len(), 7 + 2 * active, "{bits}");
            // ICC_SRE_EL1 and ICC_CTLR_EL1, which fix the rest, then ICC_PMR_EL1.
            assert_eq!(registers[..3], [0xc665, 0xc664, 0xc230]);
            assert_eq!(registers[4 + active], last, "{bits}");
        }
    }

    #[test]
    fn tables_precede_the_control_register_and_bits_are_cleared_before_they_are_set() {
        let [tables, .., control] = &REDISTRIBUTOR;
        assert_eq!((tables.first, tables.count, control.first), (0x70, 4, CONTROL));
        assert_eq!(DISTRIBUTOR.last().map(|bank| bank.first), Some(CONTROL));
        for bank in DISTRIBUTOR.iter().chain(&REDISTRIBUTOR) {
            assert!(bank.clear.is_none_or(|clear| clear == bank.first + 0x80), "{:#x}", bank.first);
        }
        let [implementation, queue, reader, writer, ..] = ITS;
        assert_eq!([implementation, queue, reader, writer], [0x04, 0x80, 0x90, 0x88]);
    }

    #[test]
    fn a_distributor_has_a_register_of_each_kind_for_its_shared_interrupts() {
        let lines = usize::try_from(SHARED.end - SHARED.start).unwrap();
        assert_eq!(count(&DISTRIBUTOR), 4 * lines / 32 + lines / 4 + lines / 16 + 2 * lines + 1);
        assert_eq!(count(&REDISTRIBUTOR), 4 + 4 + 8 + 1 + 1);
        assert_eq!(low(0x1_2345_6789), 0x2345_6789);
    }
}
