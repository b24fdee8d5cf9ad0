use std::io::Write;
use std::os::unix::net::UnixStream;

use super::*;
use crate::frame::{Kind, Malformed};

/// The limit of tests that expect it to pass.
const SHORT: Duration = Duration::from_millis(50);
/// The limit of tests that expect a message: no machine is that slow.
const LONG: Duration = Duration::from_secs(60);
const MOST: u32 = 4096;

fn pair() -> (UnixStream, Connection) {
    pair_with(LONG)
}

fn pair_with(limit: Duration) -> (UnixStream, Connection) {
    let (peer, ours) = UnixStream::pair().unwrap();
    (peer, Connection::new(ours.into(), limit, BusyPoll::NONE).unwrap())
}

/// A message with a body of `body`.
fn message(id: u16, body: &[u8]) -> Vec<u8> {
    let header = Header { id, command: 9, kind: Kind::Command { no_reply: false } };
    Frame { header, body }.encode(MOST).unwrap()
}

/// Sends `bytes` with `count` descriptors.
fn send_with(peer: &UnixStream, bytes: &[u8], count: usize) {
    let fds = vec![peer.as_fd(); count];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(count == 0 || control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = rustix::net::sendmsg(peer, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

#[test]
fn descriptors_belong_to_the_message_they_were_sent_with() {
    let (peer, mut ours) = pair();
    for (id, count) in [(1, 0), (2, 3), (3, 0), (4, 253)] {
        send_with(&peer, &message(id, b"body"), count);
    }
    for (id, count) in [(1, 0), (2, 3), (3, 0), (4, 253)] {
        ours.receive(MOST).unwrap();
        assert_eq!((ours.frame().header.id, ours.frame().body, ours.fds()), (id, &b"body"[..], count));
    }
}

#[test]
fn more_descriptors_than_a_message_may_have_end_it() {
    let (peer, mut ours) = pair();
    let bytes = message(1, b"body");
    send_with(&peer, &bytes[..8], 253);
    send_with(&peer, &bytes[8..], 1);
    assert!(matches!(ours.receive(MOST), Err(Broken::Descriptors)));
}

#[test]
fn an_urgent_byte_is_an_ordinary_one_with_its_descriptors() {
    let (peer, ours) = UnixStream::pair().unwrap();
    let bytes = message(1, b"body");
    let send = |bytes: &[u8], flags| {
        let fds = [peer.as_fd()];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        assert_eq!(rustix::net::sendmsg(&peer, &[IoSlice::new(bytes)], &mut control, flags), Ok(bytes.len()));
    };
    // The first is queued before the connection is made.
    send(&bytes[..1], SendFlags::OOB);
    let mut ours = Connection::new(ours.into(), LONG, BusyPoll::NONE).unwrap();
    send(&bytes[1..], SendFlags::empty());
    ours.receive(MOST).unwrap();
    assert_eq!((ours.frame().header.id, ours.frame().body, ours.fds()), (1, &b"body"[..], 2));
    send(&bytes, SendFlags::OOB); // the last byte, without descriptors
    ours.receive(MOST).unwrap();
    assert_eq!((ours.frame().body, ours.fds()), (&b"body"[..], 1));
}

#[test]
fn a_message_that_comes_byte_by_byte_is_whole() {
    let (mut peer, mut ours) = pair();
    let sender = std::thread::spawn(move || {
        message(1, &[7; 100]).iter().for_each(|byte| peer.write_all(&[*byte]).unwrap());
        peer
    });
    ours.receive(MOST).unwrap();
    assert_eq!(ours.frame().body, [7; 100]);
    drop(sender.join().unwrap());
    assert!(matches!(ours.receive(MOST), Err(Broken::End)));
}

#[test]
fn a_peer_that_closes_or_stalls_within_a_message_is_disconnected() {
    for length in 1..20 {
        let (mut peer, mut ours) = pair_with(SHORT);
        peer.write_all(&message(1, b"body")[..length]).unwrap();
        assert!(matches!(ours.receive(MOST), Err(Broken::Slow { .. })), "{length}");
        let (mut peer, mut ours) = pair();
        peer.write_all(&message(1, b"body")[..length]).unwrap();
        drop(peer);
        assert!(matches!(ours.receive(MOST), Err(Broken::Cut)), "{length}");
    }
}

#[test]
fn a_peer_that_does_not_answer_is_disconnected_when_answers_are_limited() {
    let (_peer, mut ours) = pair_with(SHORT);
    ours.limit_waits(true).unwrap();
    assert!(matches!(ours.receive(MOST), Err(Broken::Slow { what: "answer", .. })));
}

#[test]
fn a_peer_that_does_not_read_is_disconnected() {
    let (_peer, ours) = pair_with(SHORT);
    let header = Header { id: 0, command: 9, kind: Kind::Command { no_reply: false } };
    let data = vec![0; 1 << 20];
    let sent = (0..64).find_map(|_| ours.send(header, [&data, &[]], &[], u32::MAX).err());
    assert!(matches!(sent, Some(Broken::Slow { .. })));
}

#[test]
fn a_long_message_in_two_parts_arrives_as_one() {
    let (peer, ours) = UnixStream::pair().unwrap();
    let patient = |socket: UnixStream| Connection::new(socket.into(), LONG, BusyPoll::NONE).unwrap();
    let (mut theirs, ours) = (patient(peer), patient(ours));
    let reader = std::thread::spawn(move || {
        theirs.receive(u32::MAX).unwrap();
        (theirs.frame().body.to_vec(), theirs.fds())
    });
    let (first, second) = (vec![1; 700_000], vec![2; 900_000]);
    let header = Header { id: 0, command: 9, kind: Kind::Command { no_reply: false } };
    ours.send(header, [&first, &second], &[ours.as_fd()], u32::MAX).unwrap();
    assert!(reader.join().unwrap() == ([first, second].concat(), 1));
}

#[test]
fn a_closer_wakes_the_waiting_thread() {
    let (_peer, mut ours) = pair();
    let closer = ours.closer().unwrap();
    let waits = std::thread::spawn(move || matches!(ours.receive(MOST), Err(Broken::End)));
    closer.close();
    assert!(waits.join().unwrap());
}

#[test]
fn a_body_is_not_waited_for_when_its_head_is_wrong() {
    let (mut peer, mut ours) = pair();
    let mut bytes = message(1, b"");
    bytes[4..8].copy_from_slice(&5000_u32.to_le_bytes());
    peer.write_all(&bytes).unwrap();
    assert!(matches!(ours.receive(MOST), Err(Broken::Malformed(Malformed::TooLong { size: 5000, .. }))));
}

#[test]
fn short_messages_may_be_read_ahead_and_descriptors_stay_with_theirs() {
    let (peer, mut ours) = pair();
    let sent = [(1, 0, 0), (2, 3, 0), (3, 16, 2), (4, 0, 0), (5, 40, 1), (6, 100, 0)];
    for (id, length, count) in sent {
        send_with(&peer, &message(id, &vec![7; length]), count);
    }
    for (id, length, count) in sent {
        ours.receive(MOST).unwrap();
        assert_eq!((ours.frame().header.id, ours.frame().body.len(), ours.fds()), (id, length, count));
    }
    drop(peer);
    assert!(matches!(ours.receive(MOST), Err(Broken::End)));
}
