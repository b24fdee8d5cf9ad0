//! A listening Unix socket. It replaces a stale socket at its path, and removes its own file at the end.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use egm_device::unix_socket::bind_private;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmm_sys_util::eventfd::EventFd;

use crate::eventfd;
use crate::kept::KeptPart;

/// A listening socket. Its file is removed when this is dropped, unless another is at its path by then.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode number of the file that was made; `None` when another program made it.
    made: Option<[u64; 2]>,
    /// Closed for a moment, when no descriptor is left, to accept a client and to close its connection.
    spare: Option<EventFd>,
}

impl Listener {
    /// Listens at `path`, for this user alone whatever the umask is. A socket left there by a process that ended is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when a process listens there, `AlreadyExists` for a file of another kind, and those of bind(2).
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let listener = Self::bind_for_descriptors(path)?;
        // Where the kernel cannot, a client's own descriptors can hold up the event loop: see docs/limits.md.
        egm_device::broker::refuse_descriptors(listener.as_fd());
        Ok(listener)
    }

    /// The same for clients that pass descriptors.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub(crate) fn bind_for_descriptors(path: &Path) -> io::Result<Self> {
        let socket = match bind_private(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                bind_private(path)?
            }
            other => other?,
        };
        let made = Some(identity(path)?);
        Self::of(socket, path.to_owned(), made)
    }

    /// The listening socket `socket` of another program, which keeps the file.
    ///
    /// # Errors
    /// `InvalidInput` when it is no listening Unix stream socket with a path, and those of fcntl(2).
    pub(crate) fn inherited(socket: OwnedFd) -> io::Result<Self> {
        let is_listening = socket_domain(&socket)? == AddressFamily::UNIX
            && socket_type(&socket)? == SocketType::STREAM
            && socket_acceptconn(&socket)?;
        let socket = UnixListener::from(socket);
        let path = if is_listening { socket.local_addr()?.as_pathname().map(Path::to_owned) } else { None };
        Self::of(socket, path.ok_or(io::ErrorKind::InvalidInput)?, None)
    }

    /// The listener `socket` that an earlier execution made at `path`; `made` is what its [`made`](Self::made) returned.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub(crate) fn adopted(socket: OwnedFd, path: &Path, made: Option<[u64; 2]>) -> io::Result<Self> {
        Self::of(socket.into(), path.to_owned(), made)
    }

    /// The listener at `path` of the execution before this one, as [`keep`](Self::keep) returned it.
    ///
    /// # Errors
    /// `kept` has no socket, and those of fcntl(2).
    pub(crate) fn kept(path: &Path, kept: &KeptPart) -> io::Result<Self> {
        Self::adopted(kept.first()?.into(), path, kept.made())
    }

    /// The parts that another execution needs.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn keep(&self) -> io::Result<KeptPart> {
        Ok(KeptPart::of([self.as_fd()])?.with_made(self.made))
    }

    fn of(socket: UnixListener, path: PathBuf, made: Option<[u64; 2]>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path, made, spare: spare() })
    }

    /// Device and inode number of its file; `None` when another program made it.
    pub(crate) const fn made(&self) -> Option<[u64; 2]> {
        self.made
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The next client; `None` when it was refused, because this process or the host has no descriptor left for it:
    /// it would wait without an answer, and the event loop would spin on this socket.
    ///
    /// # Errors
    /// Those of accept(2); `WouldBlock` when there is no client.
    pub(crate) fn accept(&mut self) -> io::Result<Option<UnixStream>> {
        match self.socket.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                Ok(Some(stream))
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                self.spare = None;
                let sent_away = self.socket.accept().map(|_| None);
                self.spare = spare();
                sent_away
            }
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Whether listeners leave their files: what is dropped may be given back to the program that made them.
static LEAVES_FILES: AtomicBool = AtomicBool::new(false);

/// Has listeners that are dropped leave their files, or remove them again.
pub(crate) fn leave_files(leave: bool) {
    LEAVES_FILES.store(leave, Ordering::Release);
}

/// While the socket is open, no other file gets its inode number.
impl Drop for Listener {
    fn drop(&mut self) {
        if LEAVES_FILES.load(Ordering::Acquire) {
            return;
        }
        if identity(&self.path).is_ok_and(|found| Some(found) == self.made) {
            let _ = std::fs::remove_file(&self.path); // another process removed it: fine
        }
    }
}

fn spare() -> Option<EventFd> {
    eventfd::new().ok()
}

fn identity(path: &Path) -> io::Result<[u64; 2]> {
    std::fs::symlink_metadata(path).map(|file| [file.dev(), file.ino()])
}

/// Removes the socket at `path` if the process that listened there has ended.
///
/// # Errors
/// `AddrInUse` when a process listens there, `AlreadyExists` for a file of another kind, and those of unlink(2).
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    remove_stale_in(&rustix::fs::open(folder, flags, Mode::empty())?, name)
}

