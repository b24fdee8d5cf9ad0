//! Descriptors of one client: its connection, its process, its slice.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::event::epoll;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::session::Key;
use super::source::{Held, StillUsed};
use super::wire;

/// What belongs to a session, outside the state machine.
pub(super) struct Link {
    /// `None` once it is closed.
    pub(super) socket: Option<OwnedFd>,
    /// `None` once the process has ended.
    pub(super) process: Option<OwnedFd>,
    pub(super) lease: Option<Lent>,
    /// Set when nobody wants the slice that is being made.
    pub(super) cancel: Arc<AtomicBool>,
}

/// What the broker keeps for a client.
pub(super) enum Lent {
    Slice(Box<dyn Held>),
    /// Given back once, in vain.
    Used(StillUsed),
}

impl Link {
    /// Waits for the connection and its process too.
    pub(super) fn watch(&self, epoll: &OwnedFd, key: Key) -> io::Result<()> {
        if let Some(process) = &self.process {
            watch(epoll, process.as_fd(), key.saturating_mul(2).saturating_add(1))?;
        }
        self.listen(epoll, key)
    }

    /// Waits for the connection.
    pub(super) fn listen(&self, epoll: &OwnedFd, key: Key) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        watch(epoll, socket.as_fd(), key.saturating_mul(2))
    }
}

/// The region of a slice as JSON in a file that nobody can change: its retired pages may be more than a packet holds.
pub(super) fn describe(lease: &dyn Held) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    io::Write::write_all(&mut file, &wire::encode(lease.region()))?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Waits for `descriptor`, which events then call `name`.
pub(super) fn watch(epoll: &OwnedFd, descriptor: BorrowedFd<'_>, name: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, descriptor, epoll::EventData::new_u64(name), epoll::EventFlags::IN)?)
}
