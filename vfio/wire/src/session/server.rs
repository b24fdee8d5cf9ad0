//! The device's side.

use super::{EINVAL, Fault, MINOR, Ticket, agree, most};
use crate::frame::{Frame, Header, Kind};
use crate::message::{Call, Capabilities, Command, Limits, Request, Version, Wrong};

/// Action of a server on a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Send this reply: header and body.
    Reply(Header, Vec<u8>),
    /// Carry it out and answer by the ticket.
    Serve(Ticket, Request<'a>),
    /// The client's answer to a request of the server: the body, or its errno (0 when it gives none).
    Answer(Result<&'a [u8], u32>),
    /// Nothing: it was refused, and its sender requested no reply.
    Nothing,
}

/// A connection as the server sees it. Requests are answered one after the other, in their order, as the protocol
/// requires, even if several were sent ahead.
#[derive(Debug)]
pub struct Server {
    ours: Capabilities,
    state: SessionState,
    /// Request to the client that has no answer yet: its message's id and command.
    asked: Option<(u16, u16)>,
    next: u16,
    refused: u64,
}

#[derive(Debug)]
enum SessionState {
    Negotiating,
    Ready(Limits),
    Closed,
}

impl Server {
    /// Creates a session; `ours` are the server's capabilities. Its reply omits names that the client does not propose.
    #[must_use]
    pub fn new(ours: Capabilities) -> Self {
        Self { ours, state: SessionState::Negotiating, asked: None, next: 0, refused: 0 }
    }

    /// Bytes of the largest message that may come.
    #[must_use]
    pub fn most(&self) -> u32 {
        most(&self.ours)
    }

    /// Limits of the client; `None` before the handshake and after the end.
    #[must_use]
    pub fn limits(&self) -> Option<Limits> {
        if let SessionState::Ready(limits) = self.state { Some(limits) } else { None }
    }

    /// Number of invalid requests.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Whether the client may be asked for something now: it is asked for one thing at a time.
    #[must_use]
    pub(crate) fn may_ask(&self) -> bool {
        self.asked.is_none() && self.limits().is_some()
    }

    /// The header of a question to the client; `None` when it may not be asked now, or not for so much.
    #[must_use]
    pub fn ask(&mut self, call: &Call<'_>) -> Option<Header> {
        let most = self.limits().filter(|_| self.may_ask())?.data;
        let (id, command) = (self.next, call.command().number());
        (call.access().count <= most.into()).then(|| {
            self.next = self.next.wrapping_add(1);
            self.asked = Some((id, command));
            Header { id, command, kind: Kind::Command { no_reply: false } }
        })
    }

    /// Handles a message that came with `fds` file descriptors.
    ///
    /// # Errors
    /// [`Fault`]: close the connection.
    pub fn take<'a>(&mut self, frame: Frame<'a>, fds: usize) -> Result<Step<'a>, Fault> {
        let step = self.step(frame, fds);
        if step.is_err() {
            self.state = SessionState::Closed;
        }
        step
    }

    fn step<'a>(&mut self, frame: Frame<'a>, fds: usize) -> Result<Step<'a>, Fault> {
        let Header { id, command, kind } = frame.header;
        let no_reply = match kind {
            Kind::Command { no_reply } => no_reply,
            Kind::Reply { error } if self.asked == Some((id, command)) && fds == 0 => {
                self.asked = None;
                return Ok(Step::Answer(error.map_or(Ok(frame.body), Err)));
            }
            Kind::Reply { .. } => return Err(Fault::Unasked { id, command }),
        };
        let request = Request::decode(command, frame.body);
        match &self.state {
            SessionState::Closed => Err(Fault::Closed),
            SessionState::Negotiating if command != Command::Version.number() => {
                Err(Fault::NotNegotiated { command })
            }
            SessionState::Negotiating => match request.map_err(Fault::Handshake)? {
                Request::Version(_) if fds > 0 => Err(Fault::Descriptors { command, fds }),
                Request::Version(version) => self.negotiate(frame.header, &version),
                _ => Err(Fault::NotNegotiated { command }),
            },
            SessionState::Ready(_) => {
                let ticket = Ticket::new(frame.header, no_reply);
                Ok(match request.and_then(|request| self.judge(request, fds)) {
                    Ok(request) => Step::Serve(ticket, request),
                    Err(_) => {
                        self.refused = self.refused.saturating_add(1);
                        ticket.refused(EINVAL).map_or(Step::Nothing, |header| Step::Reply(header, Vec::new()))
                    }
                })
            }
        }
    }

    fn negotiate<'a>(&mut self, header: Header, version: &Version) -> Result<Step<'a>, Fault> {
        let limits = agree(version, u16::MAX)?;
        let theirs = &version.capabilities;
        // A reply names nothing that the request does not, but for the two that every peer knows.
        let capabilities = Capabilities {
            max_dma_maps: self.ours.max_dma_maps.filter(|_| theirs.max_dma_maps.is_some()),
            pgsizes: self.ours.pgsizes.filter(|_| theirs.pgsizes.is_some()),
            write_multiple: self.ours.write_multiple.filter(|_| theirs.write_multiple.is_some()),
            migration: None,
            twin_socket: None,
            ..self.ours
        };
        let reply = Version { major: version.major, minor: version.minor.min(MINOR), capabilities };
        let mut body = Vec::new();
        reply.encode(&mut body);
        self.state = SessionState::Ready(limits);
        // Without a reply there is no agreement: it is sent even if the client requested none.
        Ok(Step::Reply(Header { kind: Kind::Reply { error: None }, ..header }, body))
    }

    /// Checks that a request is valid and stays within the agreed limits.
    fn judge<'a>(&self, request: Request<'a>, fds: usize) -> Result<Request<'a>, Wrong> {
        let command = request.command().number();
        if !request.takes(fds) {
            return Err(Wrong::Descriptors { command, fds });
        }
        let most = self.ours.limits()?.data;
        let count = match &request {
            Request::Version(_) => return Err(Wrong::Command { command }),
            Request::RegionRead(access) => access.count,
            Request::RegionWrite(write) => write.access.count,
            Request::MigrationRead(part) | Request::MigrationWrite(part) => part.size,
            _ => 0,
        };
        if count > most {
            let rule = "more than the agreed max_data_xfer_size";
            return Err(Wrong::Value { what: "count of a transfer", value: count.into(), rule });
        }
        Ok(request)
    }
}
