//! System calls of a thread, as a signal handler finds them.

#[cfg(test)]
use std::ffi::c_uint;

use crate::config::Architecture;

/// Architecture of this program.
pub const ARCHITECTURE: Architecture = Architecture::Aarch64;

/// Calls that a filter permits and Arm lacks: none.
#[cfg(test)]
pub(crate) const OLD: &[(&str, libc::c_long)] = &[];

/// Requests of KVM that a filter permits and only Arm has: none that x86 lacks.
#[cfg(test)]
pub(crate) const OF_KVM: &[(&str, c_uint, c_uint, usize)] = &[];

/// Requests of KVM that a filter permits for x86 alone.
#[cfg(test)]
pub(crate) const KVM_OF_OTHERS: [&str; 4] =
    ["KVM_GET_REGS", "KVM_GET_SREGS", "KVM_GET_MSRS", "KVM_X86_SET_MCE"];

/// Arguments of a system call, from the registers of the thread that makes it.
pub fn arguments(context: &libc::ucontext_t) -> [u64; 6] {
    let [first, second, third, fourth, fifth, sixth, ..] = context.uc_mcontext.regs;
    [first, second, third, fourth, fifth, sixth]
}
