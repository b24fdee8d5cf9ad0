//! A process that shares this one's memory until the next program runs. This is an unsafe module.
//!
//! An execution otherwise frees the page tables and the VM of the program before while the guest waits, about 1 ms for each GiB.
//!
//! Why it exists: no safe interface makes a process that shares memory.
//! What callers may rely on: the process only waits, has no other descriptor, and ends with the last one of [`Holder::end`].
#![expect(unsafe_code, reason = "clone has no safe interface")]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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
    /// None of a process that an execution before this one has made.
    _stack: Option<Vec<u128>>,
}

impl Holder {
    /// Starts one for the memory of this process, without any other of its descriptors: a worker of the kernel ends with the last
    /// one of its own.
    ///
    /// # Errors
    /// `EMFILE`, `EAGAIN` at a limit of processes, `ENOMEM`.
    pub(crate) fn start() -> io::Result<Self> {
        let (begin, end) = pipe_with(PipeFlags::CLOEXEC)?;
        let (closed, open) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut stack = vec![0_u128; STACK];
        let top = stack.as_mut_ptr_range().end.cast();
        // In the word itself: no memory of this thread may be read when it has gone on.
        let kept = ptr::without_provenance_mut(usize::try_from(begin.as_raw_fd()).unwrap_or(0));
        // SAFETY: `stack` is written by the child alone, which has ended when `Drop` frees it; `wait` touches no other memory,
        // and no state of a thread that the parent uses meanwhile.
        let made = unsafe { libc::clone(wait, top, libc::CLONE_VM | libc::SIGCHLD, kept) };
        let process = Pid::from_raw(made).filter(|_| made > 0).ok_or_else(io::Error::last_os_error)?;
        let holder = Self { process, end: Some(end), _stack: Some(stack) };
        drop(open);
        retry_on_intr(|| rustix::io::read(&closed, &mut [0]))?; // ends when the child has closed its copy
        Ok(holder)
    }

    /// One that this process started before its last execution, of which `end` was passed.
    pub(crate) fn inherited(process: i32, end: OwnedFd) -> Option<Self> {
        Some(Self { process: Pid::from_raw(process)?, end: Some(end), _stack: None })
    }

    /// Its number.
    pub(crate) fn process(&self) -> i32 {
        self.process.as_raw_pid()
    }

    /// Frees the memory on a thread of its own.
    pub(crate) fn release(self) {
        // Without a thread, the drop of the closure waits here.
        let _ = std::thread::Builder::new().name("egm-free".into()).spawn(move || drop(self));
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

/// The child: it handles no signal, closes its descriptors but for `kept`, and waits for the end of that one. Its return ends it.
extern "C" fn wait(kept: *mut c_void) -> c_int {
    let kept = kept.addr();
    let (every_signal, mut byte) = (u64::MAX, 0_u8);
    let (set, size) = (&raw const every_signal, size_of_val(&every_signal));
    // SAFETY: the call reads `size` bytes at `set`, which is on the stack of this function.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, set, 0, size) };
    for (first, last) in [(0, kept - 1), (kept + 1, u32::MAX as usize)] {
        // SAFETY: the descriptors are the child's copies, which nothing else uses.
        if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            return 1; // before Linux 5.9
        }
    }
    // SAFETY: the call writes one byte at most, on the stack of this function.
    unsafe { libc::syscall(libc::SYS_read, kept, &raw mut byte, 1) };
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
        assert_eq!(fs::read_dir(format!("{folder}/fd")).unwrap().count(), 1, "it holds no file open");
        // As after an execution, which leaves the stack.
        let (process, end) = (holder.process(), holder.end.take().unwrap());
        std::mem::forget(holder);
        drop(Holder::inherited(process, end).unwrap());
        assert!(!fs::exists(folder).unwrap(), "it has ended");
    }
}
