//! Any bytes to the device's server, and the required properties of its replies. The fuzz targets use it too.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use egm_device::device::Function;
use egm_vfio_wire::frame::{Kind, split};
use egm_vfio_wire::message::Command;
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{BusyPoll, Connection};

/// No reply is longer than the largest transfer with its heads.
const MOST: u32 = (1 << 20) + 80;

/// Sends `bytes` and closes; returns the number of messages that the server took: only answered ones if it closed the
/// connection.
///
/// # Panics
/// When a reply is malformed, has no request, comes twice or out of order, or is missing.
pub(crate) fn talk(function: &Function, bytes: &[u8]) -> usize {
    let (mut client, theirs) = UnixStream::pair().expect("a socket");
    let (outcome, replies) = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let limit = Duration::from_secs(60);
            let mut connection = Connection::new(theirs.into(), limit, BusyPoll::NONE).expect("a connection");
            serve(&mut connection, &mut function.connect())
        });
        let mut reader = client.try_clone().expect("a descriptor");
        let replies = scope.spawn(move || {
            let mut replies = Vec::new();
            // The server may close the connection before it has read all.
            let _ = reader.read_to_end(&mut replies);
            replies
        });
        let _ = client.write_all(bytes);
        let _ = client.shutdown(Shutdown::Write);
        (server.join().expect("the server panicked"), replies.join().expect("a reader"))
    });
    let (mut expected, mut messages, mut rest) = (Vec::new(), 0, bytes);
    while let Ok(Some((frame, after))) = split(rest, MOST) {
        let (header, first) = (frame.header, messages == 0);
        let no_reply = matches!(header.kind, Kind::Command { no_reply: true });
        // The handshake is answered even when no reply is requested.
        if !no_reply || (first && header.command == Command::Version.number()) {
            expected.push((header.id, header.command));
        }
        (messages, rest) = (messages + 1, after);
    }
    let (mut answered, mut rest) = (Vec::new(), &replies[..]);
    while let Some((frame, after)) = split(rest, MOST).expect("a reply is a frame") {
        assert!(matches!(frame.header.kind, Kind::Reply { .. }), "the device asks for nothing");
        answered.push((frame.header.id, frame.header.command));
        rest = after;
    }
    assert!(rest.is_empty(), "half a reply");
    if outcome.is_ok() {
        assert_eq!(answered, expected, "every request has its answer");
        return messages;
    }
    assert!(expected.starts_with(&answered), "{answered:?} of {expected:?}");
    answered.len()
}
