//! System calls of a thread, as a signal handler finds them.

#[cfg(test)]
use std::ffi::c_uint;

#[cfg(test)]
use vmm_sys_util::ioctl::{_IOC_READ, _IOC_WRITE};

use crate::config::Architecture;

/// Architecture of this program.
pub const ARCHITECTURE: Architecture = Architecture::X86_64;

/// Calls that a filter permits and Arm lacks, with the C library's numbers.
#[cfg(test)]
pub(crate) const OLD: &[(&str, libc::c_long)] =
    &[("epoll_wait", libc::SYS_epoll_wait), ("unlink", libc::SYS_unlink)];

/// Requests of KVM that a filter permits and only x86 has, or has with an argument of this size: direction, number and size.
#[cfg(test)]
pub(crate) const OF_KVM: &[(&str, c_uint, c_uint, usize)] = &[
    ("KVM_GET_REGS", _IOC_READ, 0x81, size_of::<kvm_bindings::kvm_regs>()),
    ("KVM_GET_SREGS", _IOC_READ, 0x83, size_of::<kvm_bindings::kvm_sregs>()),
    ("KVM_GET_MSRS", _IOC_READ | _IOC_WRITE, 0x88, size_of::<kvm_bindings::kvm_msrs>()),
    ("KVM_X86_SET_MCE", _IOC_WRITE, 0x9e, size_of::<kvm_bindings::kvm_x86_mce>()),
    ("KVM_SET_REGS", _IOC_WRITE, 0x82, size_of::<kvm_bindings::kvm_regs>()),
    ("KVM_SET_SREGS", _IOC_WRITE, 0x84, size_of::<kvm_bindings::kvm_sregs>()),
    ("KVM_SET_MSRS", _IOC_WRITE, 0x89, size_of::<kvm_bindings::kvm_msrs>()),
    ("KVM_SET_XSAVE", _IOC_WRITE, 0xa5, size_of::<kvm_bindings::kvm_xsave>()),
    ("KVM_SET_LAPIC", _IOC_WRITE, 0x8f, size_of::<kvm_bindings::kvm_lapic_state>()),
    ("KVM_SET_DEBUGREGS", _IOC_WRITE, 0xa2, size_of::<kvm_bindings::kvm_debugregs>()),
    ("KVM_SET_XCRS", _IOC_WRITE, 0xa7, size_of::<kvm_bindings::kvm_xcrs>()),
    ("KVM_SET_NESTED_STATE", _IOC_WRITE, 0xbf, size_of::<kvm_bindings::kvm_nested_state>()),
    ("KVM_SET_IRQCHIP", _IOC_READ, 0x63, size_of::<kvm_bindings::kvm_irqchip>()),
];

/// Requests of KVM that a filter permits for Arm alone.
#[cfg(test)]
pub(crate) const KVM_OF_OTHERS: [&str; 1] = ["KVM_ARM_VCPU_INIT"];

/// Arguments of a system call, from the registers of the thread that makes it.
pub fn arguments(context: &libc::ucontext_t) -> [u64; 6] {
    let registers = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];
    registers.map(|register| {
        let index = usize::try_from(register).unwrap_or(usize::MAX);
        context.uc_mcontext.gregs.get(index).map_or(0, |value| value.cast_unsigned())
    })
}
