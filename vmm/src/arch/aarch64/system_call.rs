//! System calls of a thread, as a signal handler finds them.

#[cfg(test)]
use std::ffi::c_uint;

#[cfg(test)]
use vmm_sys_util::ioctl::_IOC_WRITE;

use crate::config::Architecture;

/// Architecture of this program.
pub const ARCHITECTURE: Architecture = Architecture::Aarch64;

/// Calls that a filter permits and Arm lacks: none.
#[cfg(test)]
pub(crate) const OLD: &[(&str, libc::c_long)] = &[];

/// Requests of KVM that a filter permits and only Arm has: direction, number and size.
#[cfg(test)]
pub(crate) const OF_KVM: &[(&str, c_uint, c_uint, usize)] =
    &[("KVM_ARM_VCPU_INIT", _IOC_WRITE, 0xae, size_of::<kvm_bindings::kvm_vcpu_init>())];

/// Requests of KVM that a filter permits for x86 alone.
#[cfg(test)]
pub(crate) const KVM_OF_OTHERS: [&str; 13] = [
    "KVM_GET_REGS",
    "KVM_GET_SREGS",
    "KVM_GET_MSRS",
    "KVM_X86_SET_MCE",
    "KVM_SET_REGS",
    "KVM_SET_SREGS",
    "KVM_SET_MSRS",
    "KVM_SET_XSAVE",
    "KVM_SET_LAPIC",
    "KVM_SET_DEBUGREGS",
    "KVM_SET_XCRS",
    "KVM_SET_NESTED_STATE",
    "KVM_SET_IRQCHIP",
];

/// Arguments of a system call, from the registers of the thread that makes it.
pub fn arguments(context: &libc::ucontext_t) -> [u64; 6] {
    let [first, second, third, fourth, fifth, sixth, ..] = context.uc_mcontext.regs;
    [first, second, third, fourth, fifth, sixth]
}
