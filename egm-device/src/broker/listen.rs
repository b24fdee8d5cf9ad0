//! The broker's socket and its lock: one broker has them at a time.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use egm_report::{Blame, Remedy, Report};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::net::SocketFlags;

use super::packet;

/// Most clients that wait in the kernel to be accepted.
const BACKLOG: i32 = 128;

/// Why the broker cannot serve.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ServerError {
    #[error("cannot listen at {}: another broker does", path.display())]
    Taken { path: PathBuf },
    #[error("cannot trust lock {}: it belongs to user {uid} with mode {mode:#o}, not to the \
        broker with 0o600", path.display())]
    NotOurs { path: PathBuf, uid: u32, mode: u32 },
    #[error("cannot listen at {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot wait for clients")]
    Wait(#[source] io::Error),
}

/// Bytes in the path of a Unix socket: `sun_path` less its last, which is 0 (unix(7)).
const MAX_PATH: usize = 107;

/// Remedy for a socket that cannot be made at `path`.
pub(crate) fn no_place(path: &Path, why: &io::Error) -> Remedy {
    if path.as_os_str().len() > MAX_PATH {
        return Blame::Configuration.help(format!("name a path of {MAX_PATH} bytes at most"));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Blame::Host.help(match (why.kind(), folder) {
        (io::ErrorKind::NotFound, Some(folder)) => {
            format!("make the folder {}, or name another path", folder.display())
        }
        (io::ErrorKind::AddrInUse, _) => {
            "remove the file at that path, which is no socket, or name another path".into()
        }
        _ => "name a path in a folder that this user may write to".into(),
    })
}

impl Report for ServerError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Taken { .. } => Blame::Host.help("use that broker, or stop it first"),
            Self::NotOurs { .. } => {
                Blame::Host.help("stop all brokers, find the program that made the file, and remove it")
            }
            Self::Listen { path, source } => no_place(path, source),
            Self::Wait(_) => Blame::Host.help("start the broker again; its clients keep their slices"),
        }
    }
}

/// The lock beside the socket: one broker has it at a time, and it ends with its process. flock(2) needs no write
/// permission: any user that may read the file could keep the broker from starting. So no other user may.
pub(super) fn lock(path: &Path) -> Result<File, ServerError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let error = |source| ServerError::Listen { path: path.to_owned(), source };
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.custom_flags(i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0));
    let lock = options.open(&beside).map_err(error)?;
    let found = lock.metadata().map_err(error)?;
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    if uid != rustix::process::geteuid().as_raw() || mode & 0o177 != 0 {
        return Err(ServerError::NotOurs { path: beside.into(), uid, mode });
    }
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ServerError::Taken { path: path.to_owned() }),
        Err(errno) => Err(error(errno.into())),
    }
}

/// The socket, which every user may connect to.
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
