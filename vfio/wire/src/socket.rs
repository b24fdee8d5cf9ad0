//! The one input and output: a Unix stream socket that carries messages and descriptors.
//!
//! - A message is read in two steps, its head and then its body, so that no read goes beyond its end: descriptors come
//!   with the first byte of the bytes that they were sent with, and so with the right message.
//! - Whoever sends half a message and stalls is given up after a time. A server waits for the first byte of a request for
//!   as long as it takes.
//! - Whoever sends descriptors that were cut off (too many, or more than this process may hold) is not heard further.

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

use crate::frame::{Frame, HEADER, Header, Malformed};

/// Most descriptors in one message: the kernel's own limit (SCM_MAX_FD).
pub const MOST_FDS: usize = 253;

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

/// How long to look for a message before going to sleep for it.
///
/// To sleep and be woken costs tens of microseconds, so whoever expects an answer at once looks again and again for a
/// short while. That while adapts: it is as long as the last waits show that it pays, and nothing at all on a quiet
/// connection.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    most: Duration,
    now: Duration,
}

impl Patience {
    /// Sleeps at once.
    pub const NONE: Self = Self { most: Duration::ZERO, now: Duration::ZERO };

    /// Looks for `most` at longest. 200 µs is longer than any answer takes that comes from a peer who is awake.
    #[must_use]
    pub fn of(most: Duration) -> Self {
        Self { most, now: most }
    }

    /// Learns from a message that took `waited` to come.
    fn learn(&mut self, waited: Duration) {
        // Below this a look is not worth the call.
        const LEAST: Duration = Duration::from_micros(4);
        if waited <= self.most {
            self.now = self.most;
        } else {
            self.now = self.now.checked_div(2).filter(|now| *now >= LEAST).unwrap_or_default();
        }
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
        Ok(Self { socket, limit, answers: false, patience, header, body: Vec::new(), fds: Vec::new() })
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

    /// Gives up a wait for the first byte of a message after `limit` too, and not only for what follows it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn limit_waits(&mut self) -> io::Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(self.limit))?;
        self.answers = true;
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
        let begun = Instant::now();
        IoSlice::advance_slices(&mut left, 0);
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
            if !left.is_empty() && begun.elapsed() >= self.limit {
                return Err(self.slow("take a message"));
            }
        }
        Ok(())
    }

    /// Waits for a message of `most` bytes at most, header included; it is then [`Connection::frame`].
    ///
    /// # Errors
    /// [`Broken`]: there is no further message.
    pub fn receive(&mut self, most: u32) -> Result<(), Broken> {
        self.fds.clear();
        let mut head = [0; HEADER as usize];
        let got = match self.first(&mut head)? {
            0 => return Err(Broken::End),
            got => got,
        };
        let begun = Instant::now();
        if let Some(rest) = head.get_mut(got..) {
            rest_of(&self.socket, &mut self.fds, rest, begun, self.limit)?;
        }
        let (header, length) = Header::decode(&head, most)?;
        self.header = header;
        // Nothing stays allocated for a peer because it once sent a lot.
        self.body.shrink_to(1 << 16);
        self.body.resize(length, 0);
        rest_of(&self.socket, &mut self.fds, &mut self.body, begun, self.limit)
    }

    /// Whatever comes first, a header's bytes at most; 0 at the end.
    fn first(&mut self, head: &mut [u8]) -> Result<usize, Broken> {
        let begun = Instant::now();
        while begun.elapsed() < self.patience.now {
            if let Some(got) = read(&self.socket, &mut self.fds, head, RecvFlags::DONTWAIT)? {
                self.patience.learn(begun.elapsed());
                return Ok(got);
            }
            std::hint::spin_loop();
        }
        loop {
            if let Some(got) = read(&self.socket, &mut self.fds, head, RecvFlags::empty())? {
                self.patience.learn(begun.elapsed());
                return Ok(got);
            }
            // A signal came, or the time is over.
            if self.answers && begun.elapsed() >= self.limit {
                return Err(self.slow("answer"));
            }
        }
    }

    fn slow(&self, what: &'static str) -> Broken {
        Broken::Slow { what, limit: self.limit }
    }
}

/// Fills `into`, by `limit` after `begun`.
fn rest_of(
    socket: &OwnedFd,
    fds: &mut Vec<OwnedFd>,
    mut into: &mut [u8],
    begun: Instant,
    limit: Duration,
) -> Result<(), Broken> {
    while !into.is_empty() {
        match read(socket, fds, into, RecvFlags::DONTWAIT)? {
            Some(0) => return Err(Broken::Cut),
            Some(got) => into = into.get_mut(got..).unwrap_or_default(),
            None => {
                let left = limit.checked_sub(begun.elapsed()).filter(|left| !left.is_zero());
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
