//! Order of messages on both sides of a connection, without its socket.
//!
//! ```text
//!            version agreed on          anything out of order, or the socket's end
//!  Negotiating ────────────────► Ready ───────────────────────────────────────────► closed: every call fails
//! ```

pub mod client;
pub mod server;

use crate::frame::{HEADER, Header, Kind, Malformed};
use crate::message::{Capabilities, Limits, MOST_VERSION_DATA, Version, Wrong};

/// The protocol's version: 0.1.
pub(crate) const MAJOR: u16 = 0;
pub(crate) const MINOR: u16 = 1;

/// `EINVAL`: the answer to an invalid request.
pub const EINVAL: u32 = 22;

/// Bytes that go before the data of any message.
const HEADS: u32 = 64;

/// Protocol violation that ends a connection: later messages cannot be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Fault {
    /// The connection is already closed.
    #[error("the connection is closed")]
    Closed,
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("the handshake failed: {0}")]
    Handshake(Wrong),
    /// The server refuses the handshake, usually because it has another client (`EBUSY`).
    #[error("the server answers the handshake with errno {errno}")]
    Refused {
        /// Error number that the server sent.
        errno: u32,
    },
    /// The first message is no handshake.
    #[error("command {command:#x} came before the handshake")]
    NotNegotiated { command: u16 },
    /// An unsupported protocol version.
    #[error("the peer speaks version {major:#x}.{minor:#x}, not {MAJOR}.{MINOR} or an older minor one")]
    Version {
        /// As the peer wrote it.
        major: u16,
        /// As the peer wrote it.
        minor: u16,
    },
    /// A reply that belongs to no request.
    #[error("message {id:#x} answers command {command:#x}, which was not asked")]
    Unasked {
        /// Id of the reply.
        id: u16,
        /// Command of the reply.
        command: u16,
    },
    /// Descriptors with a handshake or a reply that has none.
    #[error("{fds} file descriptors came with command {command:#x}, which has none")]
    Descriptors { command: u16, fds: usize },
}

/// A received command that needs an answer.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Ticket {
    id: u16,
    command: u16,
    wanted: bool,
}

impl Ticket {
    fn new(header: Header, no_reply: bool) -> Self {
        Self { id: header.id, command: header.command, wanted: !no_reply }
    }

    /// The header of the reply, or `None` if the peer requested no reply.
    #[must_use]
    pub fn done(self) -> Option<Header> {
        self.reply(None)
    }

    /// The whole reply, an error; or `None` if the peer requested no reply.
    #[must_use]
    pub fn refused(self, errno: u32) -> Option<Header> {
        self.reply(Some(errno))
    }

    fn reply(self, error: Option<u32>) -> Option<Header> {
        let header = Header { id: self.id, command: self.command, kind: Kind::Reply { error } };
        self.wanted.then_some(header)
    }
}

/// Largest message that a peer may send after it received `ours`, in bytes with the header.
fn most(ours: &Capabilities) -> u32 {
    let data = ours.limits().map_or(0, |limits| limits.data);
    data.max(MOST_VERSION_DATA).saturating_add(HEADER).saturating_add(HEADS)
}

/// Limits of the peer, if its version is compatible.
fn agree(version: &Version, minor: u16) -> Result<Limits, Fault> {
    if version.major != MAJOR || version.minor > minor {
        return Err(Fault::Version { major: version.major, minor: version.minor });
    }
    version.capabilities.limits().map_err(Fault::Handshake)
}

#[cfg(test)]
mod tests;
