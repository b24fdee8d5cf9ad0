//! Errors of a connection.

use std::io;
use std::time::Duration;

use rustix::io::Errno;

use crate::frame::MOST_FDS;
use crate::frame::Malformed;

/// Failure of a socket or its peer.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Broken {
    /// The peer closed the connection between two messages.
    #[error("the peer closed the connection")]
    End,
    /// The peer closed the connection in the middle of a message.
    #[error("the peer closed the connection in the middle of a message")]
    Cut,
    /// The peer took too long.
    #[error("the peer did not {what} within {} ms", limit.as_millis())]
    Slow {
        /// Action that the peer did not complete.
        what: &'static str,
        /// Time limit for the action.
        limit: Duration,
    },
    /// An invalid message header.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Too many descriptors, or more than this process may hold (`ulimit -n`).
    #[error(
        "file descriptors of a message were cut off: more than {MOST_FDS} came, or this process has no room for them (ulimit -n)"
    )]
    Descriptors,
    /// Descriptors where none are expected any more.
    #[error("file descriptors came where the protocol has none")]
    Unwanted,
    /// The receiver of descriptors failed.
    #[error("cannot receive the peer's file descriptors")]
    Receiver(#[source] io::Error),
    #[error("the socket failed")]
    Socket(#[from] io::Error),
}

impl From<Errno> for Broken {
    fn from(errno: Errno) -> Self {
        Self::Socket(errno.into())
    }
}
