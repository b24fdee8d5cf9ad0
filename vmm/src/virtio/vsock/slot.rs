//! One Unix socket of the host and its connection to the guest: bytes between socket and guest memory.

use std::collections::VecDeque;
use std::io;
use std::io::Read;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::PollFd;
use rustix::event::PollFlags;
use rustix::event::Timespec;
use rustix::event::poll;

use super::connection::Connection;
use super::host::Handshake;
use super::host::HandshakeState;
use super::packet::HEADER;
use super::packet::Key;
use super::packet::Outgoing;
use super::packet::Packet;
use super::packet::Refusal;
use crate::virtio::iovec;
use crate::virtio::ring;
use crate::virtio::ring::Chain;
use crate::virtio::ring::Ring;

/// Most payload in a packet to the guest, as Linux has it.
const MAX_PAYLOAD: u32 = 64 << 10;

/// A socket, and what it is to the guest.
pub(super) struct Slot {
    pub(super) stream: UnixStream,
    pub(super) phase: Phase,
    /// Bytes of the guest that the socket did not take yet.
    pub(super) backlog: VecDeque<u8>,
    /// The socket may have bytes: set by its edge, cleared when it would block.
    pub(super) readable: bool,
    /// Whether it is in the queue of [`Muxer`](super::muxer::Muxer).
    pub(super) queued: bool,
}

pub(super) enum Phase {
    Handshake(Handshake),
    Connected(Key, Connection),
}

impl Slot {
    /// A socket that may have bytes already.
    pub(super) fn new(stream: UnixStream, phase: Phase) -> Self {
        Self { stream, phase, backlog: VecDeque::new(), readable: true, queued: false }
    }

    /// Whether the host program gave up before the guest answered it.
    pub(super) fn is_abandoned(&self) -> bool {
        let Phase::Connected(_, connection) = &self.phase else { return false };
        // Polled now: the event may be of a socket that had this slot before.
        let mut polled = [PollFd::new(&self.stream, PollFlags::empty())]; // a hang-up is always reported
        let done = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        connection.is_asked() && done.is_ok() && polled.iter().any(|of| of.revents().contains(PollFlags::HUP))
    }

    /// Whether it has something for the guest now.
    pub(super) fn has_data_for_guest(&self) -> bool {
        match &self.phase {
            Phase::Handshake(_) => false,
            Phase::Connected(_, connection) => {
                connection.has_control() || (self.readable && connection.may_send())
            }
        }
    }

    /// Gives the socket what it did not take before.
    pub(super) fn write_backlog(&mut self) -> io::Result<()> {
        let Phase::Connected(_, connection) = &mut self.phase else { return Ok(()) };
        while !self.backlog.is_empty() {
            let (front, _) = self.backlog.as_slices();
            match self.stream.write(front) {
                Ok(bytes) => {
                    self.backlog.drain(..bytes);
                    connection.forward(u32::try_from(bytes).unwrap_or(u32::MAX)); // at most BUFFER
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.backlog = VecDeque::new(); // an idle connection holds no memory
        Ok(())
    }

    /// The next packet of this connection, its payload read into the chain behind the header's place.
    pub(super) fn packet(&mut self, ring: &Ring, chain: &Chain) -> io::Result<Option<Outgoing>> {
        let Phase::Connected(_, connection) = &mut self.phase else { return Ok(None) };
        if connection.has_control() {
            return Ok(connection.control());
        }
        let room = ring::total(&chain.writable).saturating_sub(HEADER as u64);
        let limit = connection.allowance().min(MAX_PAYLOAD).min(u32::try_from(room).unwrap_or(u32::MAX));
        if limit == 0 || !self.readable {
            return Ok(connection.control()); // perhaps a request for credit
        }
        let mut payload = Vec::new();
        ring::slices(ring.memory(), &chain.writable, HEADER as u64, u64::from(limit), &mut payload);
        match iovec::readv(self.stream.as_fd(), &payload) {
            Ok(0) => {
                self.readable = false;
                connection.shut_host();
                Ok(connection.control())
            }
            Ok(bytes) => Ok(Some(connection.data(u32::try_from(bytes).unwrap_or(limit)))), // at most `limit`
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads a handshake up to its line's end, byte by byte: what follows belongs to the guest.
    pub(super) fn handshake(&mut self) -> HandshakeState {
        let Phase::Handshake(handshake) = &mut self.phase else { return HandshakeState::Incomplete };
        let mut byte = [0];
        loop {
            match self.stream.read(&mut byte) {
                Ok(1) => match handshake.push(byte[0]) {
                    HandshakeState::Incomplete => {}
                    whole => return whole,
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return HandshakeState::Incomplete,
                _ => return HandshakeState::Nonsense,
            }
        }
    }

    /// Writes `length` bytes of payload to the socket, straight from guest memory if nothing waits before it; keeps
    /// what is left. The connection has found room for it.
    pub(super) fn deliver(&mut self, length: u32, ring: &Ring, chain: &Chain) -> io::Result<()> {
        let Phase::Connected(_, connection) = &mut self.phase else { return Ok(()) };
        let mut taken = 0;
        if self.backlog.is_empty() && length > 0 {
            let mut payload = Vec::new();
            ring::slices(ring.memory(), &chain.readable, HEADER as u64, u64::from(length), &mut payload);
            taken = match iovec::writev(self.stream.as_fd(), &payload) {
                Ok(bytes) => u32::try_from(bytes).unwrap_or(length), // at most `length`
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => return Err(error),
            };
            connection.forward(taken);
        }
        if taken < length {
            let mut rest = vec![0; length.saturating_sub(taken) as usize];
            let offset = (HEADER as u64).saturating_add(u64::from(taken));
            let read = ring::read(ring.memory(), &chain.readable, offset, &mut rest);
            rest.truncate(read);
            self.backlog.extend(rest);
        }
        Ok(())
    }
}

/// Reads a header and checks that its payload is there.
pub(super) fn read_packet(ring: &Ring, chain: &Chain, guest_cid: u32) -> Result<Packet, Refusal> {
    let mut header = [0; HEADER];
    if !chain.writable.is_empty() || ring::read(ring.memory(), &chain.readable, 0, &mut header) < HEADER {
        return Err(Refusal::Drop);
    }
    let packet = Packet::parse(&header, guest_cid)?;
    let payload = ring::total(&chain.readable).saturating_sub(HEADER as u64);
    if u64::from(packet.length) > payload { Err(Refusal::Reset(packet.key)) } else { Ok(packet) }
}
