//! The host's side: Unix sockets by the convention that Firecracker set and other VMMs follow.
//!
//! * A guest that connects to port P of the host reaches the socket `<path>_<P>`.
//! * A host program connects to `<path>`, writes `CONNECT <port>\n`, and reads `OK <port>\n` when the guest accepted;
//!   otherwise the stream ends.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::path::PathBuf;

use crate::error::{Blame, Remedy, Report};
use crate::kept::KeptPart;
use crate::listener::Listener;
use crate::listener::connect;

/// Longest path of a Unix socket, and the longest `_<port>` after it.
const MAX_PATH: usize = 107;
const SUFFIX: usize = "_4294967295".len();
/// Longest handshake: `CONNECT 4294967295\n`.
const MAX_HANDSHAKE: usize = 19;

/// Why the host's side of a vsock device cannot be set up.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum SocketError {
    /// `<path>_<port>` would not fit a socket address.
    #[error("vsock socket {} has {} bytes; at most {} leave room for \"_<port>\"", path.display(), path.as_os_str().len(), MAX_PATH - SUFFIX)]
    TooLong { path: PathBuf },
    /// Another process listens there.
    #[error("vsock socket {} is in use by another process", path.display())]
    InUse { path: PathBuf },
    /// It cannot be made.
    #[error("cannot make vsock socket {}", path.display())]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Report for SocketError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::TooLong { .. } => Blame::Configuration.help("set \"socket\" to a shorter path"),
            Self::InUse { .. } => {
                Blame::Host.help("give each VM a \"socket\" of its own, or end the VM that has this one")
            }
            Self::Bind { path, .. } => {
                let folder =
                    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
                Blame::Host.help(format!("the folder {} must exist and be writable", folder.display()))
            }
        }
    }
}

/// Refuses a path that leaves no room for `_<port>`.
///
/// # Errors
/// [`SocketError::TooLong`].
pub(crate) fn check_length(path: &Path) -> Result<(), SocketError> {
    let fits = path.as_os_str().len() <= MAX_PATH - SUFFIX;
    if fits { Ok(()) } else { Err(SocketError::TooLong { path: path.to_owned() }) }
}

/// The sockets of one device.
pub struct HostSockets(Listener);

impl HostSockets {
    /// Listens at `path`. A socket left there by a process that ended is replaced.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let path_buf = || path.to_owned();
        check_length(path)?;
        Listener::bind(path).map(Self).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => SocketError::InUse { path: path_buf() },
            _ => SocketError::Bind { path: path_buf(), source },
        })
    }

    /// The socket of the execution before this one, at `path`.
    ///
    /// # Errors
    /// [`SocketError`].
    pub(crate) fn adopt(path: &Path, kept: &KeptPart) -> Result<Self, SocketError> {
        Listener::kept(path, kept)
            .map(Self)
            .map_err(|source| SocketError::Bind { path: path.to_owned(), source })
    }

    /// The part that [`adopt`](Self::adopt) takes.
    pub(super) fn kept(&self) -> io::Result<KeptPart> {
        self.0.keep()
    }

    /// Becomes readable when a host program connects.
    pub(super) fn listener(&mut self) -> &mut Listener {
        &mut self.0
    }

    /// Connects to the host program that serves `port`, without waiting for it.
    pub(super) fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let mut path = self.0.path().as_os_str().to_owned();
        path.push(format!("_{port}"));
        connect(Path::new(&path))
    }
}

/// The first line of a host program, as far as it was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Handshake {
    line: Vec<u8>,
}

/// State of a handshake so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandshakeState {
    /// The line goes on.
    Incomplete,
    /// The host program requests this port of the guest.
    Port(u32),
    /// The line is too long, or is not `CONNECT PORT`.
    Nonsense,
}

impl Handshake {
    /// Takes the next byte.
    pub(super) fn push(&mut self, byte: u8) -> HandshakeState {
        if byte != b'\n' {
            self.line.push(byte);
            return if self.line.len() < MAX_HANDSHAKE {
                HandshakeState::Incomplete
            } else {
                HandshakeState::Nonsense
            };
        }
        let port = self.line.strip_prefix(b"CONNECT ").filter(|digits| digits.iter().all(u8::is_ascii_digit));
        let port = port.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        port.map_or(HandshakeState::Nonsense, HandshakeState::Port)
    }
}

/// The answer when the guest accepted; `host_port` names the connection on the host's side.
pub(super) fn accepted(host_port: u32) -> String {
    format!("OK {host_port}\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn handshake(text: &[u8]) -> HandshakeState {
        let mut handshake = Handshake::default();
        text.iter()
            .map(|byte| handshake.push(*byte))
            .find(|state| *state != HandshakeState::Incomplete)
            .unwrap_or(HandshakeState::Incomplete)
    }

    #[test]
    fn a_handshake_is_a_line_with_a_port() {
        assert_eq!(handshake(b"CONNECT 52\n"), HandshakeState::Port(52));
        assert_eq!(handshake(b"CONNECT 4294967295\n"), HandshakeState::Port(u32::MAX));
        assert_eq!(handshake(b"CONNECT 52"), HandshakeState::Incomplete);
        for nonsense in
            ["\n", "CONNECT \n", "CONNECT +1\n", "CONNECT 4294967296\n", "connect 1\n", "CONNECT 00000000000"]
        {
            assert_eq!(handshake(nonsense.as_bytes()), HandshakeState::Nonsense, "{nonsense:?}");
        }
    }

    #[test]
    fn a_path_without_room_for_a_port_is_a_mistake_of_the_configuration() {
        let error = HostSockets::bind(Path::new(&"x".repeat(97))).err().unwrap();
        assert_eq!(error.blame(), Blame::Configuration);
    }

    proptest! {
        #[test]
        fn any_bytes_end_within_the_longest_handshake(bytes in prop::collection::vec(any::<u8>(), 19..40)) {
            prop_assert_ne!(handshake(&bytes), HandshakeState::Incomplete);
        }
    }
}
