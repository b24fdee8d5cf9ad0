//! Clients of the program that send descriptors where a server may overlook them: with an out-of-band byte (`MSG_OOB`),
//! which a peek skips by default, and behind a message that ends the receiver.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::blocking_files::serves_and_ends;
use crate::cli::{Host, Server};
use crate::raw::{COMMAND, Raw, message};

const DEVICE_INFO: u16 = 4;

struct World {
    server: Server,
    host: Host,
    /// Peers of the TCP connections that linger: their end ends the wait.
    peers: Vec<TcpStream>,
}

impl World {
    fn new() -> Self {
        let host = Host::new();
        let server = host.serve("serve --region local --size 2MiB --socket vm.sock --timeout 0");
        Self { server, host, peers: Vec::new() }
    }

    fn connect(&self) -> Raw {
        Raw::connect(&self.host.path("vm.sock"))
    }

    /// Sends one byte with a TCP connection that nothing else refers to. Its last close waits for two minutes in the
    /// kernel: for a peer that reads nothing.
    fn send_lingering(&mut self, raw: &Raw, flags: SendFlags) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingers = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        self.peers.push(listener.accept().unwrap().0);
        lingers.set_nonblocking(true).unwrap();
        while lingers.write(&[0; 1 << 16]).is_ok() {}
        set_socket_linger(&lingers, Some(Duration::from_secs(120))).unwrap();
        send(raw, &[1], &[lingers.as_fd()], flags);
    }

    fn send_urgent(&mut self, raw: &Raw) {
        self.send_lingering(raw, SendFlags::OOB);
    }

    #[track_caller]
    fn ends_well(self) {
        let Self { server, host, peers } = self;
        let ended = serves_and_ends(server, &host);
        drop(peers);
        assert_eq!(ended, Some(0));
        host.owes_nothing();
    }
}

fn send(raw: &Raw, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(&raw.0, &[IoSlice::new(bytes)], &mut control, flags).unwrap();
}

#[test]
fn a_descriptor_with_an_urgent_byte_between_two_messages_does_not_hang_the_server() {
    let mut world = World::new();
    let mut raw = Raw::negotiated(&world.host.path("vm.sock")).0;
    world.send_urgent(&raw);
    raw.send(&message(2, DEVICE_INFO, COMMAND, &[32_u32, 0, 0, 0].map(u32::to_le_bytes).concat()));
    raw.0.shutdown(Shutdown::Write).unwrap();
    assert!(raw.receive().is_none(), "the byte is the first of a header that makes no sense");
    drop(raw);
    world.ends_well();
}

#[test]
fn a_descriptor_with_an_urgent_byte_before_the_handshake_does_not_hang_the_server() {
    let mut world = World::new();
    let mut raw = world.connect();
    world.send_urgent(&raw);
    raw.send(&message(1, 1, COMMAND, b"\0\0\0\0{}\0"));
    raw.0.shutdown(Shutdown::Write).unwrap();
    assert!(raw.receive().is_none(), "the server hangs up");
    drop(raw);
    world.ends_well();
}

#[test]
fn a_descriptor_with_an_urgent_byte_and_nothing_else_does_not_hang_the_server() {
    let mut world = World::new();
    let mut silent = world.connect();
    world.send_urgent(&silent);
    silent.0.shutdown(Shutdown::Write).unwrap();
    assert!(silent.receive().is_none(), "the server hangs up");
    let idle = Raw::negotiated(&world.host.path("vm.sock")).0;
    world.send_urgent(&idle);
    drop(idle);
    world.ends_well();
}

#[test]
fn a_descriptor_with_an_urgent_byte_to_a_busy_server_does_not_hang_it() {
    let mut world = World::new();
    let first = Raw::negotiated(&world.host.path("vm.sock")).0;
    let mut second = world.connect();
    world.send_urgent(&second);
    second.send(&message(1, 1, COMMAND, b"\0\0\0\0{}\0"));
    assert!(second.receive().is_none(), "the server hangs up");
    drop((first, second));
    world.ends_well();
}

#[test]
fn a_descriptor_behind_others_that_were_cut_off_does_not_hang_the_server() {
    let mut world = World::new();
    let mut raw = Raw::negotiated(&world.host.path("vm.sock")).0;
    let bytes = message(2, DEVICE_INFO, COMMAND, &[32_u32, 0, 0, 0].map(u32::to_le_bytes).concat());
    let (reader, _writer) = std::io::pipe().unwrap();
    send(&raw, &bytes[..8], &[reader.as_fd(); 253], SendFlags::empty());
    send(&raw, &bytes[8..], &[reader.as_fd()], SendFlags::empty());
    world.send_lingering(&raw, SendFlags::empty());
    assert!(raw.receive().is_none(), "the server hangs up");
    drop(raw);
    world.ends_well();
}
