//! Receives messages with file descriptors outside this process.
//!
//! ```text
//!  peer ═══ socket ═╦═ this process: peeks; reads what has no descriptors
//!                   ╚═ attendant: reads what has some ── pair ──► this process: bytes, descriptors of the right kind
//! ```
//! A peer chooses the descriptors that it sends. To close one of a FUSE file waits for the file system's server, in the kernel
//! and beyond SIGKILL; so does every call that needs that server, and the end of a process that still has the descriptor.
//! The kernel installs descriptors before anyone can look at them. So a process of its own receives them, passes on eventfds
//! and memory files, and keeps the rest: if it never ends, it holds nothing but the peer's socket.
//!
//! - A program takes part by [`attend`] at the start of its `main`. Where it does not (tests), a thread is the attendant.
//! - Only calls that never ask a file system's server classify a descriptor: readlink(2) of `/proc/self/fd`, `F_GET_SEALS`,
//!   and statx(2) with `AT_STATX_DONT_SYNC`.
//! - A server accepts no client while [`MOST`] attendants exist; a stuck one counts until it ends. A connection that was
//!   accepted gets its attendants in any case: without one, this process would close what the peer sent.

mod kind;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg,
};

pub use self::kind::FileKind;
use crate::frame::MOST_FDS;

/// Attendants of one process from which on no client is accepted.
pub const MOST: usize = 64;

/// First argument of a process that is an attendant: its socket is descriptor 0, its pair descriptor 1.
const NAME: &str = "egm-descriptors";

/// Most bytes of a message that go through the pair at a time.
const CHUNK: usize = 1 << 15;

/// Bytes of a request to an attendant.
const REQUEST: usize = 8;
/// Bytes before the data of its reply.
const HEAD: usize = 4;

/// Whether this program's `main` calls [`attend`].
static IN_A_PROCESS: AtomicBool = AtomicBool::new(false);
static ALIVE: AtomicUsize = AtomicUsize::new(0);

/// Runs an attendant where this process was started as one; returns `None` in every other process. To be called first in
/// `main`.
#[must_use]
pub fn attend() -> Option<ExitCode> {
    if std::env::args_os().next().is_none_or(|name| name != NAME) {
        IN_A_PROCESS.store(!egm_address::fault!("descriptors-received-here"), Ordering::Relaxed);
        return None;
    }
    let (socket, pair) = (io::stdin(), io::stdout());
    // Its other side is gone or broken: the process ends, and with it what it received.
    let _ = Attendant::new(socket.as_fd()).run(pair.as_fd());
    Some(ExitCode::SUCCESS)
}

/// Whether a server has to leave new clients in the queue of its socket.
#[must_use]
pub fn is_full() -> bool {
    ALIVE.load(Ordering::Relaxed) >= MOST
}

/// Request to an attendant.
enum Request {
    /// Read so many bytes of the peer's and return them.
    Take(usize),
    /// Return the descriptors that came, if all are of this kind, and close the others.
    HandOver(FileKind),
    /// Read and close all that is left in the socket, which was shut down.
    Drain,
}

impl Request {
    fn encode(&self) -> [u8; REQUEST] {
        let (what, number) = match self {
            Self::Take(bytes) => (0, u32::try_from(*bytes).unwrap_or(u32::MAX)),
            Self::HandOver(kind) => (1, *kind as u32),
            Self::Drain => (2, 0),
        };
        let ([a, b, c, d], [e, f, g, h]) = (u32::to_le_bytes(what), u32::to_le_bytes(number));
        [a, b, c, d, e, f, g, h]
    }

    fn decode(bytes: [u8; REQUEST]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let number = u32::from_le_bytes([e, f, g, h]);
        match u32::from_le_bytes([a, b, c, d]) {
            0 => usize::try_from(number).ok().filter(|bytes| *bytes <= CHUNK).map(Self::Take),
            1 => FileKind::try_from(number).ok().map(Self::HandOver),
            2 => Some(Self::Drain),
            _ => None,
        }
    }
}

