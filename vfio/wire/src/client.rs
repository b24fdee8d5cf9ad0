//! A driver's calls, each of which waits for its answer.
//!
//! A server that refuses is an error of that call. One that breaks the protocol, takes longer than it was given, or goes
//! away ends the connection: that call and every later one fail at once. No call takes longer than twice the limit.

use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use crate::message::{
    ANNOUNCED_FDS, Access, Capabilities, Command, DeviceInfo, DmaMap, DmaUnmap, IrqData, IrqInfo, Limits,
    Query, RegionInfo, RegionReply, Request, SetIrqs, Write, Wrong,
};
use crate::receiver::FileKind;
use crate::session::Fault;
use crate::session::client::{Client as Session, Received, Unsendable};
use crate::socket::{Broken, Connection};

/// `EOPNOTSUPP`: a server that asks for memory it was given no descriptor for.
const EOPNOTSUPP: u32 = 95;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum CallError {
    /// The server refuses. The connection stays open.
    #[error("the server refuses {command:?}")]
    Refused {
        /// Command of the call.
        command: Command,
        #[source]
        source: io::Error,
    },
    /// It exceeds the server's limits. The connection stays open.
    #[error("{command:?} cannot be sent")]
    Unsendable {
        /// Command of the call.
        command: Command,
        /// The limit that it exceeds.
        #[source]
        source: Unsendable,
    },
    /// The server's answer is invalid. The connection is closed.
    #[error("the server's answer to {command:?} makes no sense")]
    Wrong {
        /// Command of the call.
        command: Command,
        /// The rule that the answer breaks.
        #[source]
        source: Wrong,
    },
    /// A region's file is none that is safe to map. The connection is closed.
    #[error(
        "the file of region {region} is neither memory (memfd, tmpfs, hugetlbfs) nor a device of memory (egm, dax, mem)"
    )]
    UnsafeFile { region: u32 },
    /// The server broke the protocol. The connection is closed.
    #[error("the server broke the protocol")]
    Fault(#[from] Fault),
    /// The server went away, or was given up.
    #[error("the server is lost")]
    Lost(#[from] Broken),
    /// It was lost in an earlier call.
    #[error("the server was lost before: {why}")]
    Gone {
        /// That call's error, in one line.
        why: String,
    },
}

impl CallError {
    /// Whether the connection is still open.
    #[must_use]
    pub fn stands(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Unsendable { .. })
    }

    /// The error and its causes in one line.
    #[must_use]
    pub fn in_one_line(&self) -> String {
        let causes = std::iter::successors(self.source(), |cause| (*cause).source());
        causes.fold(self.to_string(), |all, cause| format!("{all}: {cause}"))
    }
}

/// A connection to a server, after the handshake.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    session: Session,
    limits: Limits,
    out: Vec<u8>,
    /// The error that ended the connection, in one line.
    lost: Option<String>,
}

