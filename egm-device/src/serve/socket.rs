//! The sockets that clients connect to: made by us, or passed by systemd (`sd_listen_fds(3)`).

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use egm_report::{Blame, Remedy, Report};
use egm_vfio_wire::socket::{BusyPoll, Connection};
use listenfd::ListenFd;

use crate::broker::no_place;
use crate::unix_socket::bind_private;

/// Timeout of a connection without messages, for the program at its other end.
const QUEUE_LIMIT: Duration = Duration::from_secs(1);

/// Why a device has no listening socket.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum SocketError {
    #[error("cannot listen at {}: another program does", path.display())]
    Taken { path: PathBuf },
    #[error("cannot listen at {}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot use descriptor {number} from systemd: it is not a listening Unix socket")]
    Passed { number: usize, source: io::Error },
    #[error("cannot serve device \"{device}\": it has no socket")]
    None { device: String },
    /// A passed socket that no device uses: a mistake in the configuration.
    #[error("cannot use sockets of systemd that no device is named after: {}", names.join(", "))]
    Unused { names: Vec<String> },
}

impl Report for SocketError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Unused { .. } => Blame::Configuration
                .help("write FileDescriptorName= of the .socket unit as the device's name"),
            Self::Taken { .. } => Blame::Host.help("end that program, or name another path"),
            Self::Listen { path, source } => no_place(path, source),
            Self::Passed { .. } => {
                Blame::Host.help("write only ListenStream= with the path of a socket in the .socket unit")
            }
            Self::None { device } => Blame::Configuration.help(format!(
                "name one (\"socket\", --socket), or have systemd pass one with FileDescriptorName={device}"
            )),
        }
    }
}

/// A listening socket; one of our own goes with this value.
#[derive(Debug)]
pub struct Socket {
    /// The socket, which this process made or systemd passed.
    pub listener: UnixListener,
    ours: Option<PathBuf>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Some(path) = &self.ours else { return };
        let _ = std::fs::remove_file(path);
        // Clients in the queue may have sent descriptors, which only a receiver may close: `egm_vfio_wire::receiver`.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let _ = self.listener.set_nonblocking(true);
        while let Ok((client, _)) = self.listener.accept() {
            drop(Connection::new(client.into(), QUEUE_LIMIT, BusyPoll::NONE));
        }
    }
}

impl Socket {
    /// The socket that was passed for `device`, else one at `path`, which only this user may connect to.
    pub fn open(
        device: &str,
        path: Option<&Path>,
        passed: &mut BTreeMap<String, UnixListener>,
    ) -> Result<Self, SocketError> {
        if let Some(listener) = passed.remove(device) {
            return Ok(Self { listener, ours: None });
        }
        let path = path.ok_or_else(|| SocketError::None { device: device.to_owned() })?;
        let error = |source| SocketError::Listen { path: path.to_owned(), source };
        // A file of another kind makes bind(2) fail; a socket without a listener was left behind.
        if std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
            if Connection::connect(path, QUEUE_LIMIT, BusyPoll::NONE).is_ok() {
                return Err(SocketError::Taken { path: path.to_owned() });
            }
            std::fs::remove_file(path).map_err(error)?;
        }
        Ok(Self { listener: bind_private(path).map_err(error)?, ours: Some(path.to_owned()) })
    }
}

/// The sockets that systemd passed, by their names; a socket without a name goes by its number.
pub fn passed() -> Result<BTreeMap<String, UnixListener>, SocketError> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':').map(str::to_owned);
    let mut all = ListenFd::from_env();
    let mut passed = BTreeMap::new();
    for number in 0..all.len() {
        let name = names.next().filter(|name| !name.is_empty()).unwrap_or_else(|| number.to_string());
        let listener = all.take_unix_listener(number);
        let listener = listener.map_err(|source| SocketError::Passed { number, source })?;
        passed.extend(listener.map(|listener| (name, listener)));
    }
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_socket_is_its_owner_s_alone_replaces_one_left_behind_and_goes_with_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let socket = Socket::open("vm", Some(&path), &mut BTreeMap::new()).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let second = Socket::open("vm", Some(&path), &mut BTreeMap::new());
        assert!(matches!(second, Err(SocketError::Taken { .. })));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("precious");
        std::fs::write(&path, "bytes").unwrap();
        let refused = Socket::open("vm", Some(&path), &mut BTreeMap::new());
        assert!(matches!(refused, Err(SocketError::Listen { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"bytes");
        assert!(matches!(Socket::open("vm", None, &mut BTreeMap::new()), Err(SocketError::None { .. })));
    }

    #[test]
    fn a_passed_socket_comes_before_a_path_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut passed = BTreeMap::from([("vm".to_owned(), UnixListener::bind(&path).unwrap())]);
        drop(Socket::open("vm", Some(Path::new("/nowhere/at/all")), &mut passed).unwrap());
        assert!(passed.is_empty() && path.exists());
    }
}
