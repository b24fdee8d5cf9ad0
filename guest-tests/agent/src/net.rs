//! Setting an interface up by netlink, and the echo that network checks share.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::thread;
use std::time::Instant;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::error::Broken;
use crate::pattern;

/// Bytes of a netlink header (`struct nlmsghdr`).
const HEADER: usize = 16;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const NLMSG_ERROR: u16 = 2;
/// Flags of a request for an acknowledgement: `NLM_F_REQUEST | NLM_F_ACK`.
pub(crate) const REQUEST: u16 = 1 | 4;
/// Flags that create an object or replace it: `NLM_F_CREATE | NLM_F_REPLACE`.
const CREATE: u16 = 0x400 | 0x100;

/// Reads an IPv4 address with its prefix length: `192.168.100.2/24`.
pub(crate) fn address(text: &str) -> Result<(Ipv4Addr, u8), Broken> {
    let parsed = text.split_once('/').and_then(|(address, prefix)| {
        let prefix = prefix.parse::<u8>().ok().filter(|p| *p <= 32)?;
        Some((address.parse().ok()?, prefix))
    });
    parsed.ok_or_else(|| Broken::Argument(text.to_owned(), "is not an IPv4 address with a prefix length"))
}

/// Gives the interface an IPv4 address and sets it up; doing so again changes nothing.
pub(crate) fn configure(interface: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // NETLINK_ROUTE
    )?;
    for message in [new_address(interface, address, prefix), link_up(interface)] {
        rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut answer = [0u8; 512];
        let (length, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
        acknowledged(answer.get(..length).unwrap_or_default())?;
    }
    Ok(())
}

/// A netlink message: header and `body`, which is a multiple of 4 long.
pub(crate) fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number and port
    bytes.extend(body);
    bytes
}

/// `struct ifaddrmsg` with `IFA_LOCAL` (2) and `IFA_ADDRESS` (1).
fn new_address(interface: u32, address: Ipv4Addr, prefix: u8) -> Vec<u8> {
    let mut body = vec![2, prefix, 0, 0]; // AF_INET, flags, scope global
    body.extend(interface.to_ne_bytes());
    for kind in [2u16, 1] {
        body.extend(8u16.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(address.octets());
    }
    message(RTM_NEWADDR, REQUEST | CREATE, &body)
}

/// `struct ifinfomsg` that changes `IFF_UP` (1).
fn link_up(interface: u32) -> Vec<u8> {
    let mut body = vec![0; 4]; // AF_UNSPEC, type
    body.extend(interface.to_ne_bytes());
    body.extend(1u32.to_ne_bytes());
    body.extend(1u32.to_ne_bytes());
    message(RTM_NEWLINK, REQUEST, &body)
}

/// An acknowledgement is an error message with the number 0.
pub(crate) fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
    let number = answer.get(HEADER..HEADER + 4).and_then(|b| b.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, number) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(error)) => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends `size` bytes and reads them back at the same time; MiB/s of the round trip, or what went wrong.
pub(crate) fn echo(stream: &File, size: usize, seed: u64) -> Result<f64, String> {
    let mut sent = vec![0u8; size.next_multiple_of(8)];
    pattern::fill(&mut sent, seed, 0, 0);
    sent.truncate(size);
    let mut seen = vec![0u8; size];
    let (mut reader, mut writer) = (stream, stream);
    let begun = Instant::now();
    thread::scope(|scope| {
        let sending = scope.spawn(|| writer.write_all(&sent));
        let read = reader.read_exact(&mut seen);
        let sending = sending.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        sending.map_err(|e| format!("cannot send {size} bytes: {e}"))?;
        read.map_err(|e| format!("{size} bytes did not come back: {e}"))
    })?;
    let seconds = begun.elapsed().as_secs_f64().max(1e-9);
    match seen.iter().zip(&sent).position(|(a, b)| a != b) {
        None => Ok(size as f64 / f64::from(1 << 20) / seconds),
        Some(at) => Err(format!("byte {at:#x} of {size:#x} came back wrong")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_address_has_a_prefix() {
        assert_eq!(address("10.0.0.2/8").unwrap(), (Ipv4Addr::new(10, 0, 0, 2), 8));
        assert!(
            address("10.0.0.2").is_err() && address("10.0.0.2/33").is_err() && address("host/8").is_err()
        );
    }

    #[test]
    fn messages_have_their_length_and_whole_attributes() {
        for message in [new_address(3, Ipv4Addr::LOCALHOST, 8), link_up(3)] {
            let length = u32::from_ne_bytes(message[..4].try_into().unwrap());
            assert_eq!(usize::try_from(length).unwrap(), message.len());
            assert_eq!(message.len() % 4, 0);
        }
        let mut no = vec![0; 20];
        no[4] = 2;
        assert!(acknowledged(&no).is_ok());
        no[16..].copy_from_slice(&(-1i32).to_ne_bytes());
        assert_eq!(acknowledged(&no).unwrap_err().raw_os_error(), Some(1));
        assert!(acknowledged(&[]).is_err());
    }

    /// Echoes through a socket pair, with byte `wrong` changed.
    fn echoed(size: usize, wrong: Option<usize>) -> Result<f64, String> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            let mut bytes = vec![0; size];
            theirs.read_exact(&mut bytes).unwrap();
            if let Some(at) = wrong {
                bytes[at] ^= 1;
            }
            theirs.write_all(&bytes).unwrap();
        });
        let result = echo(&File::from(OwnedFd::from(ours)), size, 1);
        peer.join().unwrap();
        result
    }

    #[test]
    fn bytes_that_come_back_pass_and_a_changed_one_is_named() {
        assert!(echoed(100_003, None).unwrap() > 0.0);
        assert_eq!(echoed(1000, Some(16)), Err("byte 0x10 of 0x3e8 came back wrong".into()));
    }
}
