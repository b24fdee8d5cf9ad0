//! An RDMA device over an Ethernet card, by the kernel's `rdma_rxe`: what `rdma link add NAME type rxe netdev CARD` does,
//! where no such tool is.

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::error::Broken;
use crate::{net, sysfs};

/// Type of the message that makes a device: `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_NEWLINK)`.
const NEW_LINK: u16 = (5 << 10) + 3;
/// Attribute with the name of the RDMA device: `RDMA_NLDEV_ATTR_DEV_NAME`.
const DEVICE_NAME: u16 = 2;
/// Attribute with the name of the network card: `RDMA_NLDEV_ATTR_NDEV_NAME`.
const CARD_NAME: u16 = 51;
/// Attribute with the type of the device, here `rxe`: `RDMA_NLDEV_ATTR_LINK_TYPE`.
const LINK_TYPE: u16 = 65;
/// Name of the device.
const NAME: &str = "rxe0";
/// Time in which its character device has to appear, and its card to have a link.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Gives the first Ethernet card that has a device `address/prefix`, sets it up, and makes an RDMA device of it.
/// Does nothing if there is an RDMA device already.
pub(crate) fn set_up(address: &str) -> Result<(), Broken> {
    if !sysfs::names("/sys/class/infiniband").is_empty() {
        return Ok(());
    }
    let (address, prefix) = net::address(address)?;
    let card = card()?;
    // For the routes, packets of a card to its own address go through the loopback interface.
    for (name, address, prefix) in [("lo", Ipv4Addr::LOCALHOST, 8), (card.as_str(), address, prefix)] {
        let index = sysfs::number(format!("/sys/class/net/{name}/ifindex"))?;
        net::configure(u32::try_from(index).unwrap_or(0), address, prefix)
            .map_err(Broken::system(format!("cannot give {name} the address {address}/{prefix}")))?;
    }
    // ENOENT is the checksum's.
    let why = "are rdma_rxe and, before Linux 6.15, crc32_generic loaded?";
    add(&card).map_err(Broken::system(format!("cannot make {NAME} of {card}: {why}")))?;
    until("/dev/infiniband has no uverbs0: is ib_uverbs loaded?", || {
        !sysfs::names("/dev/infiniband").is_empty()
    })?;
    let state = format!("/sys/class/infiniband/{NAME}/ports/1/state");
    until(&format!("port 1 of {NAME} stays down: has {card} a link?"), || {
        sysfs::text(&state).is_ok_and(|state| state.contains("ACTIVE"))
    })
}

/// Looks until something is so.
fn until(otherwise: &str, so: impl Fn() -> bool) -> Result<(), Broken> {
    let begun = Instant::now();
    while !so() {
        if begun.elapsed() > TIMEOUT {
            return Err(Broken::system(otherwise)(io::Error::from(io::ErrorKind::TimedOut)));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The first card that is a device's, by name.
fn card() -> Result<String, Broken> {
    let cards = sysfs::names("/sys/class/net");
    let found = cards.iter().find(|name| Path::new(&format!("/sys/class/net/{name}/device")).exists());
    found.cloned().ok_or_else(|| Broken::Text {
        what: "/sys/class/net".to_owned(),
        text: cards.join(" "),
        form: "a list with a network card",
    })
}

fn add(card: &str) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::RDMA),
    )?;
    let message = new_link(card);
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0u8; 512];
    let (length, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    net::acknowledged(answer.get(..length).unwrap_or_default())
}

/// The message: three attributes with texts that end in a zero.
fn new_link(card: &str) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, text) in [(DEVICE_NAME, NAME), (LINK_TYPE, "rxe"), (CARD_NAME, card)] {
        let length = u16::try_from(4 + text.len() + 1).unwrap_or(u16::MAX);
        body.extend(length.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(text.as_bytes());
        body.push(0);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    net::message(NEW_LINK, net::REQUEST, &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_what_the_tool_sends() {
        let message = new_link("eth0");
        assert_eq!(message.len(), 16 + 12 + 8 + 12);
        assert_eq!(message[4..8], [0x03, 0x14, 5, 0]); // 5123, request and acknowledge
        assert_eq!(&message[16..28], b"\x09\x00\x02\x00rxe0\x00\x00\x00\x00");
        assert_eq!(&message[28..36], b"\x08\x00\x41\x00rxe\x00");
        assert_eq!(&message[36..48], b"\x09\x00\x33\x00eth0\x00\x00\x00\x00");
    }
}