/// This process's side of an attendant. Its end ends the attendant.
#[derive(Debug)]
pub(crate) struct Receiver {
    pair: OwnedFd,
    /// The attendant, where it is a thread.
    thread: Option<JoinHandle<()>>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.pair, Shutdown::Both);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Receiver {
    /// An attendant for `socket`, which has `limit` for every request.
    pub(crate) fn start(socket: BorrowedFd<'_>, limit: Duration) -> io::Result<Self> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&ours, Timeout::Recv, Some(limit))?;
        set_socket_timeout(&ours, Timeout::Send, Some(limit))?;
        let socket = socket.try_clone_to_owned()?;
        if !IN_A_PROCESS.load(Ordering::Relaxed) {
            let attendant = move || drop(Attendant::new(socket.as_fd()).run(theirs.as_fd()));
            let thread = thread::Builder::new().name(NAME.to_owned()).spawn(attendant)?;
            return Ok(Self { pair: ours, thread: Some(thread) });
        }
        ALIVE.fetch_add(1, Ordering::Relaxed);
        let started = spawn(socket, theirs);
        started.inspect_err(|_| {
            ALIVE.fetch_sub(1, Ordering::Relaxed);
        })?;
        Ok(Self { pair: ours, thread: None })
    }

    /// Fills `into` with the next bytes of the peer's; returns how many descriptors came with them.
    pub(crate) fn take(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut came = 0_usize;
        for part in into.chunks_mut(CHUNK) {
            self.ask(&Request::Take(part.len()))?;
            let mut head = [0; HEAD];
            let mut all = [IoSliceMut::new(&mut head), IoSliceMut::new(part)];
            let got = recvmsg(&self.pair, &mut all, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())?;
            if got.bytes != HEAD.saturating_add(part.len()) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            came = came.saturating_add(usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX));
        }
        Ok(came)
    }

    /// Returns the descriptors that came since the last call; none at all unless each is of `kind`.
    pub(crate) fn hand_over(&self, kind: FileKind) -> io::Result<Vec<OwnedFd>> {
        self.ask(&Request::HandOver(kind))?;
        let mut fds = Vec::new();
        receive(self.pair.as_fd(), &mut [0; HEAD], &mut fds, RecvFlags::empty())?;
        Ok(fds)
    }

    /// Makes the attendant read and close all that is left in the socket, which was shut down; false if it has ended.
    pub(crate) fn drain(&self) -> bool {
        let mut head = [0; HEAD];
        let drained = self
            .ask(&Request::Drain)
            .and_then(|()| receive(self.pair.as_fd(), &mut head, &mut Vec::new(), RecvFlags::empty()));
        drained.map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |got| got > 0)
    }

    fn ask(&self, request: &Request) -> io::Result<()> {
        rustix::net::send(&self.pair, &request.encode(), SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// An attendant as a process, which a thread waits for.
fn spawn(socket: OwnedFd, pair: OwnedFd) -> io::Result<()> {
    let mut child = Command::new("/proc/self/exe")
        .arg0(NAME)
        .stdin(Stdio::from(socket))
        .stdout(Stdio::from(pair))
        .stderr(Stdio::null())
        // A terminal's SIGINT is for this process, which then ends the attendant.
        .process_group(0)
        .spawn()?;
    let reaper = move || {
        let _ = child.wait();
        ALIVE.fetch_sub(1, Ordering::Relaxed);
    };
    thread::Builder::new().name("reaper".to_owned()).spawn(reaper).map(drop)
}

struct Attendant<'a> {
    socket: BorrowedFd<'a>,
    pending: Vec<OwnedFd>,
    /// A thread that closes descriptors, which may take for ever, and the way to it.
    closer: Option<(Sender<OwnedFd>, JoinHandle<()>)>,
}

impl Drop for Attendant<'_> {
    fn drop(&mut self) {
        if let Some((queue, thread)) = self.closer.take() {
            drop(queue);
            let _ = thread.join();
        }
    }
}

impl<'a> Attendant<'a> {
    fn new(socket: BorrowedFd<'a>) -> Self {
        let (queue, descriptors) = channel::<OwnedFd>();
        let close = move || descriptors.into_iter().for_each(drop);
        let thread = thread::Builder::new().name("closer".to_owned()).spawn(close);
        Self { socket, pending: Vec::new(), closer: thread.ok().map(|thread| (queue, thread)) }
    }

    fn run(&mut self, pair: BorrowedFd<'_>) -> io::Result<()> {
        let outcome = self.obey(pair);
        // The close of pending descriptors may never return, and the other side does not wait for it.
        let _ = rustix::net::shutdown(pair, Shutdown::Both);
        outcome
    }

    fn obey(&mut self, pair: BorrowedFd<'_>) -> io::Result<()> {
        let mut request = [0; REQUEST];
        while receive(pair, &mut request, &mut Vec::new(), RecvFlags::empty())? == REQUEST {
            match Request::decode(request).ok_or(io::ErrorKind::InvalidData)? {
                Request::Take(bytes) => self.take(pair, bytes)?,
                Request::HandOver(kind) => self.hand_over(pair, kind)?,
                Request::Drain => {
                    self.drain();
                    reply(pair, 0, &[], &[])?;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, pair: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        let (mut data, mut at, before) = (vec![0; bytes], 0, self.pending.len());
        while let Some(rest) = data.get_mut(at..).filter(|rest| !rest.is_empty()) {
            match receive(self.socket, rest, &mut self.pending, RecvFlags::empty())? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got => at = at.saturating_add(got),
            }
        }
        reply(pair, self.pending.len().saturating_sub(before), &data, &[])
    }

    fn hand_over(&mut self, pair: BorrowedFd<'_>, kind: FileKind) -> io::Result<()> {
        let fds = std::mem::take(&mut self.pending);
        let right = fds.iter().all(|fd| kind.is_of(fd.as_fd())) || egm_address::fault!("any-file-passed-on");
        let descriptors: Vec<_> = fds.iter().filter(|_| right).map(AsFd::as_fd).collect();
        let outcome = reply(pair, descriptors.len(), &[], &descriptors);
        self.close(fds);
        outcome
    }

    fn drain(&mut self) {
        let mut data = [0; 4096];
        loop {
            match receive(self.socket, &mut data, &mut self.pending, RecvFlags::DONTWAIT) {
                Ok(0) => return,
                // A message with cut-off descriptors was read too: `receive` reports it as `Other`.
                Err(error) if error.kind() != io::ErrorKind::Other => return,
                _ => {
                    let fds = std::mem::take(&mut self.pending);
                    self.close(fds);
                }
            }
        }
    }

    fn close(&self, fds: Vec<OwnedFd>) {
        // Without the thread they are closed here.
        if let Some((queue, _)) = &self.closer {
            fds.into_iter().for_each(|fd| drop(queue.send(fd)));
        }
    }
}

fn reply(pair: BorrowedFd<'_>, number: usize, data: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let number = u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let parts = [IoSlice::new(&number), IoSlice::new(data)];
    sendmsg(pair, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next bytes of `socket`, 0 at its end; descriptors are added to `fds`.
fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(rustix::net::ReturnFlags::CTRUNC) || fds.len() > MOST_FDS {
        return Err(io::Error::other("file descriptors were cut off"));
    }
    Ok(got.bytes)
}
