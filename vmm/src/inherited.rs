//! Descriptors that this program inherits by their numbers. This is an unsafe module.
//!
//! Why it exists: a number of the command line belongs to no value, and only the kernel knows whether it is open.
//! What callers may rely on: the descriptor that they get is theirs alone.
#![expect(unsafe_code, reason = "fcntl takes no number of a descriptor that nothing owns")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Numbers below this are standard input, output and error.
const FIRST: RawFd = 3;

/// A duplicate of descriptor `number`. Both are close-on-exec, but for a number of 0 to 2. The open file, with its flags,
/// is that of the program which passed it.
///
/// # Errors
/// `EBADF` when no file has this number, `EMFILE`.
pub(crate) fn descriptor(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved, and the descriptor of this number stays as it is.
    let made = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, FIRST) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
    let made = unsafe { OwnedFd::from_raw_fd(made) };
    if number >= FIRST {
        // SAFETY: no memory is involved. Whatever owns this number goes on owning an open descriptor.
        let _ = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    use super::*;

    #[test]
    fn a_number_that_is_open_is_inherited_once() {
        let file = File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        let made = descriptor(file.as_raw_fd()).unwrap();
        assert_ne!(made.as_raw_fd(), file.as_raw_fd());
        for descriptor in [made.as_fd(), file.as_fd()] {
            assert_eq!(fcntl_getfd(descriptor).unwrap(), FdFlags::CLOEXEC);
        }
        let before = fcntl_getfd(io::stderr()).unwrap();
        drop(descriptor(io::stderr().as_raw_fd()).unwrap());
        assert_eq!(fcntl_getfd(io::stderr()).unwrap(), before);
        for none in [-1, RawFd::MAX] {
            assert_eq!(descriptor(none).unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
    }
}
