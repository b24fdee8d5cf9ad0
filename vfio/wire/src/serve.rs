//! Server side of a connection: turns requests from the socket into calls of a [`Device`].
//!
//! This module makes the checks that every device would otherwise repeat: indices, bounds, lengths and the number of
//! descriptors in each message. It refuses an access that leaves its region, as libvfio-user does.

mod signals;
mod vectors;
mod windows;

use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;

pub use self::vectors::Vectors;
pub use self::windows::{WindowBytes, Windows};
use crate::frame::{Header, Kind};
use crate::message::{
    ANNOUNCED_FDS, Access, Call, Capabilities, Command, DeviceInfo, DmaAccess, DmaMap, DmaUnmap, IrqInfo,
    Query, RegionInfo, Request, SetIrqs, Write,
};
use crate::receiver::FileKind;
use crate::session::server::{Server as Session, Step};
use crate::session::{Fault, Ticket};
use crate::socket::{Broken, Connection};

/// Maximum number of a device's regions, and of its kinds of interrupt.
const MOST_INDICES: u32 = 256;

/// Accepted room for the reply to a query for eventfds, in bytes: at least its head, at most one transfer.
const IO_FDS: RangeInclusive<u32> = 16..=1 << 20;

/// A device that a vfio-user client can use.
pub trait Device {
    /// Number of regions and of kinds of interrupt. A PCI function should report 9 and 5, however few it has: clients
    /// query those by number.
    fn info(&self) -> DeviceInfo;

    /// Region `index`, and the file to map it from. Its size must not change while a client is connected. (Give a
    /// mappable region an area, even one that covers all of it: some clients look for nothing else.)
    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>);

    /// Description of interrupt kind `index`.
    fn irq(&self, index: u32) -> IrqInfo;

    /// Fills `data`, which lies in the region.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]);

    /// Takes `data`, which lies in the region.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]);

    /// Whether the device uses the files that clients send with windows. If not, this process does not open, map or
    /// even receive such files.
    fn reaches_memory(&self) -> bool {
        true
    }

    /// Lets the device reach a window, through `file` if there is one: a memfd, or a file of tmpfs or hugetlbfs.
    ///
    /// # Errors
    /// Error for the client: `EEXIST` for a window that overlaps another.
    fn dma_map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno>;

    /// Revokes a range: when this returns, the device no longer reaches it.
    ///
    /// # Errors
    /// Error for the client: `EINVAL` for a range that would split a window.
    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno>;

    /// Sets up, masks or triggers interrupts that exist; with as many eventfds as vectors, or none.
    ///
    /// # Errors
    /// Error for the client.
    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno>;

    /// Resets the device.
    ///
    /// # Errors
    /// Error for the client.
    fn reset(&mut self) -> Result<(), Errno>;

    /// Access that the device requests to client memory for which it has no file. The server polls this after every
    /// message, unless the last request has no answer yet. Meanwhile the client continues with its own requests.
    fn call(&mut self) -> Option<Call<'_>> {
        None
    }

    /// Receives the answer to a `call`: all bytes of a read, nothing for a write, or an error.
    fn answered(&mut self, _answer: Result<&[u8], Errno>) {}

    /// Runs after the client left: the device releases memory and eventfds and keeps its own state.
    fn disconnected(&mut self);
}

/// Why a client left, other than by closing its connection.
#[derive(Debug, thiserror::Error)]
pub enum Served {
    /// The client broke the protocol.
    #[error("the client broke the protocol")]
    Fault(#[from] Fault),
    /// The client stalled, or the socket failed.
    #[error("the client is lost")]
    Broken(#[from] Broken),
}

/// Capabilities that this server announces.
#[must_use]
pub fn capabilities() -> Capabilities {
    Capabilities {
        max_msg_fds: Some(ANNOUNCED_FDS),
        max_data_xfer_size: Some(1 << 20),
        max_dma_maps: Some(windows::MOST_WINDOWS as u64),
        pgsizes: Some(0x1000),
        write_multiple: Some(true),
        ..Capabilities::default()
    }
}

/// Serves `device` until the client closes the connection.
///
/// # Errors
/// [`Served`]: the client left in another way. The device can then serve the next client.
pub fn serve(connection: &mut Connection, device: &mut dyn Device) -> Result<(), Served> {
    let mut server = Server::new(device);
    let outcome = server.run(connection);
    server.device.disconnected();
    match outcome {
        Err(Served::Broken(Broken::End)) => Ok(()),
        other => other,
    }
}

/// Refuses a client: answers its first message with `why`. Waits at most `limit` for that message and for its rest.
pub fn turn_away(mut connection: Connection, why: Errno, limit: Duration) {
    let mut answer = || {
        connection.set_limit(limit)?;
        connection.limit_waits(true)?;
        connection.receive(Session::new(capabilities()).most())?;
        let error = Some(why.raw_os_error().unsigned_abs());
        let header = Header { kind: Kind::Reply { error }, ..connection.frame().header };
        connection.send(header, [&[], &[]], &[], u32::MAX)
    };
    // A client that receives no answer sees the connection end.
    let _: Result<(), Broken> = answer();
}

struct Server<'a> {
    device: &'a mut dyn Device,
    session: Session,
    info: DeviceInfo,
    sizes: Vec<u64>,
    /// Access that was requested from the client.
    asked: DmaAccess,
    wants_bytes: bool,
    out: Vec<u8>,
}

/// Result of a request; the body of the reply is in `out`.
type Outcome = Result<(), Errno>;

impl<'a> Server<'a> {
    fn new(device: &'a mut dyn Device) -> Self {
        let mut info = device.info();
        info.regions = info.regions.min(MOST_INDICES);
        info.irqs = info.irqs.min(MOST_INDICES);
        let sizes = (0..info.regions).map(|index| device.region(index).0.size).collect();
        Self {
            device,
            session: Session::new(capabilities()),
            info,
            sizes,
            asked: DmaAccess { address: 0, count: 0 },
            wants_bytes: false,
            out: Vec::new(),
        }
    }

