//! The broker's place in the file system: one broker has it at a time.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::net::SocketFlags;

use super::packet;
use crate::report::{Blame, Report};

/// Clients that the kernel lets wait for the loop.
const BACKLOG: i32 = 128;

/// Why the broker cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another broker has the socket.
    #[error("another broker listens at {}", path.display())]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// The socket cannot be made.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The loop cannot wait.
    #[error("cannot wait for clients")]
    Wait(#[source] io::Error),
}

impl Report for ServerError {
    fn blame(&self) -> Blame {
        Blame::Host
    }

    fn help(&self) -> Option<String> {
        matches!(self, Self::Taken { .. }).then(|| "use that one, or end it first".to_owned())
    }
}

/// The lock beside the socket: one broker has it at a time, and it goes with its process.
pub(super) fn lock(path: &Path) -> Result<File, ServerError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let error = |source| ServerError::Listen { path: path.to_owned(), source };
    let lock = File::options().create(true).truncate(false).write(true).open(&beside).map_err(error)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ServerError::Taken { path: path.to_owned() }),
        Err(errno) => Err(error(errno.into())),
    }
}

/// The socket, which everybody may connect to.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    // The lock is ours, so a socket here was left behind; a file of another kind makes bind(2) fail.
    if std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
        std::fs::remove_file(path)?;
    }
    let socket = packet::socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &packet::address(path)?)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}
