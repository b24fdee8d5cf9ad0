//! System calls of a thread, as a signal handler finds them.

use crate::config::Architecture;

/// Architecture of this program.
pub const ARCHITECTURE: Architecture = Architecture::X86_64;

/// Calls that a filter permits and Arm lacks, with the C library's numbers.
#[cfg(test)]
pub(crate) const OLD: &[(&str, libc::c_long)] =
    &[("epoll_wait", libc::SYS_epoll_wait), ("unlink", libc::SYS_unlink)];

/// Arguments of a system call, from the registers of the thread that makes it.
pub fn arguments(context: &libc::ucontext_t) -> [u64; 6] {
    let registers = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];
    registers.map(|register| {
        let index = usize::try_from(register).unwrap_or(usize::MAX);
        context.uc_mcontext.gregs.get(index).map_or(0, |value| value.cast_unsigned())
    })
}