    fn run(&mut self, connection: &mut Connection) -> Result<(), Served> {
        // A client that connects and stays silent would block all others.
        connection.limit_waits(true).map_err(Broken::from)?;
        let mut negotiated = false;
        loop {
            connection.receive(self.session.most())?;
            if !negotiated {
                connection.limit_waits(false).map_err(Broken::from)?;
                negotiated = true;
            }
            let came = connection.fds();
            let fds = connection.take_fds(self.kind(connection.frame().header.command))?;
            let known = fds.len() == came;
            let step = self.session.take(connection.frame(), came);
            match step.inspect_err(|fault| refuse(connection, fault))? {
                Step::Reply(header, body) => send(connection, header, &body, &[])?,
                Step::Nothing => {}
                Step::Answer(outcome) => self.answer(connection.frame().body, outcome.err()),
                Step::Serve(ticket, Request::RegionInfo(query)) => self.region(connection, ticket, query)?,
                Step::Serve(ticket, request) => {
                    self.out.clear();
                    let outcome = if known || !self.needs_fds(&request) {
                        self.carry_out(request, fds)
                    } else {
                        Err(Errno::INVAL)
                    };
                    let header = match outcome {
                        Ok(()) => ticket.done(),
                        Err(errno) => {
                            self.out.clear();
                            ticket.refused(errno.raw_os_error().unsigned_abs())
                        }
                    };
                    if let Some(header) = header {
                        send(connection, header, &self.out, &[])?;
                    }
                }
            }
            self.ask(connection)?;
        }
    }

    /// Required type of a command's descriptors.
    fn kind(&self, command: u16) -> FileKind {
        match Command::try_from(command) {
            Ok(Command::SetIrqs) => FileKind::Event,
            Ok(Command::DmaMap) if self.device.reaches_memory() => FileKind::Memory,
            _ => FileKind::Nothing,
        }
    }

    /// Whether the descriptors of a request are used.
    fn needs_fds(&self, request: &Request<'_>) -> bool {
        self.kind(request.command().number()) != FileKind::Nothing
    }

    /// Sends the device's next memory request to the client, if there is one.
    fn ask(&mut self, connection: &Connection) -> Result<(), Served> {
        if !self.session.may_ask() {
            return Ok(());
        }
        let Some(call) = self.device.call() else { return Ok(()) };
        self.asked = call.access();
        self.wants_bytes = matches!(call, Call::Read(_));
        match self.session.ask(&call) {
            Some(header) => {
                self.out.clear();
                self.asked.encode(&mut self.out);
                Ok(connection.send(header, [&self.out, call.data()], &[], u32::MAX)?)
            }
            None => {
                self.device.answered(Err(Errno::TOOBIG));
                Ok(())
            }
        }
    }

    /// Passes the client's answer to the device; that of a read must have the requested access and length.
    fn answer(&mut self, body: &[u8], error: Option<u32>) {
        let bytes = DmaAccess::split(body).ok().filter(|(access, _)| *access == self.asked);
        let count =
            if self.wants_bytes { usize::try_from(self.asked.count).unwrap_or(usize::MAX) } else { 0 };
        let bytes = bytes.and_then(|(_, bytes)| bytes.get(..count));
        // A write may be answered without repeating what was written.
        let bytes = bytes.or_else(|| (!self.wants_bytes).then_some(&[]));
        self.device.answered(bytes.filter(|_| error.is_none()).ok_or(Errno::IO));
    }

    /// Sends the only reply that carries a descriptor.
    fn region(&mut self, connection: &Connection, ticket: Ticket, query: Query) -> Result<(), Served> {
        self.out.clear();
        let known = query.index < self.info.regions && query.room >= RegionInfo::SIZE;
        if !known {
            let header = ticket.refused(Errno::INVAL.raw_os_error().unsigned_abs());
            return header.map_or(Ok(()), |header| send(connection, header, &[], &[]));
        }
        let (info, file) = self.device.region(query.index);
        let whole = info.encode(query.room, &mut self.out);
        let file = file.filter(|_| whole && info.mmap);
        ticket.done().map_or(Ok(()), |header| send(connection, header, &self.out, file.as_slice()))
    }

