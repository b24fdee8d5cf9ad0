//! Packets of a `SOCK_SEQPACKET` socket: whole or not at all, with descriptors where the broker sends some.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Descriptors in a packet: the memory, and the file that describes its region.
pub(super) const DESCRIPTORS: usize = 2;

/// Longest time until a waiting caller sees its cancel flag: 100 ms.
const CANCEL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

pub(super) fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

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

/// A packet from an untrusted peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Packet<'a> {
    Whole(&'a [u8]),
    /// Longer than the buffer.
    TooLong,
    /// The peer has hung up. (An empty packet looks the same, and counts as this.)
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

/// The next packet and its descriptors, from a broker that is trusted to be one; waits for it until `cancel` is set.
///
/// # Errors
/// The kernel's; `InvalidData` for one that is longer than `buffer`; `Interrupted` when `cancel` is set.
pub(super) fn wait_for(
    from: BorrowedFd<'_>,
    buffer: &mut [u8],
    cancel: &AtomicBool,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut reset = false;
    let received = loop {
        match poll(&mut [PollFd::from_borrowed_fd(from, PollFlags::IN)], Some(&CANCEL_INTERVAL)) {
            Ok(0) | Err(rustix::io::Errno::INTR) if cancel.load(Ordering::Relaxed) => {
                return Err(io::ErrorKind::Interrupted.into());
            }
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            polled => polled?,
        };
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(from, &mut parts, &mut control, flags) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            // The broker hung up before it read all requests. Its earlier replies are still to be read.
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
