//! The only input and output: a Unix stream socket that carries messages and descriptors.
//!
//! - Every read is preceded by a peek of the same bytes, which shows whether descriptors come with them. Without descriptors
//!   this process reads them, up to the end of one message; with descriptors the [`receiver`](crate::receiver) does, so that
//!   no descriptor of the peer's is ever installed or closed here. Out-of-band bytes are read inline, like all others.
//! - A peer that stalls within a message is dropped after a time limit. A server waits for the first byte of a request
//!   without a limit.
//! - A peer loses its connection if its descriptors were cut off (too many, or more than the receiver may hold).

mod broken;
mod busy_poll;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_oobinline, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

pub use self::broken::Broken;
pub use self::busy_poll::BusyPoll;
use crate::frame::{Frame, HEADER, Header, MOST_FDS};
use crate::receiver::{FileKind, Receiver};

/// Most bytes of the first peek: a read or a write of a register with its data.
const AHEAD: usize = 64;

/// A connected socket. Its drop shuts the connection down, for every descriptor of the socket.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    limit: Duration,
    /// Whether the limit also applies to the first byte of a message.
    answers: bool,
    busy_poll: BusyPoll,
    header: Header,
    body: Vec<u8>,
    /// Number of descriptors that came with the last message; the receiver holds them.
    came: usize,
    /// Bytes of the last message that are still in the socket.
    peeked: usize,
    receiver: Option<Receiver>,
    takes_fds: bool,
}

/// Ends a connection from another thread: a thread that waits on it wakes with [`Broken::End`].
#[derive(Debug)]
pub struct Closer(OwnedFd);

impl Closer {
    /// Shuts the connection down.
    pub fn close(&self) {
        // The other side may have been quicker.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

/// The socket may be readable although no message waits: the last one is in it until the next [`Connection::receive`].
impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Creates a connection over `socket`, a Unix stream socket. `limit` bounds the rest of a message, either way.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(socket: OwnedFd, limit: Duration, busy_poll: BusyPoll) -> io::Result<Self> {
        let header = Header { id: 0, command: 0, kind: crate::frame::Kind::Command { no_reply: true } };
        // A connection from here on: if an option cannot be set, its drop drains what the peer sent already.
        let mut connection = Self {
            socket,
            limit,
            answers: false,
            busy_poll,
            header,
            body: Vec::new(),
            came: 0,
            peeked: 0,
            receiver: None,
            takes_fds: true,
        };
        // Otherwise a peek skips a byte that was sent with MSG_OOB, and the next read frees it in this process, with its
        // descriptors. The option applies to bytes that are queued already.
        set_socket_oobinline(&connection.socket, true)?;
        connection.set_limit(limit)?;
        Ok(connection)
    }

    /// Connects to the server at `path`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(path: &Path, limit: Duration, busy_poll: BusyPoll) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A server that does not accept makes connect wait, for as long as sending may.
        set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::new(socket, limit, busy_poll)
    }

    /// Returns a handle that ends the connection.
    ///
    /// # Errors
    /// The kernel's.
    pub fn closer(&self) -> io::Result<Closer> {
        self.socket.try_clone().map(Closer)
    }

