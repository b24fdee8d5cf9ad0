use proptest::prelude::*;

use super::client::{Client, Received, Unsendable};
use super::server::{Server, Step};
use super::*;
use crate::frame::{Frame, split};
use crate::message::{Access, ByFile, Call, Command, DmaAccess, DmaMap, Query, Request};

fn ours() -> Capabilities {
    Capabilities { max_msg_fds: Some(8), max_data_xfer_size: Some(4096), ..Capabilities::default() }
}

/// Both sides after the handshake.
fn agreed() -> (Client, Server) {
    let (mut client, mut server) = (Client::new(ours()), Server::new(ours()));
    let (header, body) = client.negotiate();
    let Ok(Step::Reply(header, body)) = server.take(Frame { header, body: &body }, 0) else {
        panic!("refused")
    };
    let received = client.take(Frame { header, body: &body }, 0).unwrap();
    assert!(matches!(received, Received::Negotiated(version) if version.capabilities == ours()));
    (client, server)
}

fn body(request: &Request<'_>) -> Vec<u8> {
    let mut body = Vec::new();
    request.encode(&mut body);
    body
}

fn command(command: Command, no_reply: bool) -> Header {
    Header { id: 7, command: command.number(), kind: Kind::Command { no_reply } }
}

const ACCESS: Access = Access { offset: 0, region: 0, count: 4 };

#[test]
fn a_handshake_agrees_on_limits_and_the_older_minor_version() {
    let (client, server) = agreed();
    assert_eq!(client.limits().map(|limits| (limits.fds, limits.data)), Some((8, 4096)));
    assert_eq!(server.limits(), client.limits());

    let mut server = Server::new(ours());
    let body = [0, 0, 9, 0];
    let Ok(Step::Reply(_, reply)) =
        server.take(Frame { header: command(Command::Version, false), body: &body }, 0)
    else {
        panic!("refused")
    };
    assert_eq!(Version::decode(&reply).map(|version| (version.major, version.minor)), Ok((0, 1)));
}

#[test]
fn a_reply_names_only_what_was_proposed() {
    let all =
        Capabilities { pgsizes: Some(4096), write_multiple: Some(true), max_dma_maps: Some(9), ..ours() };
    let proposed = |text: &str| {
        let mut server = Server::new(all.clone());
        let body = [&[0, 0, 0, 0], text.as_bytes(), &[0]].concat();
        let frame = Frame { header: command(Command::Version, false), body: &body };
        let Ok(Step::Reply(_, reply)) = server.take(frame, 0) else { panic!("refused") };
        Version::decode(&reply).unwrap().capabilities
    };
    assert_eq!(proposed("{}"), ours());
    let both = proposed("{\"capabilities\":{\"pgsizes\":4096,\"write_multiple\":false}}");
    assert_eq!((both.pgsizes, both.write_multiple, both.max_dma_maps), (Some(4096), Some(true), None));
}

#[test]
fn a_server_that_refuses_its_client_reports_the_reason() {
    let mut client = Client::new(ours());
    let (header, _) = client.negotiate();
    let reply = Header { kind: Kind::Reply { error: Some(16) }, ..header };
    assert_eq!(client.take(Frame { header: reply, body: &[] }, 0), Err(Fault::Refused { errno: 16 }));
}

#[test]
fn nothing_comes_before_the_handshake_and_nothing_after_a_fault() {
    let mut server = Server::new(ours());
    let reset = Frame { header: command(Command::Reset, false), body: &[] };
    assert_eq!(server.take(reset, 0), Err(Fault::NotNegotiated { command: 13 }));
    assert_eq!(server.take(reset, 0), Err(Fault::Closed));

    let mut client = Client::new(ours());
    assert_eq!(client.ask(&Request::Reset, 0, false), Err(Unsendable::NotReady));
    let read = Frame { header: command(Command::DmaRead, false), body: &[0; 16] };
    assert_eq!(client.take(read, 0), Err(Fault::NotNegotiated { command: 11 }));
}

#[test]
fn another_major_version_or_a_newer_minor_one_in_a_reply_ends_it() {
    let mut server = Server::new(ours());
    let version = Frame { header: command(Command::Version, false), body: &[1, 0, 0, 0] };
    assert_eq!(server.take(version, 0), Err(Fault::Version { major: 1, minor: 0 }));

    let mut client = Client::new(ours());
    let (header, _) = client.negotiate();
    let reply = Header { kind: Kind::Reply { error: None }, ..header };
    let newer = client.take(Frame { header: reply, body: &[0, 0, 2, 0] }, 0);
    assert_eq!(newer, Err(Fault::Version { major: 0, minor: 2 }));
}

