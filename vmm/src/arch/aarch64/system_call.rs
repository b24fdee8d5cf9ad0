//! System calls of a thread, as a signal handler finds them.

use crate::config::Architecture;

/// Architecture of this program.
pub const ARCHITECTURE: Architecture = Architecture::Aarch64;

/// Calls that a filter permits and Arm lacks: none.
#[cfg(test)]
pub(crate) const OLD: &[(&str, libc::c_long)] = &[];

/// Arguments of a system call, from the registers of the thread that makes it.
pub fn arguments(context: &libc::ucontext_t) -> [u64; 6] {
    let [first, second, third, fourth, fifth, sixth, ..] = context.uc_mcontext.regs;
    [first, second, third, fourth, fifth, sixth]
}