/// Capabilities that this client announces.
#[must_use]
pub fn capabilities() -> Capabilities {
    Capabilities {
        max_msg_fds: Some(ANNOUNCED_FDS),
        max_data_xfer_size: Some(1 << 20),
        write_multiple: Some(true),
        ..Capabilities::default()
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl Client {
    /// Makes the handshake with the server at the other end of `connection`.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn new(mut connection: Connection) -> Result<Self, CallError> {
        connection.limit_waits(true).map_err(Broken::from)?;
        let mut session = Session::new(capabilities());
        let (header, body) = session.negotiate();
        connection.send(header, [&body, &[]], &[], session.most())?;
        connection.receive(session.most())?;
        match session.take(connection.frame(), connection.fds())? {
            Received::Negotiated(version) => {
                let limits = version.capabilities.limits().map_err(Fault::Handshake)?;
                Ok(Self { connection, session, limits, out: Vec::new(), lost: None })
            }
            _ => Err(CallError::Fault(Fault::NotNegotiated { command: connection.frame().header.command })),
        }
    }

    /// Limits of the server.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Number of regions and interrupts.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn device_info(&mut self) -> Result<DeviceInfo, CallError> {
        self.call(&Request::DeviceInfo(DeviceInfo::SIZE), &[], DeviceInfo::decode)
    }

    /// A region and the file to map it from.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn region_info(&mut self, index: u32) -> Result<(RegionInfo, Option<OwnedFd>), CallError> {
        let mut room = RegionInfo::SIZE;
        // The second request has the room that the server asked for; a server that then needs more gets an error.
        for _ in 0..2 {
            let request = Request::RegionInfo(Query { room, index });
            let reply = self.call(&request, &[], |body| match RegionInfo::decode(body, room)? {
                RegionReply::Whole(info) if info.index != index => Err(unequal(info.index.into())),
                reply => Ok(reply),
            })?;
            match reply {
                RegionReply::Whole(info) => return self.file(index).map(|file| (info, file)),
                RegionReply::NeedsRoom(need) => room = need,
            }
        }
        let rule = "it grew between two questions";
        let source =
            Wrong::Value { what: "room that a region's description needs", value: room.into(), rule };
        Err(self.lose(CallError::Wrong { command: Command::RegionInfo, source }))
    }

    /// The file that came with the description of `region`.
    fn file(&mut self, region: u32) -> Result<Option<OwnedFd>, CallError> {
        let came = self.connection.fds();
        match self.connection.take_fds(FileKind::Mapping) {
            Ok(files) if files.len() == came => Ok(files.into_iter().next()),
            Ok(_) => Err(self.lose(CallError::UnsafeFile { region })),
            Err(error) => Err(self.lose(error.into())),
        }
    }

    /// Call this after the device is described: descriptors that the server sends from now on end the connection.
    pub fn refuse_fds(&mut self) {
        self.connection.refuse_fds();
    }

    /// A kind of interrupt.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn irq_info(&mut self, index: u32) -> Result<IrqInfo, CallError> {
        let request = Request::IrqInfo(Query { room: IrqInfo::SIZE, index });
        self.call(&request, &[], |body| {
            let info = IrqInfo::decode(body)?;
            if info.index == index { Ok(info) } else { Err(unequal(info.index.into())) }
        })
    }

    /// Reads `data.len()` bytes of a region, in parts where the server takes no more at a time.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn read(&mut self, region: u32, mut offset: u64, data: &mut [u8]) -> Result<(), CallError> {
        for part in data.chunks_mut(self.part()) {
            let count = u32::try_from(part.len()).unwrap_or(u32::MAX);
            let access = Access { offset, region, count };
            self.call(&Request::RegionRead(access), &[], |body| {
                let (answered, bytes) = Access::split(body)?;
                let bytes = bytes.get(..part.len()).filter(|_| answered == access);
                part.copy_from_slice(bytes.ok_or_else(|| unequal(answered.count.into()))?);
                Ok(())
            })?;
            offset = offset.saturating_add(count.into());
        }
        Ok(())
    }

    /// Writes to a region, in parts where the server takes no more at a time.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn write(&mut self, region: u32, mut offset: u64, data: &[u8]) -> Result<(), CallError> {
        for part in data.chunks(self.part()) {
            let count = u32::try_from(part.len()).unwrap_or(u32::MAX);
            let access = Access { offset, region, count };
            let request = Request::RegionWrite(Write { access, data: part });
            self.call(&request, &[], |body| {
                let answered = Access::decode(body)?;
                if answered == access { Ok(()) } else { Err(unequal(answered.count.into())) }
            })?;
            offset = offset.saturating_add(count.into());
        }
        Ok(())
    }

    /// Shares memory with the device. Without a file the server may know of the window, but cannot reach its bytes.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn dma_map(&mut self, map: DmaMap, file: Option<BorrowedFd<'_>>) -> Result<(), CallError> {
        self.call(&Request::DmaMap(map), file.as_slice(), |_| Ok(()))
    }

    /// Revokes memory; the server no longer uses it when this returns.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), CallError> {
        // Some servers answer with the window, some with nothing: both mean that it is done.
        self.call(&Request::DmaUnmap(unmap), &[], |_| Ok(()))
    }

    /// Sets up, masks or triggers interrupts, with as many eventfds as the set names, or none. More than the server
    /// takes at a time go in parts.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: &[BorrowedFd<'_>]) -> Result<(), CallError> {
        if set.data != IrqData::Eventfd || eventfds.is_empty() {
            return self.call(&Request::SetIrqs(set), &[], |_| Ok(()));
        }
        let mut start = set.start;
        for part in eventfds.chunks(self.limits.fds.max(1)) {
            let count = u32::try_from(part.len()).unwrap_or(u32::MAX);
            self.call(&Request::SetIrqs(SetIrqs { start, count, ..set }), part, |_| Ok(()))?;
            start = start.saturating_add(count);
        }
        Ok(())
    }

    /// Resets the device.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn reset(&mut self) -> Result<(), CallError> {
        self.call(&Request::Reset, &[], |_| Ok(()))
    }

    /// Most bytes of one transfer.
    fn part(&self) -> usize {
        usize::try_from(self.limits.data.min(1 << 20)).unwrap_or(8)
    }

    /// Sends `request` and parses the body of its answer with `read`.
    fn call<T>(
        &mut self,
        request: &Request<'_>,
        fds: &[BorrowedFd<'_>],
        read: impl FnOnce(&[u8]) -> Result<T, Wrong>,
    ) -> Result<T, CallError> {
        let command = request.command();
        if let Some(why) = &self.lost {
            return Err(CallError::Gone { why: why.clone() });
        }
        let header = self.session.ask(request, fds.len(), false);
        let header = header.map_err(|source| CallError::Unsendable { command, source })?;
        self.out.clear();
        request.encode(&mut self.out);
        let sent = self.connection.send(header, [&self.out, request.data()], fds, u32::MAX);
        let outcome = sent.map_err(CallError::from).and_then(|()| self.answer(header.id, command, read));
        outcome.map_err(|error| if error.stands() { error } else { self.lose(error) })
    }

    fn answer<T>(
        &mut self,
        asked: u16,
        command: Command,
        read: impl FnOnce(&[u8]) -> Result<T, Wrong>,
    ) -> Result<T, CallError> {
        let mut begun = None;
        loop {
            self.connection.receive(self.session.most())?;
            let fds = self.connection.fds();
            let refusal = match self.session.take(self.connection.frame(), fds)? {
                Received::Answer { id, outcome: Ok(body) } if id == asked => {
                    return read(body).map_err(|source| CallError::Wrong { command, source });
                }
                Received::Answer { id, outcome: Err(errno) } if id == asked => {
                    return Err(CallError::Refused { command, source: reason(errno) });
                }
                Received::Answer { .. } | Received::Negotiated(_) => None,
                Received::Asked(ticket, _) => ticket.refused(EOPNOTSUPP),
                Received::Refuse(header) => header,
            };
            if let Some(header) = refusal {
                self.connection.send(header, [&[], &[]], &[], u32::MAX)?;
            }
            let limit = self.connection.limit();
            if begun.get_or_insert_with(Instant::now).elapsed() >= limit {
                return Err(Broken::Slow { what: "answer", limit }.into());
            }
        }
    }

    fn lose(&mut self, error: CallError) -> CallError {
        self.lost = Some(error.in_one_line());
        if let Ok(closer) = self.connection.closer() {
            closer.close();
        }
        error
    }
}

fn unequal(value: u64) -> Wrong {
    Wrong::Value { what: "region, interrupt or count of an answer", value, rule: "not what was asked for" }
}

/// A server's errno, which it may leave out, as an error.
fn reason(errno: u32) -> io::Error {
    match i32::try_from(errno) {
        Ok(errno @ 1..) => io::Error::from_raw_os_error(errno),
        _ => io::Error::other("it gives no reason"),
    }
}
