//! Signals that a process waits for beside all else.

use std::ffi::c_int;
use std::io;
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe::register;

/// What ends a program in order: systemd's word, and Ctrl-C.
pub(super) const END: [c_int; 2] = [SIGINT, SIGTERM];

/// Readable after one of `signals`, and never waited for in a read.
///
/// # Errors
/// The kernel's.
pub(super) fn pipe(signals: &[c_int]) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    for signal in signals {
        register(*signal, write.try_clone()?)?;
    }
    read.set_nonblocking(true)?;
    Ok(read)
}
