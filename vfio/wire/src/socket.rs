//! The one input and output: a Unix stream socket that carries messages and descriptors.
//!
//! - A message is read in two steps, its head and then its body, so that no read goes beyond its end: descriptors come
//!   with the first byte of the bytes that they were sent with, and so with the right message. The first step may take as
//!   much as the shortest message that can have descriptors. Should it reach into the next message, descriptors that come
//!   are that one's: the kernel ends a read behind bytes with descriptors.
//! - Whoever sends half a message and stalls is given up after a time. A server waits for the first byte of a request for
//!   as long as it takes.
//! - Whoever sends descriptors that were cut off (too many, or more than this process may hold) is not heard further.

mod patience;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

pub use self::patience::Patience;
use crate::frame::{Frame, HEADER, Header, Malformed};

/// Most descriptors in one message: the kernel's own limit (SCM_MAX_FD).
pub const MOST_FDS: usize = 253;

/// Most bytes that are read in the first step.
const AHEAD: usize = 64;

/// How a socket fails, or its peer.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The peer closed it between two messages.
    #[error("the peer closed the connection")]
    End,
    /// The peer closed it in the middle of one.
    #[error("the peer closed the connection in the middle of a message")]
    Cut,
    /// The peer took too long.
    #[error("the peer did not {what} within {} ms", limit.as_millis())]
    Slow {
        /// What it did not do.
        what: &'static str,
        /// How long it had.
        limit: Duration,
    },
    /// An envelope that leads nowhere.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Too many descriptors, or more than this process may hold (`ulimit -n`).
    #[error(
        "file descriptors of a message were cut off: more than {MOST_FDS} came, or this process has no room for them (ulimit -n)"
    )]
    Descriptors,
    /// The kernel's word.
    #[error("the socket failed")]
    Socket(#[from] io::Error),
}

impl From<Errno> for Broken {
    fn from(errno: Errno) -> Self {
        Self::Socket(errno.into())
    }
}

/// A connected socket. Descriptors of a message belong to it until they are taken or the next one comes.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    limit: Duration,
    /// Whether the limit is for the first byte of a message too.
    answers: bool,
    patience: Patience,
    header: Header,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// What was read of the next message with the last one.
    next: (Vec<u8>, Vec<OwnedFd>),
}

/// Ends a connection from another thread: whoever waits on it is woken with [`Broken::End`].
#[derive(Debug)]
pub struct Closer(OwnedFd);

impl Closer {
    /// Ends it.
    pub fn close(&self) {
        // The other side may have been quicker.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Over `socket`, a Unix stream socket. `limit` is how long the rest of a message may take, either way.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(socket: OwnedFd, limit: Duration, patience: Patience) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
        let header = Header { id: 0, command: 0, kind: crate::frame::Kind::Command { no_reply: true } };
        Ok(Self {
            socket,
            limit,
            answers: false,
            patience,
            header,
            body: Vec::new(),
            fds: Vec::new(),
            next: Default::default(),
        })
    }

