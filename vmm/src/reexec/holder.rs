//! A process that shares this one's memory until the next program runs. This is an unsafe module.
//!
//! Without it, the execution frees the old page tables and the old VM while the guest waits: about 1 ms for each GiB.
//!
//! Why it exists: no safe interface makes a process that shares memory.
//! What callers may rely on: the process only waits, has no descriptor but the read end of its pipe and one that only it has, and
//! ends when the last copy of [`Holder::end`] is closed.
#![expect(unsafe_code, reason = "clone has no safe interface")]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use rustix::io::retry_on_intr;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, waitpid};

/// Size of its stack, in units of 16 bytes.
const STACK: usize = 1 << 10;

/// A process that shares memory; it ends with this value.
#[derive(Debug)]
pub(crate) struct Holder {
    process: Pid,
    end: Option<OwnedFd>,
    /// Stack of the process; `None` if an earlier execution started it: its stack is in the old memory.
    _stack: Option<Vec<u128>>,
}

impl Holder {
    /// Starts a process that shares this one's memory and none of its descriptors. A vhost worker ends when its last descriptor is
    /// closed, so no copy may stay open.
    ///
    /// # Errors
    /// `EMFILE`, `EAGAIN` at a limit of processes, `ENOMEM`; `ENOSYS` before Linux 5.9.
    pub(crate) fn start() -> io::Result<Self> {
        let (wait, end) = pipe_with(PipeFlags::CLOEXEC)?;
        let (ready, child_copy) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut stack = vec![0_u128; STACK];
        let top = stack.as_mut_ptr_range().end.cast();
        // Passed by value: the child may run after this function has returned.
        let number = |descriptor: RawFd| usize::try_from(descriptor).map_err(io::Error::other);
        let kept =
            ptr::without_provenance_mut(number(wait.as_raw_fd())? << 32 | number(child_copy.as_raw_fd())?);
        // SAFETY: `stack` is written by the child alone, which has ended when `Drop` frees it; `child` touches no other memory,
        // and no state of a thread that the parent uses meanwhile.
        let made = unsafe { libc::clone(child, top, libc::CLONE_VM | libc::SIGCHLD, kept) };
        let process = Pid::from_raw(made).filter(|_| made > 0).ok_or_else(io::Error::last_os_error)?;
        let holder = Self { process, end: Some(end), _stack: Some(stack) };
        drop(child_copy);
        match retry_on_intr(|| rustix::io::read(&ready, &mut [0]))? {
            0 => Err(io::Error::from_raw_os_error(libc::ENOSYS)), // it has ended
            _ => Ok(holder),
        }
    }

    /// The holder that this process started before its last execution, with the passed descriptor `end`.
    pub(crate) fn inherited(process: i32, end: OwnedFd) -> Option<Self> {
        Some(Self { process: Pid::from_raw(process)?, end: Some(end), _stack: None })
    }

    pub(crate) fn process(&self) -> i32 {
        self.process.as_raw_pid()
    }

    /// Ends `holder` and then calls `ended`, on a thread of its own: to free the memory takes time.
    pub(crate) fn release(holder: Option<Self>, ended: impl FnOnce() + Send + 'static) {
        // Dropped in this order, also here where no thread starts.
        let both = (holder, OnDrop(Some(ended)));
        let _ = std::thread::Builder::new().name("egm-free".into()).spawn(move || drop(both));
    }

    /// The process ends when this descriptor and its duplicates are closed.
    pub(crate) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Holder {
    /// Waits until the memory is freed.
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = retry_on_intr(|| waitpid(Some(self.process), WaitOptions::empty()));
    }
}

/// Calls a function when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|call| call());
    }
}

/// Body of the child: blocks all signals, closes all descriptors but two, writes a byte to the second, and waits until the write end
/// of the first is closed. Its return ends it.
extern "C" fn child(kept: *mut c_void) -> c_int {
    let (wait, ready) = (kept.addr() >> 32, kept.addr() & 0xffff_ffff);
    let (every_signal, mut byte) = (u64::MAX, 0_u8);
    let (set, size) = (&raw const every_signal, size_of_val(&every_signal));
    // SAFETY: the call reads `size` bytes at `set`, which is on the stack of this function.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, set, 0, size) };
    let (low, high) = (wait.min(ready), wait.max(ready));
    for (first, last) in [(0, low.wrapping_sub(1)), (low + 1, high - 1), (high + 1, u32::MAX as usize)] {
        // SAFETY: the descriptors are the child's copies, which nothing else uses.
        if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            return 1; // before Linux 5.9
        }
    }
    // SAFETY: the call reads one byte, on the stack of this function.
    unsafe { libc::syscall(libc::SYS_write, ready, &raw const byte, 1) };
    // SAFETY: the call writes one byte at most, on the stack of this function.
    unsafe { libc::syscall(libc::SYS_read, wait, &raw mut byte, 1) };
    0
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_holder_shares_memory_until_its_end_is_closed() {
        let mut holder = Holder::start().unwrap();
        let folder = format!("/proc/{}", holder.process());
        let maps = |folder: &str| fs::read_to_string(format!("{folder}/maps")).unwrap();
        let page = vec![1_u8; 32 << 20]; // a mapping that was made after the start
        let address = format!("{:x}", page.as_ptr().addr() & !0xfff);
        assert!(maps(&folder).contains(&address), "{address}");
        assert_eq!(fs::read_dir(format!("{folder}/fd")).unwrap().count(), 2, "no other descriptor");
        // As after an execution, which leaves the stack.
        let (process, end) = (holder.process(), holder.end.take().unwrap());
        std::mem::forget(holder);
        drop(Holder::inherited(process, end).unwrap());
        assert!(!fs::exists(folder).unwrap(), "it has ended");
    }
}
