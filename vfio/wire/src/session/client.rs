//! The driver's side.

use super::{EINVAL, Fault, MAJOR, MINOR, Ticket, agree, most};
use crate::frame::{Frame, Header, Kind};
use crate::message::{Call, Capabilities, Command, Limits, Request, Version};

/// Most requests that wait for their replies at a time.
const MOST_WAITING: usize = 256;

/// Message from the server.
#[derive(Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// The handshake is done.
    Negotiated(Version),
    /// The reply to a request.
    Answer {
        /// Id of the request.
        id: u16,
        /// The reply's body, or the server's errno (0 when it gives none).
        outcome: Result<&'a [u8], u32>,
    },
    /// The server requests access to our memory; answer by the ticket.
    Asked(Ticket, Call<'a>),
    /// Send this refusal, or nothing.
    Refuse(Option<Header>),
}

/// Why a request cannot be sent: our own mistake, or a limit of the server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Unsendable {
    /// There is no connection, or not yet.
    #[error("there is no agreement with the server")]
    NotReady,
    /// More than the server takes.
    #[error("{what} of {value:#x} is more than the server's {most:#x}")]
    Limit {
        what: &'static str,
        /// Value in the request.
        value: u64,
        most: u64,
    },
}

/// A connection as the client sees it.
#[derive(Debug)]
pub struct Client {
    ours: Capabilities,
    state: SessionState,
    next: u16,
    waiting: Vec<(u16, Command)>,
    refused: u64,
}

#[derive(Debug)]
enum SessionState {
    Negotiating,
    Ready(Limits),
    Closed,
}

impl Client {
    /// Creates a session; `ours` are the client's capabilities.
    #[must_use]
    pub fn new(ours: Capabilities) -> Self {
        Self { ours, state: SessionState::Negotiating, next: 0, waiting: Vec::new(), refused: 0 }
    }

    /// Bytes of the largest message that may come.
    #[must_use]
    pub fn most(&self) -> u32 {
        most(&self.ours)
    }

    /// Limits of the server; `None` before the handshake and after the end.
    #[must_use]
    pub fn limits(&self) -> Option<Limits> {
        if let SessionState::Ready(limits) = self.state { Some(limits) } else { None }
    }

    /// Number of invalid commands from the server.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Closes the session: no later message is accepted.
    fn close(&mut self) {
        self.state = SessionState::Closed;
        self.waiting.clear();
    }

    /// The first message to send: a version and our capabilities.
    pub fn negotiate(&mut self) -> (Header, Vec<u8>) {
        let version = Version { major: MAJOR, minor: MINOR, capabilities: self.ours.clone() };
        let mut body = Vec::new();
        version.encode(&mut body);
        (self.command(Command::Version, false), body)
    }

    /// The header of `request`, which goes out with `fds` descriptors.
    ///
    /// # Errors
    /// [`Unsendable`].
    pub fn ask(&mut self, request: &Request<'_>, fds: usize, no_reply: bool) -> Result<Header, Unsendable> {
        let SessionState::Ready(limits) = &self.state else { return Err(Unsendable::NotReady) };
        let data = match request {
            Request::RegionRead(access) => access.count.into(),
            Request::WriteMulti(_) if !limits.write_multiple => u64::MAX,
            Request::WriteMulti(writes) => writes.count().saturating_mul(24),
            other => other.data().len() as u64,
        };
        let waiting = (self.waiting.len() as u64).saturating_add(1);
        for (what, value, most) in [
            ("data", data, limits.data.into()),
            ("number of file descriptors", fds as u64, limits.fds as u64),
            ("number of requests at a time", waiting, MOST_WAITING as u64),
        ] {
            if value > most {
                return Err(Unsendable::Limit { what, value, most });
            }
        }
        Ok(self.command(request.command(), no_reply))
    }

    fn command(&mut self, command: Command, no_reply: bool) -> Header {
        // Requests are few, numbers many: the first free one is near.
        while self.waiting.iter().any(|(id, _)| *id == self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        if !no_reply {
            self.waiting.push((id, command));
        }
        Header { id, command: command.number(), kind: Kind::Command { no_reply } }
    }

    /// Handles a message that came with `fds` file descriptors.
    ///
    /// # Errors
    /// [`Fault`]: close the connection.
    pub fn take<'a>(&mut self, frame: Frame<'a>, fds: usize) -> Result<Received<'a>, Fault> {
        let received = match (&self.state, frame.header.kind) {
            (SessionState::Closed, _) => Err(Fault::Closed),
            (_, Kind::Reply { error }) => self.reply(frame, fds, error),
            (SessionState::Negotiating, _) => Err(Fault::NotNegotiated { command: frame.header.command }),
            (SessionState::Ready(_), Kind::Command { no_reply }) => Ok(self.asked(frame, fds, no_reply)),
        };
        if received.is_err() {
            self.close();
        }
        received
    }

    fn reply<'a>(&mut self, frame: Frame<'a>, fds: usize, error: Option<u32>) -> Result<Received<'a>, Fault> {
        let Header { id, command, .. } = frame.header;
        let found = self.waiting.iter().position(|(asked, what)| (*asked, what.number()) == (id, command));
        let (_, asked) = self.waiting.swap_remove(found.ok_or(Fault::Unasked { id, command })?);
        let allowed = match asked {
            Command::RegionInfo => 1,
            Command::RegionIoFds => usize::MAX,
            _ => 0,
        };
        if fds > allowed && !egm_address::fault!("surplus-descriptors-accepted") {
            return Err(Fault::Descriptors { command, fds });
        }
        if asked != Command::Version {
            return Ok(Received::Answer { id, outcome: error.map_or(Ok(frame.body), Err) });
        }
        if let Some(errno) = error {
            return Err(Fault::Refused { errno });
        }
        let version = Version::decode(frame.body).map_err(Fault::Handshake)?;
        self.state = SessionState::Ready(agree(&version, MINOR)?);
        Ok(Received::Negotiated(version))
    }

    fn asked<'a>(&mut self, frame: Frame<'a>, fds: usize, no_reply: bool) -> Received<'a> {
        let ticket = Ticket::new(frame.header, no_reply);
        let most = self.ours.limits().map_or(0, |limits| limits.data);
        let call = Call::decode(frame.header.command, frame.body).ok();
        let call = call.filter(|call| fds == 0 && call.access().count <= most.into());
        match call {
            Some(call) => Received::Asked(ticket, call),
            None => {
                self.refused = self.refused.saturating_add(1);
                Received::Refuse(ticket.refused(EINVAL))
            }
        }
    }
}