    /// Sets whether `limit` also applies to the wait for the first byte of a message, and not only to what follows it.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn limit_waits(&mut self, limited: bool) -> io::Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, limited.then_some(self.limit))?;
        self.answers = limited;
        Ok(())
    }

    /// Limits the rest of a message to `limit`, in either direction; call [`Connection::limit_waits`] after it.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn set_limit(&mut self, limit: Duration) -> io::Result<()> {
        self.limit = limit;
        set_socket_timeout(&self.socket, Timeout::Send, Some(limit)).map_err(io::Error::from)
    }

    /// Time limit for the peer.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Last received message, until the next [`Connection::receive`].
    #[must_use]
    pub fn frame(&self) -> Frame<'_> {
        Frame { header: self.header, body: &self.body }
    }

    /// Number of descriptors that came with the last message.
    #[must_use]
    pub fn fds(&self) -> usize {
        self.came
    }

    /// Takes the descriptors of the last message, or none if one of them is not of `kind`.
    ///
    /// # Errors
    /// [`Broken`]: there is no further message.
    pub fn take_fds(&mut self, kind: FileKind) -> Result<Vec<OwnedFd>, Broken> {
        if std::mem::take(&mut self.came) == 0 { Ok(Vec::new()) } else { self.handed_over(kind) }
    }

    /// Refuses descriptors from now on: they end the connection.
    pub fn refuse_fds(&mut self) {
        self.takes_fds = false;
        self.receiver = None;
    }

    /// Sends a message with the body `parts`, one after the other, of at most `most` bytes with its header.
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
                    // Descriptors go with the first byte, once.
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

    /// Waits for a message of `most` bytes at most, header included; it is then [`Connection::frame`].
    ///
    /// # Errors
    /// [`Broken`]: there is no further message.
    pub fn receive(&mut self, most: u32) -> Result<(), Broken> {
        if std::mem::take(&mut self.came) > 0 {
            drop(self.handed_over(FileKind::Nothing)?);
        }
        self.consume_last()?;
        let mut ahead = [0; AHEAD];
        let (got, fds) = self.first(&mut ahead)?;
        if let Some((head, after)) = ahead.split_first_chunk().filter(|_| !fds && got >= HEADER as usize) {
            let (header, length) = Header::decode(head, most)?;
            let size = head.len().saturating_add(length);
            if size <= got {
                self.header = header;
                self.body.clear();
                self.body.extend_from_slice(after.get(..length).unwrap_or_default());
                self.peeked = size;
                return Ok(());
            }
        }
        let mut head = [0; HEADER as usize];
        self.fill(&mut head)?;
        let (header, length) = Header::decode(&head, most)?;
        self.rest(header, length)
    }

    /// Reads the body of `length` bytes.
    fn rest(&mut self, header: Header, length: usize) -> Result<(), Broken> {
        self.header = header;
        let mut body = std::mem::take(&mut self.body);
        // A peer that once sent a lot must not keep that memory allocated.
        body.shrink_to(1 << 16);
        body.clear();
        body.resize(length, 0);
        let filled = self.fill(&mut body);
        self.body = body;
        filled
    }

    /// Fills `into`; bytes with descriptors come through the receiver.
    fn fill(&mut self, mut into: &mut [u8]) -> Result<(), Broken> {
        let mut begun = None;
        while !into.is_empty() {
            match peek(&self.socket, into, RecvFlags::DONTWAIT)? {
                Some((0, _)) => return Err(Broken::Cut),
                Some((_, true)) => {
                    let came = self.receiver()?.take(into).map_err(|error| self.lost(error))?;
                    self.came = self.came.saturating_add(came);
                    return Ok(());
                }
                Some((got, false)) => {
                    let (part, rest) = into.split_at_mut_checked(got).ok_or(Broken::Cut)?;
                    self.consume(part)?;
                    into = rest;
                }
                None => self.wait(*begun.get_or_insert_with(Instant::now))?,
            }
        }
        Ok(())
    }

    /// Consumes the last message if it was only peeked: here and not earlier, so that the peer works meanwhile.
    fn consume_last(&mut self) -> Result<(), Broken> {
        let size = std::mem::take(&mut self.peeked);
        self.consume([0; AHEAD].get_mut(..size).unwrap_or_default())
    }

    /// Consumes bytes that were peeked and have no descriptors.
    fn consume(&self, mut into: &mut [u8]) -> Result<(), Broken> {
        while !into.is_empty() {
            match rustix::net::recv(&self.socket, &mut *into, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(Broken::Cut),
                Ok((_, got)) => into = into.get_mut(got..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Waits for the rest of a message, which began at `begun`.
    fn wait(&self, begun: Instant) -> Result<(), Broken> {
        let left = self.limit.checked_sub(begun.elapsed()).filter(|left| !left.is_zero());
        let left = left.ok_or_else(|| self.slow("send the rest of a message"))?;
        let left = Timespec::try_from(left).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn receiver(&mut self) -> Result<&Receiver, Broken> {
        if self.receiver.is_none() {
            if !self.takes_fds {
                return Err(Broken::Unwanted);
            }
            let started = Receiver::start(self.socket.as_fd(), self.limit);
            self.receiver = Some(started.map_err(Broken::Receiver)?);
        }
        self.receiver.as_ref().ok_or(Broken::Unwanted)
    }

    fn handed_over(&mut self, kind: FileKind) -> Result<Vec<OwnedFd>, Broken> {
        let descriptors = self.receiver()?.hand_over(kind);
        descriptors.map_err(|error| self.lost(error))
    }

    /// Error for a receiver without an answer: it waits for bytes, for a descriptor's file system, or it ended.
    fn lost(&self, error: io::Error) -> Broken {
        match error.kind() {
            io::ErrorKind::WouldBlock => self.slow("send the rest of a message with file descriptors"),
            io::ErrorKind::UnexpectedEof => Broken::Descriptors,
            _ => Broken::Receiver(error),
        }
    }

    /// Peeks at the first bytes, as many as fit `into`, and reports whether there are descriptors in the queue.
    fn first(&mut self, into: &mut [u8]) -> Result<(usize, bool), Broken> {
        let begun = Instant::now();
        let some = |(got, fds)| if got == 0 { Err(Broken::End) } else { Ok((got, fds)) };
        if self.busy_poll.is_on() {
            while begun.elapsed() < self.busy_poll.longest() {
                if let Some(peeked) = peek(&self.socket, into, RecvFlags::DONTWAIT)? {
                    self.busy_poll.polled(true);
                    return some(peeked);
                }
                std::hint::spin_loop();
            }
            self.busy_poll.polled(false);
        }
        loop {
            if let Some(peeked) = peek(&self.socket, into, RecvFlags::empty())? {
                self.busy_poll.slept(begun.elapsed());
                return some(peeked);
            }
            // The timeout expired, or a signal came: then the kernel restarts the timeout, once.
            if self.answers && begun.elapsed() >= self.limit {
                return Err(self.slow("answer"));
            }
        }
    }

    fn slow(&self, what: &'static str) -> Broken {
        Broken::Slow { what, limit: self.limit }
    }
}

impl Drop for Connection {
    /// Unread messages may hold descriptors, which would be closed here: a receiver reads them first. An ended receiver
    /// is replaced. A hung receiver keeps the socket open, so that this process does not free its messages.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        self.takes_fds = true;
        let _ = self.consume_last();
        for _ in 0..2 {
            let unread = matches!(peek(&self.socket, &mut [0], RecvFlags::DONTWAIT), Ok(Some((1.., _))));
            if !unread || self.receiver().is_ok_and(Receiver::drain) {
                return;
            }
            self.receiver = None;
        }
    }
}

/// Peeks at the next bytes (0 at the end, `None` when there are none now), and whether descriptors are in the queue.
fn peek(socket: &OwnedFd, into: &mut [u8], flags: RecvFlags) -> Result<Option<(usize, bool)>, Broken> {
    let mut nothing = RecvAncillaryBuffer::default(); // without room the kernel installs none
    match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut nothing, flags | RecvFlags::PEEK) {
        Ok(got) => Ok(Some((got.bytes, got.flags.contains(ReturnFlags::CTRUNC)))),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(Errno::CONNRESET) => Ok(Some((0, false))),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests;
