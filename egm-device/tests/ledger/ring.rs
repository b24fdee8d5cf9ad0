//! Pins by io_uring: fixed buffers, which the kernel pins for long as it pins those of VFIO.
#![expect(unsafe_code, reason = "io_uring has no safe interface")]

use std::os::fd::OwnedFd;

use egm_device::Mapping;
use rustix::io_uring::{IoringRegisterOp, io_uring_params, io_uring_register, io_uring_setup};

/// A ring; `None`, with the reason printed, where there is no io_uring.
pub(crate) fn ring() -> Option<OwnedFd> {
    // SAFETY: the parameters are zero, so the kernel reads no pointer of them.
    let ring = unsafe { io_uring_setup(2, &mut io_uring_params::default()) };
    ring.inspect_err(|error| println!("skipped: io_uring: {error}")).ok()
}

/// Keeps the pages of `mapping` pinned until the last descriptor of `ring` is closed.
pub(crate) fn pin(ring: &OwnedFd, mapping: &Mapping) {
    let buffer = libc::iovec { iov_base: mapping.start().as_ptr().cast(), iov_len: mapping.size() };
    // SAFETY: the kernel reads one iovec, and pins the pages of a live mapping. No request on the ring uses them.
    unsafe { io_uring_register(ring, IoringRegisterOp::RegisterBuffers, (&raw const buffer).cast(), 1) }
        .unwrap();
}
