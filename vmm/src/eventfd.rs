//! Eventfds: one way to make them, and their descriptor as a borrowed one. This is an unsafe module.
//!
//! Why it exists: `vmm-sys-util`'s `EventFd`, which KVM takes, does not implement `AsFd`, which VFIO takes.
#![expect(unsafe_code, reason = "EventFd gives its descriptor as a number only")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An eventfd of count 0 that does not block, and that a program executed by this process does not inherit.
///
/// # Errors
/// The kernel's: `EMFILE`, `ENFILE`, `ENOMEM`.
#[expect(clippy::disallowed_methods, reason = "the one call that others must not repeat")]
pub(crate) fn new() -> io::Result<EventFd> {
    let flags = if egm_address::fault!("eventfd-inherited") { 0 } else { EFD_CLOEXEC };
    EventFd::new(EFD_NONBLOCK | flags)
}

/// The descriptor of `event`.
pub(crate) fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor, keeps it open as long as it lives, and the result borrows `event`.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    #[test]
    fn an_eventfd_does_not_block_and_is_not_inherited() {
        let event = new().unwrap();
        assert_eq!(fcntl_getfd(borrowed(&event)).unwrap(), FdFlags::CLOEXEC);
        assert_eq!(event.read().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