    /// To the server at `path`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(path: &Path, limit: Duration, patience: Patience) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A server that does not accept makes connect wait, for as long as sending may.
        set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::new(socket, limit, patience)
    }

    /// A handle to end it with.
    ///
    /// # Errors
    /// The kernel's.
    pub fn closer(&self) -> io::Result<Closer> {
        self.socket.try_clone().map(Closer)
    }

    /// Whether to give up a wait for the first byte of a message after `limit` too, and not only for what follows it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn limit_waits(&mut self, limited: bool) -> io::Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, limited.then_some(self.limit))?;
        self.answers = limited;
        Ok(())
    }

    /// How long the peer has.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The last message that came.
    #[must_use]
    pub fn frame(&self) -> Frame<'_> {
        Frame { header: self.header, body: &self.body }
    }

    /// How many descriptors came with it.
    #[must_use]
    pub fn fds(&self) -> usize {
        self.fds.len()
    }

    /// The descriptors that came with it.
    #[must_use]
    pub fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Sends a message whose body is `parts`, one after the other, of `most` bytes with its header.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn send(
        &self,
        header: Header,
        parts: [&[u8]; 2],
        fds: &[BorrowedFd<'_>],
        most: u32,
    ) -> Result<(), Broken> {
        let [first, second] = parts;
        let head = header.encode(first.len().saturating_add(second.len()), most)?;
        let mut slices = [IoSlice::new(&head), IoSlice::new(first), IoSlice::new(second)];
        let mut left = &mut slices[..];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Broken::Descriptors);
        }
        let mut begun = None;
        while !left.is_empty() {
            match rustix::net::sendmsg(&self.socket, left, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    IoSlice::advance_slices(&mut left, sent);
                    // They go with the first byte, once.
                    control.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(self.slow("take a message")),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Broken::End),
                Err(errno) => return Err(errno.into()),
            }
            if !left.is_empty() && begun.get_or_insert_with(Instant::now).elapsed() >= self.limit {
                return Err(self.slow("take a message"));
            }
        }
        Ok(())
    }

    /// Waits for a message of `most` bytes at most, header included; it is then [`Connection::frame`]. One of `expected`
    /// bytes is read at once: no more than the shortest that may have descriptors.
    ///
    /// # Errors
    /// [`Broken`]: there is no further message.
    pub fn receive(&mut self, most: u32, expected: usize) -> Result<(), Broken> {
        let mut buffer = [0; AHEAD];
        let (carried, fds) = std::mem::take(&mut self.next);
        self.fds = fds;
        let mut got = carried.len();
        for (into, byte) in buffer.iter_mut().zip(carried) {
            *into = byte;
        }
        if got == 0 {
            let end = expected.clamp(HEADER as usize, AHEAD);
            got = match self.first(buffer.get_mut(..end).unwrap_or_default())? {
                0 => return Err(Broken::End),
                got => got,
            };
        }
        if let Some(rest) = buffer.get_mut(got..HEADER as usize) {
            rest_of(&self.socket, &mut self.fds, rest, self.limit)?;
            got = HEADER as usize;
        }
        let (head, after) = buffer.split_first_chunk().ok_or(Broken::Cut)?;
        let (header, length) = Header::decode(head, most)?;
        let after = after.get(..got.saturating_sub(HEADER as usize)).unwrap_or_default();
        let (ours, next) = after.split_at_checked(length).unwrap_or((after, &[]));
        if !next.is_empty() {
            self.next = (next.to_vec(), std::mem::take(&mut self.fds));
        }
        self.header = header;
        // Nothing stays allocated for a peer because it once sent a lot.
        self.body.shrink_to(1 << 16);
        self.body.clear();
        self.body.extend_from_slice(ours);
        self.body.resize(length, 0);
        let rest = self.body.get_mut(ours.len()..).unwrap_or_default();
        rest_of(&self.socket, &mut self.fds, rest, self.limit)
    }

    /// Whatever comes first, as much as `into` takes; 0 at the end.
    fn first(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let begun = Instant::now();
        if self.patience.looks() {
            while begun.elapsed() < self.patience.longest() {
                if let Some(got) = read(&self.socket, &mut self.fds, into, RecvFlags::DONTWAIT)? {
                    self.patience.looked(true);
                    return Ok(got);
                }
                std::hint::spin_loop();
            }
            self.patience.looked(false);
        }
        loop {
            if let Some(got) = read(&self.socket, &mut self.fds, into, RecvFlags::empty())? {
                self.patience.slept(begun.elapsed());
                return Ok(got);
            }
            // The time is over, or a signal came: then the kernel counts anew, once.
            if self.answers && begun.elapsed() >= self.limit {
                return Err(self.slow("answer"));
            }
        }
    }

    fn slow(&self, what: &'static str) -> Broken {
        Broken::Slow { what, limit: self.limit }
    }
}

/// Fills `into`, which is on its way, within `limit`.
fn rest_of(
    socket: &OwnedFd,
    fds: &mut Vec<OwnedFd>,
    mut into: &mut [u8],
    limit: Duration,
) -> Result<(), Broken> {
    let mut begun = None;
    while !into.is_empty() {
        match read(socket, fds, into, RecvFlags::DONTWAIT)? {
            Some(0) => return Err(Broken::Cut),
            Some(got) => into = into.get_mut(got..).unwrap_or_default(),
            None => {
                let passed = begun.get_or_insert_with(Instant::now).elapsed();
                let left = limit.checked_sub(passed).filter(|left| !left.is_zero());
                let left = left.ok_or(Broken::Slow { what: "send the rest of a message", limit })?;
                let left =
                    Timespec::try_from(left).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
                match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left)) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
    }
    Ok(())
}

/// Some bytes, 0 at the end of the connection, or `None` when there are none now. Descriptors that come with them are
/// kept, [`MOST_FDS`] in all.
fn read(
    socket: &OwnedFd,
    fds: &mut Vec<OwnedFd>,
    into: &mut [u8],
    flags: RecvFlags,
) -> Result<Option<usize>, Broken> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(Errno::CONNRESET) => return Ok(Some(0)),
        Err(errno) => return Err(errno.into()),
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MOST_FDS {
        return Err(Broken::Descriptors);
    }
    Ok(Some(got.bytes))
}

#[cfg(test)]
mod tests;
