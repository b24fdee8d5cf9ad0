//! The identity of a peer, as the kernel recorded it at connect time. This is an unsafe module.
//!
//! Callers may rely on this: nothing here comes from the peer's own words, and a descriptor holds the process, so its
//! number cannot come to mean another process.
#![expect(unsafe_code, reason = "four socket options have no safe interface")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::policy::Peer;

/// The most groups that a process has (`NGROUPS_MAX`), in bytes.
const GROUPS: usize = 65536 * 4;

/// The process on the other side of a connection.
#[derive(Debug)]
pub(super) struct PeerIdentity {
    pub(super) peer: Peer,
    /// Number of the process.
    pub(super) pid: u32,
    /// The process; readable once it has ended.
    pub(super) process: OwnedFd,
}

/// Identifies the process that made the connection `socket`.
///
/// # Errors
/// The kernel's; `NotFound` for a process that has ended, or lives where this one cannot see it.
pub(super) fn identify(socket: BorrowedFd<'_>) -> io::Result<PeerIdentity> {
    let [pid, uid, gid] = credentials(socket)?;
    let mut groups = vec![0; GROUPS];
    let length = option(socket, libc::SO_PEERGROUPS, &mut groups)?;
    let gids = [gid].into_iter().chain(words(groups.get(..length).unwrap_or_default())).collect();
    Ok(PeerIdentity { peer: Peer { uid, gids }, pid, process: process(socket, pid)? })
}

/// User id of the process that made the connection `socket`.
///
/// # Errors
/// The kernel's.
pub fn user_of(socket: BorrowedFd<'_>) -> io::Result<u32> {
    credentials(socket).map(|[_, uid, _]| uid)
}

/// Process, user and group of the other end. The process is 0 where this one cannot see it.
fn credentials(socket: BorrowedFd<'_>) -> io::Result<[u32; 3]> {
    let mut credentials = [0; 12]; // struct ucred: pid, uid, gid
    option(socket, libc::SO_PEERCRED, &mut credentials)?;
    let mut numbers = words(&credentials);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(pid), Some(uid), Some(gid)) => Ok([pid, uid, gid]),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The process that made the connection. Kernels before 6.5 report only its number, which another process may have by
/// now. The broker then waits for that process as well, which costs time but never grants memory twice.
fn process(socket: BorrowedFd<'_>, pid: u32) -> io::Result<OwnedFd> {
    let mut number = [0; 4];
    match option(socket, libc::SO_PEERPIDFD, &mut number) {
        Ok(_) => {
            // SAFETY: the kernel has just made this descriptor for this call; nothing else owns it.
            let process = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(number)) };
            rustix::io::fcntl_setfd(process.as_fd(), rustix::io::FdFlags::CLOEXEC)?;
            Ok(process)
        }
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
            Ok(pidfd_open(pid, PidfdFlags::empty())?)
        }
        Err(error) => Err(error),
    }
}

/// Requests that the kernel (6.16 and later) refuse descriptors that peers of the listening `socket` send. Closing one
/// can take as long as its owner likes (a TCP socket with `SO_LINGER`), in the process that receives or drops the
/// message. Returns whether the kernel does it; older kernels cannot.
pub fn refuse_descriptors(socket: BorrowedFd<'_>) -> bool {
    /// `SO_PASSRIGHTS` of `asm-generic/socket.h`, since Linux 6.16.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let no: libc::c_int = 0;
    let length = libc::socklen_t::try_from(size_of_val(&no)).unwrap_or(0);
    // SAFETY: the kernel reads `length` bytes of `no`.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const no).cast(), length)
    };
    result == 0
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word))
}

/// The socket option `name` in `buffer`; returns how many bytes of it the kernel filled.
fn option(socket: BorrowedFd<'_>, name: libc::c_int, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(buffer.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel writes `length` bytes at most, which is what the buffer has, and the new length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            buffer.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    usize::try_from(length).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_descriptor_for_a_listener_that_refuses_them_is_an_error_at_its_sender() {
        use std::io::IoSlice;

        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        if !refuse_descriptors(listener.as_fd()) {
            println!("skipped: this kernel has no SO_PASSRIGHTS (Linux 6.16)");
            return;
        }
        let client = UnixStream::connect(&path).unwrap();
        let send = |client: &UnixStream| {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [listener.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(client, &[IoSlice::new(b"x")], &mut control, SendFlags::empty())
        };
        assert_eq!(send(&client), Err(rustix::io::Errno::PERM));
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(send(&client), Err(rustix::io::Errno::PERM));
        assert_eq!(send(&accepted), Ok(1), "what it sends itself passes");
    }

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let found = identify(a.as_fd()).unwrap();
        assert_eq!(found.pid, std::process::id());
        assert_eq!(found.peer.uid, rustix::process::geteuid().as_raw());
        assert_eq!(user_of(a.as_fd()).unwrap(), found.peer.uid);
        assert_eq!(found.peer.gids[0], rustix::process::getegid().as_raw());
        let own: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
        assert_eq!(found.peer.gids[1..], own);
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(identify(file.as_fd()).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
    }
}
