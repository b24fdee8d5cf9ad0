//! Unix sockets with a mode that does not depend on this process's umask.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

/// Clients that the kernel lets wait.
const BACKLOG: i32 = 128;

/// Listens at `path`; only this user and root may connect. bind(2) makes the file with the mode that the socket has by
/// then (`unix_bind_bsd`), so the file is never open to other users.
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    SocketAddr::from_pathname(path)?; // of 107 bytes at most: clients need room for the NUL
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if !egm_address::fault!("socket-mode-by-umask") {
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    }
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_socket_is_its_users_alone_while_the_umask_forbids_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // Tests of one process may run beside each other: the umask only gets wider, and only for a moment.
        let before = rustix::process::umask(Mode::empty());
        let listener = bind_private(&path);
        rustix::process::umask(before);
        drop(listener.unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
