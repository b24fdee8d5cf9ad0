//! The system journal, by its native protocol: one datagram of `FIELD=value` lines an entry.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use super::event::Event;

#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    /// Never bound and never connected: a journal that restarts is found again.
    socket: Option<UnixDatagram>,
}

impl Journal {
    pub(super) fn new(path: PathBuf) -> Self {
        let socket = UnixDatagram::unbound().and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
        Self { path, socket: socket.ok() }
    }

    /// Sends `line`, the text of `event`. A host without a journal takes everything.
    ///
    /// # Errors
    /// The kernel's: `WouldBlock` from a journal that is stopped or too slow.
    pub(super) fn send(&self, event: &Event, line: &[u8]) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let fields =
            format!("PRIORITY=6\nSYSLOG_IDENTIFIER=egm-device\nEGM_EVENT={}\nMESSAGE=", event.name());
        // The line is printable ASCII and ends as a field does.
        match socket.send_to(&[fields.as_bytes(), line].concat(), &self.path) {
            Ok(_) => Ok(()),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