    fn carry_out(&mut self, request: Request<'_>, fds: Vec<OwnedFd>) -> Outcome {
        match request {
            Request::DeviceInfo(room) => {
                room.checked_sub(DeviceInfo::SIZE).ok_or(Errno::INVAL)?;
                self.info.encode(&mut self.out);
            }
            Request::IrqInfo(Query { room, index }) => {
                if room < IrqInfo::SIZE || index >= self.info.irqs {
                    return Err(Errno::INVAL);
                }
                self.device.irq(index).encode(&mut self.out);
            }
            // This server offers no eventfds for writes: the reply has none.
            Request::RegionIoFds(Query { room, index }) if self.has(index) && IO_FDS.contains(&room) => {
                self.out.extend([16, 0, index, 0].into_iter().flat_map(u32::to_le_bytes));
            }
            Request::DmaMap(map) => self.device.dma_map(map, fds.into_iter().next())?,
            Request::DmaUnmap(unmap) => {
                self.device.dma_unmap(unmap)?;
                unmap.encode(&mut self.out);
            }
            Request::SetIrqs(set) => self.set_irqs(set, fds)?,
            Request::RegionRead(access) => self.read(access)?,
            Request::RegionWrite(write) => {
                self.write(write)?;
                write.access.encode(&mut self.out);
            }
            Request::WriteMulti(writes) => {
                writes.iter().try_for_each(|write| self.write(write))?;
                self.out.extend(writes.count().to_le_bytes());
            }
            Request::Reset => self.device.reset()?,
            Request::Feature(_) => return Err(Errno::NOTTY),
            Request::RegionIoFds(_) | Request::Version(_) | Request::RegionInfo(_) => {
                return Err(Errno::INVAL);
            }
            Request::DirtyPages | Request::MigrationRead(_) | Request::MigrationWrite(_) => {
                return Err(Errno::OPNOTSUPP);
            }
        }
        Ok(())
    }

    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Outcome {
        if set.index >= self.info.irqs {
            return Err(Errno::INVAL);
        }
        let count = self.device.irq(set.index).count;
        let within = set.start < count && set.start.checked_add(set.count).is_some_and(|end| end <= count);
        if !within {
            return Err(Errno::INVAL);
        }
        self.device.set_irqs(set, eventfds)
    }

    fn read(&mut self, access: Access) -> Outcome {
        self.inside(access)?;
        access.encode(&mut self.out);
        let head = self.out.len();
        let count = usize::try_from(access.count).map_err(|_| Errno::INVAL)?;
        self.out.resize(head.saturating_add(count), 0xff);
        if let Some(data) = self.out.get_mut(head..).filter(|data| !data.is_empty()) {
            self.device.read(access.region, access.offset, data);
        }
        Ok(())
    }

    fn write(&mut self, write: Write<'_>) -> Outcome {
        self.inside(write.access)?;
        if !write.data.is_empty() {
            self.device.write(write.access.region, write.access.offset, write.data);
        }
        Ok(())
    }

    /// Refuses an access that is not wholly in an existing region.
    fn inside(&self, access: Access) -> Outcome {
        let end = access.offset.checked_add(access.count.into());
        let inside = egm_address::fault!("access-beyond-region")
            || end.is_some_and(|end| end <= self.size(access.region));
        if inside && self.has(access.region) { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn has(&self, region: u32) -> bool {
        self.size(region) > 0
    }

    /// Size of a region in bytes, 0 if no region has that number.
    fn size(&self, region: u32) -> u64 {
        usize::try_from(region).ok().and_then(|index| self.sizes.get(index)).copied().unwrap_or(0)
    }
}

/// Answers a handshake that fails, as libvfio-user does, before the connection ends.
fn refuse(connection: &Connection, fault: &Fault) {
    let header = connection.frame().header;
    // A version is answered in any case: without a reply there is no agreement.
    let wants_reply = match header.kind {
        Kind::Command { no_reply } => !no_reply || header.command == Command::Version.number(),
        Kind::Reply { .. } => false,
    };
    let handshake = matches!(
        fault,
        Fault::Handshake(_) | Fault::NotNegotiated { .. } | Fault::Version { .. } | Fault::Descriptors { .. }
    );
    if wants_reply && handshake {
        let error = Some(Errno::INVAL.raw_os_error().unsigned_abs());
        // A failed send is ignored: the client sees the end of the connection, which follows.
        let _ = send(connection, Header { kind: Kind::Reply { error }, ..header }, &[], &[]);
    }
}

fn send(connection: &Connection, header: Header, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Served> {
    Ok(connection.send(header, [body, &[]], fds, u32::MAX)?)
}
