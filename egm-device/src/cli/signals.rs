//! Signals as descriptors, so that a process can wait for them beside other events.

use std::ffi::c_int;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::low_level::pipe::register;

/// Signals that end a program in order: systemd's SIGTERM, and Ctrl-C.
pub(super) const END: [c_int; 2] = [SIGINT, SIGTERM];

/// Readable after one of `signals`, and never waited for in a read.
pub(super) fn pipe(signals: &[c_int]) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    for signal in signals {
        register(*signal, write.try_clone()?)?;
    }
    read.set_nonblocking(true)?;
    Ok(read)
}

/// Signals to a process that serves slices: each socket is readable after one.
pub(super) struct Signals {
    pub(super) end: UnixStream,
    /// SIGUSR1, a request to the guests for their slices.
    pub(super) ask: UnixStream,
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { end: pipe(&END)?, ask: pipe(&[SIGUSR1])? })
    }

    /// Whether SIGUSR1 came since the last call.
    pub(super) fn is_asked(&mut self) -> bool {
        self.ask.read(&mut [0; 64]).is_ok_and(|signals| signals > 0)
    }
}
