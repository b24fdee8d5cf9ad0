//! Packets of a `SOCK_SEQPACKET` socket: whole or not at all, with descriptors where the broker sends some.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Descriptors in a packet: the memory, and the file that describes its region.
pub(super) const DESCRIPTORS: usize = 2;

/// A socket for packets.
pub(super) fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The address of `path`.
pub(super) fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(path)?)
}

/// Sends a packet with descriptors, or fails with `WouldBlock` where the peer does not read.
pub(super) fn send(to: BorrowedFd<'_>, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::net::sendmsg(to, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// What came from a peer who may be anybody.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Packet<'a> {
    Whole(&'a [u8]),
    /// Longer than the buffer.
    TooLong,
    /// There is nobody any more. (An empty packet looks the same, and is taken for it.)
    End,
}

/// The next packet in `buffer`. Descriptors that came with it are closed by the kernel, as no room is made for them.
///
/// # Errors
/// The kernel's; `WouldBlock` when there is none.
pub(super) fn receive<'a>(from: BorrowedFd<'_>, buffer: &'a mut [u8]) -> io::Result<Packet<'a>> {
    let (_, length) = rustix::net::recv(from, &mut *buffer, RecvFlags::TRUNC | RecvFlags::DONTWAIT)?;
    Ok(match buffer.get(..length) {
        Some([]) => Packet::End,
        Some(packet) => Packet::Whole(packet),
        None => Packet::TooLong,
    })
}

/// The next packet and its descriptors, from a broker that is trusted to be one; waits for it.
///
/// # Errors
/// The kernel's; `InvalidData` for one that is longer than any.
pub(super) fn wait_for(from: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut reset = false;
    let received = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(from, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            // The broker hung up before it read all that we said. What it said before that is still to be read.
            Err(rustix::io::Errno::CONNRESET) if !reset => reset = true,
            received => break received?,
        }
    };
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = rights.flatten().collect();
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((received.bytes, descriptors))
}