#[test]
fn a_request_that_makes_no_sense_is_refused_and_the_next_is_served() {
    let (_, mut server) = agreed();
    let mut refused = |header, body: &[u8], fds| match server.take(Frame { header, body }, fds) {
        Ok(Step::Reply(reply, body)) if body.is_empty() => reply.kind == Kind::Reply { error: Some(22) },
        Ok(Step::Nothing) => true,
        _ => false,
    };
    let map = body(&Request::DmaMap(DmaMap {
        read: true,
        write: true,
        offset: 0,
        address: 0,
        size: 4096,
        by_file: ByFile::Any,
    }));
    assert!(refused(Header { command: 99, ..command(Command::Reset, false) }, &[], 0));
    assert!(refused(command(Command::DmaMap, false), &map[..31], 0));
    assert!(refused(command(Command::DmaMap, true), &map, 2), "two descriptors");
    assert!(refused(command(Command::Version, false), &[0; 4], 0), "a second handshake");
    assert!(refused(
        command(Command::RegionRead, false),
        &body(&Request::RegionRead(Access { count: 4097, ..ACCESS })),
        0
    ));
    assert!(!refused(command(Command::DmaMap, false), &map, 1));
    assert_eq!(server.refused(), 5);
}

#[test]
fn requests_sent_ahead_are_answered_whatever_their_order() {
    let (mut client, mut server) = agreed();
    let requests =
        [Request::RegionRead(ACCESS), Request::Reset, Request::IrqInfo(Query { room: 16, index: 0 })];
    let headers = requests.each_ref().map(|request| client.ask(request, 0, false).unwrap());
    let mut replies = headers.map(|header| {
        let body =
            requests.iter().find(|request| request.command().number() == header.command).map(body).unwrap();
        let Ok(Step::Serve(ticket, _)) = server.take(Frame { header, body: &body }, 0) else {
            panic!("refused")
        };
        ticket.done().unwrap()
    });
    replies.reverse();
    for (reply, asked) in replies.into_iter().zip(headers.iter().rev()) {
        let received = client.take(Frame { header: reply, body: &[1] }, 0);
        assert_eq!(received, Ok(Received::Answer { id: asked.id, outcome: Ok(&[1]) }));
    }
}

#[test]
fn a_request_without_a_reply_gets_none() {
    let (mut client, mut server) = agreed();
    let header = client.ask(&Request::Reset, 0, true).unwrap();
    let Ok(Step::Serve(ticket, Request::Reset)) = server.take(Frame { header, body: &[] }, 0) else {
        panic!()
    };
    assert_eq!(ticket.refused(5), None);
    let reply = Header { kind: Kind::Reply { error: None }, ..header };
    assert_eq!(
        client.take(Frame { header: reply, body: &[] }, 0),
        Err(Fault::Unasked { id: header.id, command: 13 })
    );
}

#[test]
fn a_reply_is_accepted_once_and_only_to_the_command_that_was_asked() {
    let (mut client, _) = agreed();
    let header = client.ask(&Request::Reset, 0, false).unwrap();
    let reply = Header { kind: Kind::Reply { error: Some(0) }, ..header };
    let frame = Frame { header: reply, body: &[] };
    assert_eq!(client.take(frame, 0), Ok(Received::Answer { id: header.id, outcome: Err(0) }));
    assert_eq!(client.take(frame, 0), Err(Fault::Unasked { id: header.id, command: 13 }));

    let (mut client, _) = agreed();
    let header = client.ask(&Request::Reset, 0, false).unwrap();
    let other = Header { command: 4, kind: Kind::Reply { error: None }, ..header };
    assert!(matches!(client.take(Frame { header: other, body: &[] }, 0), Err(Fault::Unasked { .. })));
}

#[test]
fn descriptors_come_with_the_replies_that_have_some() {
    let take = |request: Request<'_>, fds| {
        let (mut client, _) = agreed();
        let header = client.ask(&request, 0, false).unwrap();
        let reply = Header { kind: Kind::Reply { error: None }, ..header };
        client.take(Frame { header: reply, body: &[] }, fds).is_ok()
    };
    let region = || Request::RegionInfo(Query { room: 32, index: 0 });
    assert!(take(region(), 1) && !take(region(), 2) && !take(Request::Reset, 1));
}

