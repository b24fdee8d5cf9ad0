//! Claim: through the first planned virtio network device, datagrams and a stream come back byte for byte from the echo
//! service at `net.peer` (default 192.168.100.1, port `net.port`, default 7): single bytes, whole frames, fragments and 1 MiB by
//! TCP, which the guest's kernel sends in pieces larger than a frame where the device segments them. Every network device
//! has its planned hardware address.
//!
//! The guest's address is `net.addr` (default 192.168.100.2/24).

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::Context;
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::{net, pattern, sysfs};

/// Payloads of datagrams: one byte, a small one, a whole Ethernet frame (1500 bytes with headers), and fragments.
const DATAGRAMS: [usize; 4] = [1, 64, 1472, 8000];
/// Payloads of streams, in bytes; the last one's rate is the check's value.
const STREAMS: [usize; 2] = [100, 1 << 20];
/// A datagram may be lost: how often it is sent.
const TRIES: usize = 5;
const TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let mut first = None;
    for (function, device) in context.plan.devices() {
        let DeviceKind::VirtioNet { mac } = device.kind else { continue };
        let Some(name) = sysfs::virtio_child(function.address, "net") else {
            claim.untrue(format!("{} at {} has no driver", device.id, function.address));
            continue;
        };
        let address = sysfs::text(format!("/sys/class/net/{name}/address"))?;
        claim.equal(format!("the hardware address of {}", device.id), &address.trim(), &text(mac).as_str());
        first.get_or_insert(name);
    }
    let Some(name) = first else {
        return Ok(if claim.is_true() {
            Finding::skipped("no network device is planned")
        } else {
            claim.finish()
        });
    };
    let rate = carries(&mut claim, context, &name)?;
    let finding = claim.finish();
    Ok(match rate {
        Some(rate) => finding.with_value(rate, "MiB/s"),
        None => finding,
    })
}

/// Datagrams and streams come back through `interface`; returns the rate of the largest stream in MiB/s, if they do.
pub(super) fn carries(claim: &mut Claim, context: &Context, interface: &str) -> Result<Option<f64>, Broken> {
    let peer = configure(context, interface)?;
    match datagrams(peer).and_then(|()| streams(peer)) {
        Ok(rate) => {
            claim.seen(format!("{interface}: datagrams of {DATAGRAMS:?} and streams of {STREAMS:?} bytes"));
            return Ok(Some(rate));
        }
        Err(why) => claim.untrue(why),
    }
    Ok(None)
}

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Gives `interface` its address and returns where the echo is.
pub(super) fn configure(context: &Context, interface: &str) -> Result<SocketAddrV4, Broken> {
    let args = &context.args;
    let (address, prefix) = net::address(args.text("net.addr").unwrap_or("192.168.100.2/24"))?;
    let index = sysfs::number(format!("/sys/class/net/{interface}/ifindex"))?;
    net::configure(u32::try_from(index).unwrap_or(0), address, prefix)
        .map_err(Broken::system(format!("cannot give {interface} the address {address}/{prefix}")))?;
    let peer = args.get("net.peer", Ipv4Addr::new(192, 168, 100, 1))?;
    Ok(SocketAddrV4::new(peer, args.get("net.port", 7)?))
}

fn datagrams(peer: SocketAddrV4) -> Result<(), String> {
    DATAGRAMS.iter().try_for_each(|size| datagram(peer, *size, Duration::from_secs(2)))
}

/// Sends a datagram until it comes back.
pub(super) fn datagram(peer: SocketAddrV4, size: usize, timeout: Duration) -> Result<(), String> {
    let mut sent = vec![0u8; size.next_multiple_of(8)];
    pattern::fill(&mut sent, 7, 0, 0);
    let sent = &sent[..size];
    let mut seen = vec![0u8; size + 1];
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(|e| format!("no UDP socket: {e}"))?;
    let set = socket.connect(peer).and_then(|()| socket.set_read_timeout(Some(timeout)));
    set.map_err(|e| format!("cannot reach {peer}: {e}"))?;
    let mut last = String::new();
    for _ in 0..TRIES {
        match socket.send(sent).and_then(|_| socket.recv(&mut seen)) {
            Ok(length) if seen[..length] == *sent => return Ok(()),
            Ok(length) => {
                return Err(format!("a datagram of {size} bytes came back wrong, with {length} bytes"));
            }
            Err(error) => last = error.to_string(),
        }
    }
    Err(format!("a datagram of {size} bytes to {peer} did not come back in {TRIES} tries: {last}"))
}

/// MiB/s of the largest stream.
fn streams(peer: SocketAddrV4) -> Result<f64, String> {
    let mut rate = 0.0;
    for size in STREAMS {
        rate = stream(peer, size)?;
    }
    Ok(rate)
}

/// Sends `size` bytes and gets them back; MiB/s.
pub(super) fn stream(peer: SocketAddrV4, size: usize) -> Result<f64, String> {
    let stream = TcpStream::connect_timeout(&peer.into(), TIMEOUT)
        .and_then(|s| s.set_read_timeout(Some(TIMEOUT)).map(|()| s))
        .and_then(|s| s.set_write_timeout(Some(TIMEOUT)).map(|()| s))
        .map_err(|e| format!("cannot connect to {peer}: {e}"))?;
    net::echo(&File::from(OwnedFd::from(stream)), size, u64::from(peer.port()))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::thread;

    use super::*;

    #[test]
    fn a_hardware_address_is_written_as_linux_does() {
        assert_eq!(text([0x52, 0x54, 0, 0, 0, 0x0a]), "52:54:00:00:00:0a");
    }

    #[test]
    fn a_datagram_that_comes_back_changed_fails() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let std::net::SocketAddr::V4(peer) = server.local_addr().unwrap() else {
            panic!("IPv4 was asked for")
        };
        let echo = thread::spawn(move || {
            for change in [0, 1] {
                let mut bytes = [0; 100];
                let (length, from) = server.recv_from(&mut bytes).unwrap();
                bytes[5] ^= change;
                server.send_to(&bytes[..length], from).unwrap();
            }
        });
        assert_eq!(datagram(peer, 64, Duration::from_secs(20)), Ok(()));
        assert!(datagram(peer, 64, Duration::from_secs(20)).unwrap_err().contains("came back wrong"));
        echo.join().unwrap();
    }
}
