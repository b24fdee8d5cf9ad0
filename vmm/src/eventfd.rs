//! An eventfd as a borrowed descriptor. This is an unsafe module.
//!
//! Why it exists: `vmm-sys-util`'s `EventFd`, which KVM takes, does not implement `AsFd`, which VFIO takes.
#![expect(unsafe_code, reason = "EventFd gives its descriptor as a number only")]

use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

/// The descriptor of `event`.
pub(crate) fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor, keeps it open as long as it lives, and the result borrows `event`.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
