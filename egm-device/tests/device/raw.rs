//! A vfio-user client that sends any bytes: messages that no library would build.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use egm_vfio_wire::message::Version;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::world::LIMIT;

pub(crate) const COMMAND: u32 = 0;
pub(crate) const NO_REPLY: u32 = 0x10;
pub(crate) const MAP: u16 = 2;
pub(crate) const READ: u16 = 9;
pub(crate) const WRITE: u16 = 10;

pub(crate) fn message(id: u16, command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = 16 + u32::try_from(body.len()).unwrap();
    let head = [id, command].into_iter().flat_map(u16::to_le_bytes);
    head.chain([size, flags, 0].into_iter().flat_map(u32::to_le_bytes)).chain(body.iter().copied()).collect()
}

pub(crate) fn access(offset: u64, region: u32, data: &[u8], count: usize) -> Vec<u8> {
    let count = u32::try_from(count).unwrap();
    let numbers = [region, count].into_iter().flat_map(u32::to_le_bytes);
    offset.to_le_bytes().into_iter().chain(numbers).chain(data.iter().copied()).collect()
}

pub(crate) fn window(address: u64) -> Vec<u8> {
    let head = [32_u32, 3].into_iter().flat_map(u32::to_le_bytes);
    head.chain([0, address, 0x1000].into_iter().flat_map(u64::to_le_bytes)).collect()
}

/// A connection without a protocol.
pub(crate) struct Raw(pub(crate) UnixStream);

impl Raw {
    pub(crate) fn connect(path: &Path) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self(socket)
    }

    /// A connection after the handshake.
    pub(crate) fn negotiated(path: &Path) -> (Self, Version) {
        let mut raw = Self::connect(path);
        let proposed = b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":8,\"pgsizes\":4096}}\0";
        raw.send(&message(1, 1, COMMAND, proposed));
        let (_, error, body) = raw.receive().unwrap();
        assert_eq!(error, None);
        (raw, Version::decode(&body).unwrap())
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        // The server may have closed the connection already.
        let _ = self.0.write_all(bytes);
    }

    pub(crate) fn send_with(&mut self, bytes: &[u8], fds: &[impl AsFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()) {
            // As in `send`.
            Err(Errno::PIPE | Errno::CONNRESET) => {}
            sent => assert_eq!(sent, Ok(bytes.len())),
        }
    }

    /// Id, error and body of the next reply; `None` at the end of the connection.
    pub(crate) fn receive(&mut self) -> Option<(u16, Option<u32>, Vec<u8>)> {
        let mut head = [0; 16];
        self.0.read_exact(&mut head).ok()?;
        let word = |at: usize| u32::from_le_bytes(*head[at..].first_chunk().unwrap());
        let mut body = vec![0; word(4) as usize - 16];
        self.0.read_exact(&mut body).unwrap();
        let error = (word(8) & 0x20 != 0).then(|| word(12));
        Some((u16::from_le_bytes([head[0], head[1]]), error, body))
    }
}