/// [`remove_stale`] for the file `name` in `folder`: a descriptor, because the folder's user can put a link at its path.
fn remove_stale_in(folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&socket)?;
    // A file of another kind refuses connections too, and is not ours to remove.
    if !FileType::from_raw_mode(found.st_mode).is_socket() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // A full backlog means that a process listens as well.
    let same = PathBuf::from(format!("/proc/self/fd/{}", socket.as_raw_fd()));
    if !matches!(connect(&same), Err(e) if e.kind() == io::ErrorKind::ConnectionRefused) {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    let now = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino) {
        return Err(io::ErrorKind::AddrInUse.into()); // another process was faster
    }
    Ok(rustix::fs::unlinkat(folder, name, AtFlags::empty())?)
}

/// Connects to the Unix socket at `path` at once, or with a full backlog fails with EAGAIN instead of waiting.
///
/// # Errors
/// Those of socket(2) and connect(2).
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket: OwnedFd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_becomes_a_link_meanwhile_loses_nothing_elsewhere() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        for name in ["own", "other"] {
            std::fs::create_dir(at(name)).unwrap();
            drop(UnixListener::bind(at(name).join("s")).unwrap());
        }
        let folder = rustix::fs::open(at("own"), OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        std::fs::rename(at("own"), at("moved")).unwrap();
        std::os::unix::fs::symlink(at("other"), at("own")).unwrap();
        remove_stale_in(&folder, OsStr::new("s")).unwrap();
        assert!(at("other").join("s").exists() && !at("moved").join("s").exists());
        std::os::unix::fs::symlink(at("other").join("s"), at("moved").join("s")).unwrap();
        let error = remove_stale_in(&folder, OsStr::new("s")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "a link is no socket");
    }

    #[test]
    fn a_socket_left_behind_is_replaced_but_one_in_use_or_another_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(Listener::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(Listener::bind(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_socket_is_its_user_s_alone_whatever_the_umask() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // Tests of one process may run beside each other: the umask only gets wider, and only for a moment.
        let before = rustix::process::umask(Mode::empty());
        let listener = Listener::bind(&path);
        rustix::process::umask(before);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        drop(listener.unwrap());
    }

    #[test]
    fn a_socket_of_another_program_keeps_its_file_and_another_descriptor_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let mut listener = Listener::inherited(UnixListener::bind(&path).unwrap().into()).unwrap();
        assert_eq!((listener.path(), listener.made()), (path.as_path(), None));
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        assert!(path.exists());
        let (stream, _other) = UnixStream::pair().unwrap();
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for other in [OwnedFd::from(stream), address.into(), file.into()] {
            assert!(Listener::inherited(other).is_err());
        }
    }

    #[test]
    fn what_took_the_place_of_our_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let ours = Listener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let theirs = Listener::bind(&path).unwrap();
        drop(ours);
        assert!(connect(&path).is_ok());
        drop(theirs);
        assert!(!path.exists());
    }
}