#[test]
fn a_client_keeps_to_the_server_s_limits() {
    let (mut client, _) = agreed();
    let limited = |sent| matches!(sent, Err(Unsendable::Limit { .. }));
    assert!(limited(client.ask(&Request::RegionRead(Access { count: 4097, ..ACCESS }), 0, false)));
    assert!(limited(client.ask(&Request::Reset, 9, false)));
    assert!(limited(client.ask(&Request::WriteMulti(crate::message::Writes::of(&[]).unwrap()), 0, false)));
    let sent = (0..300).filter(|_| client.ask(&Request::Reset, 0, false).is_ok());
    assert_eq!(sent.count(), 256);
}

#[test]
fn a_server_may_ask_for_memory_within_the_client_s_limits() {
    let (mut client, _) = agreed();
    let mut ask = |command_: Command, count, data: &[u8]| {
        let mut body = Vec::new();
        DmaAccess { address: 0x1000, count }.encode(&mut body);
        body.extend_from_slice(data);
        match client.take(Frame { header: command(command_, false), body: &body }, 0).unwrap() {
            Received::Asked(_, Call::Read(access)) => Some((access.count, Vec::new())),
            Received::Asked(_, Call::Write(access, data)) => Some((access.count, data.to_vec())),
            Received::Refuse(Some(_)) => None,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask(Command::DmaRead, 8, &[]), Some((8, vec![])));
    assert_eq!(ask(Command::DmaWrite, 2, &[1, 2, 3]), Some((2, vec![1, 2])));
    assert_eq!(ask(Command::DmaRead, 4097, &[]), None);
    assert_eq!(ask(Command::DmaWrite, 2, &[1]), None);
    assert_eq!(ask(Command::Reset, 0, &[]), None);
}

proptest! {
    #[test]
    fn any_bytes_to_either_side_are_taken_in_as_many_steps_as_there_are_messages(
        frames in prop::collection::vec(
            (0..4_u16, 0..20_u16, prop::sample::select(vec![0, 1, 0x10, 0x21]), prop::collection::vec(any::<u8>(), 0..64)),
            0..16
        ),
        fds in 0..4_usize,
    ) {
        let (mut client, mut server) = agreed();
        let asked = client.ask(&Request::Reset, 0, false).map(|header| header.id).ok();
        let mut bytes = Vec::new();
        for (id, command, flags, body) in frames {
            let size = 16 + u32::try_from(body.len()).unwrap();
            bytes.extend([id, command].into_iter().flat_map(u16::to_le_bytes));
            bytes.extend([size, flags, 5].into_iter().flat_map(u32::to_le_bytes));
            bytes.extend(body);
        }
        let mut rest = &bytes[..];
        while let Ok(Some((frame, after))) = split(rest, server.most()) {
            rest = after;
            if let Ok(Step::Serve(ticket, _)) = server.take(frame, fds) {
                let _ = ticket.done();
            }
            if let Ok(Received::Answer { id, .. }) = client.take(frame, fds) {
                prop_assert_eq!(Some(id), asked);
            }
        }
        prop_assert!(rest.is_empty());
    }
}

#[test]
fn a_server_asks_one_thing_at_a_time_and_accepts_only_its_answer() {
    let (_, mut server) = agreed();
    let read = Call::Read(DmaAccess { address: 0x1000, count: 2 });
    let asked = server.ask(&read).unwrap();
    assert_eq!(server.ask(&read), None);
    let reply = |id, command, body: &'static [u8]| Frame {
        header: Header { id, command, kind: Kind::Reply { error: None } },
        body,
    };
    let reset = Frame { header: command(Command::Reset, false), body: &[] };
    assert!(matches!(server.take(reset, 0), Ok(Step::Serve(..))), "the client may go on meanwhile");
    assert_eq!(server.take(reply(asked.id, 11, &[1]), 0), Ok(Step::Answer(Ok(&[1]))));
    assert!(server.ask(&read).is_some());
    assert!(matches!(server.take(reply(asked.id, 11, &[1]), 0), Err(Fault::Unasked { .. })), "an old answer");

    let (_, mut server) = agreed();
    assert_eq!(
        server.ask(&Call::Read(DmaAccess { address: 0, count: 4097 })),
        None,
        "the client takes no more"
    );
    assert_eq!(Server::new(ours()).ask(&read), None);
}
