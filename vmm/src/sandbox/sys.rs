//! System calls that the sandbox makes and reports. This is an unsafe module.
//!
//! Why it exists: no safe interface restricts a single thread by Landlock, sends a signal to a thread that it did not
//! start, or reads what the kernel reports of a refused system call.
//! What callers may rely on: [`restrict`] is async-signal-safe, and so is everything that [`on_refused`] does.
#![expect(
    unsafe_code,
    reason = "landlock_restrict_self and tgkill have no safe interface, and SIGSYS points to what it is about"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::thread::Pid;

use super::report::{EXIT_CODE, Refused, THREAD_NAME};
use crate::arch::native::system_call::arguments;

/// Restricts the calling thread to the Landlock rules of `ruleset`.
///
/// # Errors
/// The kernel's.
pub(super) fn restrict(ruleset: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call takes two integers and touches no memory of this process.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) })
}

/// Sends `signal` to `thread` of this process; 0 only checks that the thread lives.
///
/// # Errors
/// The kernel's: `ESRCH` if the thread has ended.
pub(super) fn signal(thread: Pid, signal: i32) -> io::Result<()> {
    let (process, thread) = (rustix::process::getpid().as_raw_pid(), thread.as_raw_pid());
    // SAFETY: the call takes three integers and touches no memory of this process; the signal has a handler.
    check(unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) })
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Keeps the C library's allocator from opening files: `/sys/devices/system/cpu/online` for the ninth thread that allocates, and
/// `/proc/sys/vm/overcommit_memory` when it gives a part of a heap back.
pub(super) fn keep_allocator_from_files() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, ARENAS), (libc::M_TRIM_THRESHOLD, i32::MAX)] {
        // SAFETY: the call changes two numbers of the allocator under its own lock.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Heaps of the allocator: those that it has for 8 threads by default.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 8;

/// `siginfo_t` for SIGSYS, as Linux lays it out on 64-bit machines; libc has no names for the fields.
#[repr(C)]
#[derive(Clone, Copy)]
struct SignalInfo {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    instruction: u64,
    call: u32,
    architecture: u32,
}

/// The handler of SIGSYS: ends the process, after a message that names thread and call.
pub(super) extern "C" fn on_refused(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: SA_SIGINFO promises a siginfo_t of 128 bytes, of which `SignalInfo` describes the first.
    let info = unsafe { info.cast::<SignalInfo>().read() };
    // SAFETY: SA_SIGINFO promises a ucontext_t, which nothing else uses while the handler runs.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    Refused { call: info.call, arguments: arguments(context), thread: thread_name() }.print();
    crate::console::try_restore_terminal();
    // SAFETY: async-signal-safe, and nothing of this process runs afterwards.
    unsafe { libc::_exit(EXIT_CODE) };
}

/// The name of the calling thread, ended by a NUL.
fn thread_name() -> [u8; THREAD_NAME] {
    let mut name = [0; THREAD_NAME];
    // SAFETY: the kernel writes 16 bytes at most, which the array has.
    let _ = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_libc() {
        assert_eq!(std::mem::offset_of!(SignalInfo, instruction), 16);
        assert_eq!(std::mem::offset_of!(SignalInfo, call), 24);
        assert!(size_of::<SignalInfo>() <= size_of::<libc::siginfo_t>());
    }

    #[test]
    fn a_thread_that_has_ended_is_known() {
        let own = rustix::thread::gettid();
        signal(own, 0).unwrap();
        let ended = std::thread::spawn(rustix::thread::gettid).join().unwrap();
        // A join returns before the kernel has removed the thread.
        let error = std::iter::repeat_with(|| signal(ended, 0)).find_map(Result::err).unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
