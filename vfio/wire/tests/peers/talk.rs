//! Our client and our server, by every message that a client sends.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::frame::{Frame, Header, Kind, Malformed, split};
use egm_vfio_wire::message::{
    Access, ByFile, Command, DeviceInfo, DmaMap, DmaUnmap, IrqAction, IrqData, Request, SetIrqs,
};
use egm_vfio_wire::socket::{Broken, BusyPoll, Connection};
use rustix::event::{EventfdFlags, eventfd};

use crate::toy::{LIMIT, MEMORY, Toy, VECTORS};

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn fired(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

const SET: SetIrqs<'_> =
    SetIrqs { index: 2, start: 0, count: 0, action: IrqAction::Trigger, data: IrqData::Eventfd };
const MAP: DmaMap = DmaMap {
    read: true,
    write: true,
    offset: 0x1000,
    address: 0x8000_0000,
    size: 0x2000,
    by_file: ByFile::Any,
};

#[test]
fn a_client_gets_the_device_and_its_regions() {
    let (mut client, server) = Toy::new().serve(BusyPoll::NONE);
    assert_eq!(client.device_info().unwrap(), DeviceInfo { resettable: true, regions: 9, irqs: 5 });
    let (registers, file) = client.region_info(0).unwrap();
    assert_eq!((registers.size, registers.mmap, file.is_some()), (0x1000, false, false));
    let (memory, file) = client.region_info(2).unwrap();
    assert_eq!((memory.size, memory.mmap, memory.areas.len()), (MEMORY, true, 2));
    std::fs::File::from(file.unwrap()).write_all_at(b"through the file", 0x2000).unwrap();
    let mut data = [0; 16];
    client.read(2, 0x2000, &mut data).unwrap();
    assert_eq!(&data, b"through the file");
    assert_eq!(client.region_info(8).unwrap().0.size, 0);
    assert_eq!(client.irq_info(2).unwrap().count, VECTORS);
    drop(client);
    let (toy, outcome) = server.join().unwrap();
    assert!(outcome.is_ok() && toy.left == 1);
}

#[test]
fn registers_remember_and_a_reset_clears_them() {
    let (mut client, _server) = Toy::new().serve(BusyPoll::NONE);
    client.write(0, 8, &[1, 2, 3, 4]).unwrap();
    let mut data = [0; 8];
    client.read(0, 4, &mut data).unwrap();
    assert_eq!(data, [0, 0, 0, 0, 1, 2, 3, 4]);
    client.reset().unwrap();
    client.read(0, 4, &mut data).unwrap();
    assert_eq!(data, [0; 8]);
}

#[test]
fn an_access_that_leaves_its_region_is_refused() {
    let (mut client, _server) = Toy::new().serve(BusyPoll::NONE);
    let mut data = [0; 4];
    for (region, offset) in [(0, 0xffe), (0, 0x1000), (0, 1 << 40), (1, 0), (9, 0)] {
        let write = client.write(region, offset, &[1; 4]);
        assert!(matches!(write, Err(CallError::Refused { .. })), "{region} {offset:#x}");
        let read = client.read(region, offset, &mut data);
        assert!(matches!(read, Err(CallError::Refused { .. })), "{region} {offset:#x}");
    }
    client.read(0, 0xffc, &mut data).unwrap();
    assert_eq!(data, [0; 4]);
}

#[test]
fn more_than_a_transfer_holds_goes_in_parts() {
    let (mut client, _server) = Toy::new().serve(BusyPoll::NONE);
    let data: Vec<u8> = (0..MEMORY).map(|at| (at >> 12).to_le_bytes()[0]).collect();
    client.write(2, 0, &data).unwrap();
    let mut read = vec![0; data.len()];
    client.read(2, 0, &mut read).unwrap();
    assert!(read == data);
}

#[test]
fn memory_is_given_and_taken_away() {
    let (mut client, server) = Toy::new().serve(BusyPoll::NONE);
    let file = Toy::new().memory;
    file.write_all_at(b"mine", 0x1000).unwrap();
    client.dma_map(MAP, Some(file.as_fd())).unwrap();
    // For example a BAR of another function: known, but its bytes cannot be reached.
    client.dma_map(DmaMap { address: 0x9000_0000, ..MAP }, None).unwrap();
    let again = client.dma_map(MAP, None).unwrap_err();
    assert!(again.stands() && matches!(again, CallError::Refused { command: Command::DmaMap, .. }));
    client.dma_unmap(DmaUnmap::Window { address: MAP.address, size: MAP.size }).unwrap();
    let gone = client.dma_unmap(DmaUnmap::Window { address: MAP.address, size: MAP.size });
    assert!(matches!(gone, Err(CallError::Refused { .. })));
    client.dma_unmap(DmaUnmap::All).unwrap();
    drop(client);
    assert!(server.join().unwrap().1.is_ok());
}

#[test]
fn eventfds_of_all_vectors_go_in_as_many_messages_as_they_need() {
    let (mut client, _server) = Toy::new().serve(BusyPoll::NONE);
    let events: Vec<_> = (0..VECTORS).map(|_| event()).collect();
    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    client.set_irqs(SetIrqs { count: VECTORS, ..SET }, &fds).unwrap();
    client.set_irqs(SetIrqs { start: 253, count: 1, data: IrqData::None, ..SET }, &[]).unwrap();
    let flags = SetIrqs { start: 7, count: 3, data: IrqData::Bool(&[1, 0, 1]), ..SET };
    client.set_irqs(flags, &[]).unwrap();
    let fired: Vec<_> = (0..events.len()).filter(|index| fired(&events[*index])).collect();
    assert_eq!(fired, [7, 9, 253]);
    let beyond = client.set_irqs(SetIrqs { start: VECTORS, count: 1, ..SET }, &fds[..1]);
    assert!(matches!(beyond, Err(CallError::Refused { .. })));
}

#[test]
fn the_next_client_finds_the_device_as_the_last_one_left_it() {
    let (mut client, server) = Toy::new().serve(BusyPoll::NONE);
    client.write(0, 0, b"kept").unwrap();
    client.dma_map(MAP, None).unwrap();
    drop(client);
    let (toy, _) = server.join().unwrap();
    assert_eq!((toy.left, toy.windows.len()), (1, 0));
    let (mut client, _server) = toy.serve(BusyPoll::NONE);
    let mut data = [0; 4];
    client.read(0, 0, &mut data).unwrap();
    assert_eq!(&data, b"kept");
    client.dma_map(MAP, None).unwrap();
}

#[test]
fn a_server_that_sleeps_and_one_that_looks_answer_alike() {
    let (mut client, server) = Toy::new().serve(BusyPoll::of(Duration::from_micros(200)));
    for round in 0..200_u32 {
        client.write(0, 0, &round.to_le_bytes()).unwrap();
        let mut data = [0; 4];
        client.read(0, 0, &mut data).unwrap();
        assert_eq!(u32::from_le_bytes(data), round);
    }
    drop(client);
    assert!(server.join().unwrap().1.is_ok());
}

/// Bytes of requests, some without a reply, sent all at once: the replies in their order.
#[test]
fn requests_sent_ahead_are_answered_in_their_order() {
    let (mut raw, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let mut connection = Connection::new(theirs.into(), LIMIT, BusyPoll::NONE).unwrap();
        egm_vfio_wire::serve::serve(&mut connection, &mut Toy::new())
    });
    let access = Access { offset: 0, region: 0, count: 4 };
    let write = egm_vfio_wire::message::Write { access, data: &[5; 4] };
    let requests = [
        (Request::RegionWrite(write), true),
        (Request::RegionRead(access), false),
        (Request::Reset, true),
        (Request::RegionRead(access), false),
    ];
    let mut bytes = vec![1, 0, 1, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for ((request, no_reply), id) in requests.iter().zip(10..) {
        let mut body = Vec::new();
        request.encode(&mut body);
        body.extend_from_slice(request.data());
        let command = request.command().number();
        let header = Header { id, command, kind: Kind::Command { no_reply: *no_reply } };
        bytes.extend(Frame { header, body: &body }.encode(4096).unwrap());
    }
    raw.write_all(&bytes).unwrap();
    raw.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(server.join().unwrap().is_ok());
    let mut replies = Vec::new();
    raw.read_to_end(&mut replies).unwrap();
    let mut rest = &replies[..];
    let mut seen = Vec::new();
    while let Some((frame, after)) = split(rest, 1 << 20).unwrap() {
        seen.push((frame.header.id, frame.body.last().copied()));
        rest = after;
    }
    assert_eq!(seen, [(1, Some(0)), (11, Some(5)), (13, Some(0))]);
}

/// A server that agrees and then does `after` with what comes; its client waits for an answer as long as `limit`.
fn rogue(limit: Duration, after: impl FnOnce(&mut UnixStream, &[u8]) + Send + 'static) -> Client {
    let (mut raw, ours) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut handshake = [0; 4096];
        let _ = raw.read(&mut handshake).unwrap();
        raw.write_all(&[0, 0, 1, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        let mut request = [0; 4096];
        let length = raw.read(&mut request).unwrap();
        after(&mut raw, &request[..length]);
    });
    Client::new(Connection::new(ours.into(), limit, BusyPoll::NONE).unwrap()).unwrap()
}

#[test]
fn a_server_that_is_silent_gone_or_wrong_is_lost_at_once_for_every_later_call() {
    type After = Box<dyn FnOnce(&mut UnixStream, &[u8]) + Send>;
    let silent: After = Box::new(|raw, _| while raw.read(&mut [0; 64]).is_ok_and(|got| got > 0) {});
    let gone: After = Box::new(|_, _| {});
    let other: After = Box::new(|raw, request| {
        let mut reply = request.to_vec();
        reply[8] = 1;
        reply[0] ^= 0xff;
        raw.write_all(&reply).unwrap();
    });
    let short: After = Box::new(|raw, request| {
        let reply = [&request[..4], &16_u32.to_le_bytes(), &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
        raw.write_all(&reply).unwrap();
    });
    let chatter: After = Box::new(|raw, _| {
        let command = [&[0, 0, 13, 0, 16], &[0; 11][..]].concat();
        while raw.write_all(&command).is_ok() {}
    });
    // The right answer, but for what follows its four bytes.
    let long: After = Box::new(|raw, request| {
        let body = [&request[16..], &[0; 4], &vec![0; 4 << 20][..]].concat();
        let size = u32::try_from(16 + body.len()).unwrap();
        let head = [&request[..4], &size.to_le_bytes(), &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
        let _ = raw.write_all(&[head, body].concat());
    });
    for (what, after) in [
        ("silent", silent),
        ("gone", gone),
        ("other", other),
        ("short", short),
        ("chatter", chatter),
        ("long", long),
    ] {
        // Only a server that never answers may exceed it: a slow machine must not.
        let limit = if matches!(what, "silent" | "chatter") { Duration::from_millis(200) } else { LIMIT };
        let mut client = rogue(limit, after);
        let first = client.read(0, 0, &mut [0; 4]).unwrap_err();
        let expected = match what {
            "silent" => matches!(first, CallError::Lost(Broken::Slow { .. })),
            "gone" => matches!(first, CallError::Lost(Broken::End)),
            "other" => matches!(first, CallError::Fault(_)),
            "short" => matches!(first, CallError::Wrong { .. }),
            "long" => matches!(first, CallError::Lost(Broken::Malformed(Malformed::TooLong { .. }))),
            _ => !first.stands(),
        };
        assert!(expected, "{what}: {first:?}");
        let later = client.reset().unwrap_err();
        assert!(
            matches!(&later, CallError::Gone { why } if *why == first.in_one_line()),
            "{what}: {later:?}"
        );
    }
}

#[test]
fn an_error_reply_without_an_errno_is_an_error_and_the_connection_stands() {
    let mut client = rogue(LIMIT, |raw, request| {
        for _ in 0..2 {
            let reply = [&request[..4], &16_u32.to_le_bytes(), &[0x21, 0, 0, 0, 0, 0, 0, 0]].concat();
            raw.write_all(&reply).unwrap();
            let _ = raw.read(&mut [0; 64]).unwrap();
        }
    });
    let refused = client.reset().unwrap_err();
    assert!(matches!(refused, CallError::Refused { .. }) && refused.stands());
}

/// Messages that make servers in use fail (their `VERSION` of 0 or 19 bytes, one without a NUL) or that they accept.
#[test]
fn a_client_that_breaks_the_handshake_costs_its_own_connection_only() {
    let version = |size: u32, body: &[u8]| {
        let head = [&[1, 0, 1, 0], &size.to_le_bytes()[..], &[0; 8]].concat();
        [&head, body].concat()
    };
    let broken = [
        version(0, &[]),
        version(15, &[]),
        version(16, &[]),
        version(19, &[0; 3]),
        version(22, b"\0\0\x01\0{}"),
        version(23, b"\0\0\x01\0[]\0"),
        version(24, b"\x01\0\0\0{ }\0"),
        version(u32::MAX, b"\0\0\x01\0{}\0"),
        version(16 << 20, &[0; 64]),
    ];
    let mut toy = Toy::new();
    for bytes in broken {
        let (mut raw, theirs) = UnixStream::pair().unwrap();
        raw.write_all(&bytes).unwrap();
        raw.shutdown(std::net::Shutdown::Write).unwrap();
        let mut connection = Connection::new(theirs.into(), LIMIT, BusyPoll::NONE).unwrap();
        assert!(egm_vfio_wire::serve::serve(&mut connection, &mut toy).is_err(), "{bytes:?}");
        drop(connection);
        let mut replies = Vec::new();
        let _ = raw.read_to_end(&mut replies);
        // EINVAL where the message has an end, nothing where it has none.
        let refused = replies.len() == 16 && replies[8..] == [0x21, 0, 0, 0, 22, 0, 0, 0];
        assert!(replies.is_empty() || refused, "{bytes:?}: {replies:?}");
    }
    let (mut client, _server) = toy.serve(BusyPoll::NONE);
    client.reset().unwrap();
}

/// A client in use sends the eventfds of all vectors at once, whatever the handshake agreed on.
#[test]
fn seventeen_descriptors_and_more_are_taken_though_sixteen_are_announced() {
    let (raw, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let mut connection = Connection::new(theirs.into(), LIMIT, BusyPoll::NONE).unwrap();
        egm_vfio_wire::serve::serve(&mut connection, &mut Toy::new())
    });
    let mut raw = Connection::new(raw.into(), LIMIT, BusyPoll::NONE).unwrap();
    let command = |command: Command| Header {
        id: 1,
        command: command.number(),
        kind: Kind::Command { no_reply: false },
    };
    raw.send(command(Command::Version), [&[0, 0, 1, 0], &[]], &[], 4096).unwrap();
    raw.receive(4096).unwrap();
    let events: Vec<_> = (0..253).map(|_| event()).collect();
    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    for count in [17, 253] {
        let mut body = Vec::new();
        Request::SetIrqs(SetIrqs { count, ..SET }).encode(&mut body);
        let fds = &fds[..usize::try_from(count).unwrap()];
        raw.send(command(Command::SetIrqs), [&body, &[]], fds, 4096).unwrap();
        raw.receive(4096).unwrap();
        assert_eq!(raw.frame().header.kind, Kind::Reply { error: None });
        // As many as it names, or none: others are not guessed at.
        raw.send(command(Command::SetIrqs), [&body, &[]], &fds[1..], 4096).unwrap();
        raw.receive(4096).unwrap();
        assert_eq!(raw.frame().header.kind, Kind::Reply { error: Some(22) });
    }
    drop(raw);
    assert!(server.join().unwrap().is_ok());
}
