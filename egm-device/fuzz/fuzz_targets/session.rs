//! Both sides of a connection, without sockets, hear any messages: each reply is to what was asked, once.
#![no_main]

use egm_vfio_wire::frame::split;
use egm_vfio_wire::message::{Access, Capabilities, Request};
use egm_vfio_wire::session::client::{Client, Received};
use egm_vfio_wire::session::server::{Server, Step};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

mod messages;

// The first byte is no message's: so many descriptors come with each.
fuzz_mutator!(|data: &mut [u8], size: usize, most: usize, seed: u32| {
    match data.split_first_mut() {
        Some((_, data)) if seed % 64 != 0 => {
            1 + messages::mutate(data, size.saturating_sub(1), most - 1, seed)
        }
        _ => libfuzzer_sys::fuzzer_mutate(data, size, most),
    }
});

fn ours() -> Capabilities {
    Capabilities { max_msg_fds: Some(8), max_data_xfer_size: Some(4096), ..Capabilities::default() }
}

fuzz_target!(|input: (u8, &[u8])| {
    let (fds, bytes) = (usize::from(input.0 % 20), input.1);
    let (mut client, mut server) = (Client::new(ours()), Server::new(ours()));
    let (handshake, _) = client.negotiate();
    let mut waiting = vec![handshake.id];
    let (mut rest, mut count) = (bytes, 0);
    while let Ok(Some((frame, after))) = split(rest, server.most()) {
        rest = after;
        let received = server.take(frame, fds);
        count += usize::from(received.is_ok());
        match received {
            Ok(Step::Serve(ticket, request)) => {
                assert!(request.takes(fds), "descriptors that the request has no use for");
                let done = ticket.done();
                assert!(
                    done.is_none_or(
                        |reply| (reply.id, reply.command) == (frame.header.id, frame.header.command)
                    )
                );
            }
            Ok(Step::Reply(reply, _)) => assert_eq!(reply.id, frame.header.id),
            Ok(Step::Answer(_)) => panic!("nothing was asked"),
            Ok(Step::Nothing) | Err(_) => {}
        }
        match client.take(frame, fds) {
            Ok(Received::Negotiated(_)) => {
                waiting.clear();
                let read = Request::RegionRead(Access { offset: 0, region: 0, count: 4 });
                waiting
                    .extend((0..3).filter_map(|_| client.ask(&read, 0, false).ok()).map(|header| header.id));
            }
            Ok(Received::Answer { id, .. }) => {
                let found = waiting.iter().position(|asked| *asked == id).expect("an answer to nothing");
                waiting.swap_remove(found);
            }
            Ok(_) | Err(_) => {}
        }
    }
    messages::count(count);
});
