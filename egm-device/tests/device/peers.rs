//! Behaviour of real peers (facts of the `vfio_user` crate, cloud-hypervisor and QEMU), and attacks of hostile ones.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use egm_vfio_wire::client::{CallError, Client};
use egm_vfio_wire::message::{ByFile, DmaMap};
use egm_vfio_wire::session::Fault;
use egm_vfio_wire::socket::{BusyPoll, Connection};

use crate::raw::{COMMAND, MAP, NO_REPLY, READ, Raw, WRITE, access, message, window};
use crate::world::{BAR0, BAR2, CONFIG, LIMIT, SIZE, World, event};

/// Checks that the next client is served normally.
#[track_caller]
fn still_serves(world: &World) {
    let mut magic = [0; 4];
    world.client().read(BAR0, 0, &mut magic).unwrap();
    assert_eq!(&magic, b"EGMD");
}

#[test]
fn a_version_of_no_size_or_19_bytes_or_without_nul_costs_the_connection_only() {
    let world = World::new(&[]);
    let mut short = message(1, 1, COMMAND, &[0, 0, 0]);
    assert_eq!(short.len(), 19);
    let mut none = message(1, 1, COMMAND, &[0; 4]);
    none[4..8].fill(0);
    let no_nul = message(1, 1, COMMAND, b"\0\0\0\0{}");
    let text = message(1, 1, COMMAND, b"\0\0\0\0[[[[\0");
    short.extend([0; 64]);
    for (bytes, answer) in [(none, None), (short, Some(22)), (no_nul, Some(22)), (text, Some(22))] {
        let mut raw = Raw::connect(&world.path);
        raw.send(&bytes);
        assert_eq!(raw.receive().and_then(|(_, errno, _)| errno), answer);
        assert!(raw.receive().is_none(), "the server hangs up");
        still_serves(&world);
    }
}

#[test]
fn seventeen_descriptors_with_one_window_are_refused_and_closed() {
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    let (reader, writer) = std::io::pipe().unwrap();
    let seventeen: Vec<_> = (0..17).map(|_| OwnedFd::from(writer.try_clone().unwrap())).collect();
    raw.send_with(&message(2, MAP, COMMAND, &window(0)), &seventeen);
    assert_eq!(raw.receive(), Some((2, Some(22), vec![])));
    drop((seventeen, writer));
    // No process holds the pipe any more: it ends.
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
    raw.send(&message(3, MAP, COMMAND, &window(0)));
    assert_eq!(raw.receive().map(|(id, error, _)| (id, error)), Some((3, None)), "the connection stands");
}

#[test]
fn qemu_accepts_the_handshake() {
    let (_, version) = Raw::negotiated(&World::new(&[]).path);
    let says = version.capabilities;
    assert!(says.max_msg_fds.is_some_and(|fds| (1..=16).contains(&fds)));
    assert!(says.pgsizes.is_some_and(|sizes| sizes.is_multiple_of(4096)));
    assert_eq!((version.major, says.migration), (0, None));
}

#[test]
fn a_request_without_a_reply_gets_none_and_requests_sent_ahead_are_answered_in_order() {
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    let all = [
        message(7, MAP, NO_REPLY, &window(0)),
        // Refused, without a reply.
        message(8, MAP, NO_REPLY, &window(0)),
        message(9, WRITE, NO_REPLY, &access(0x1000, BAR2, b"ahead", 5)),
        message(10, READ, COMMAND, &access(0x1000, BAR2, &[], 5)),
        message(11, READ, COMMAND, &access(0, BAR0, &[], 4)),
    ];
    raw.send(&all.concat());
    let mut received = || raw.receive().map(|(id, error, body)| (id, error, body[16..].to_vec()));
    assert_eq!(received(), Some((10, None, b"ahead".to_vec())));
    assert_eq!(received(), Some((11, None, b"EGMD".to_vec())));
}

#[test]
fn dirty_pages_migration_and_features_are_refused_and_the_connection_stands() {
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    let feature = [[8_u32, 1 << 17].map(u32::to_le_bytes).concat(), vec![0; 8]].concat();
    let state = [16_u32, 0, 0, 0].map(u32::to_le_bytes).concat();
    for (id, command, body, errno) in [
        (1, 14, vec![0; 8], 95),
        (2, 16, feature, 25),
        (3, 17, state.clone(), 95),
        (4, 18, state, 95),
        (5, 99, vec![], 22),
    ] {
        raw.send(&message(id, command, COMMAND, &body));
        assert_eq!(raw.receive(), Some((id, Some(errno), vec![])), "command {command}");
    }
    raw.send(&message(6, READ, COMMAND, &access(0, BAR0, &[], 4)));
    assert_eq!(raw.receive().unwrap().2[16..], *b"EGMD");
}

/// The crate waits for the data of every read, so that an error reply would keep it waiting: cloud-hypervisor reads
/// only inside regions.
#[test]
fn the_crate_s_client_reads_every_region_up_to_its_last_byte() {
    let world = World::new(&[]);
    let mut client = vfio_user::Client::new(&world.path).unwrap();
    for (region, offset) in [(BAR0, 0x3ffc), (BAR2, SIZE - 4), (CONFIG, 4092)] {
        let mut data = [0; 4];
        client.region_read(region, offset, &mut data).unwrap();
        client.region_write(region, offset, &data).unwrap();
    }
    assert!((0..9).all(|region| client.region(region).is_some()));
    assert_eq!(
        (0..5).map(|irq| client.get_irq_info(irq).unwrap().count).collect::<Vec<_>>(),
        [0, 0, 3, 1, 1]
    );
}

#[test]
fn the_crate_s_client_gets_a_file_because_a_whole_slice_is_an_area_too() {
    let world = World::new(&[]);
    let client = vfio_user::Client::new(&world.path).unwrap();
    let bar = client.region(BAR2).unwrap();
    assert!(bar.file_offset.is_some());
    assert_eq!(bar.sparse_areas.iter().map(|area| (area.offset, area.size)).collect::<Vec<_>>(), [(0, SIZE)]);
    // An area ends inside its BAR, which is a power of two.
    assert!(SIZE <= bar.size && bar.size.is_power_of_two());
}

#[test]
fn the_crate_s_client_may_map_twice_reset_at_any_time_and_come_again() {
    let world = World::new(&[]);
    for _ in 0..3 {
        let mut client = vfio_user::Client::new(&world.path).unwrap();
        let file = tempfile::tempfile().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        // It ignores the refusal of the second, because the crate does not read the reply.
        client.dma_map(0, 0, 0x1000, fd).unwrap();
        let _ = client.dma_map(0, 0, 0x1000, fd);
        client.reset().unwrap();
        let mut magic = [0; 4];
        client.region_read(BAR0, 0, &mut magic).unwrap();
        assert_eq!(&magic, b"EGMD");
    }
}

#[test]
fn a_second_client_is_refused_and_the_first_goes_on() {
    let world = World::new(&[]);
    let mut first = world.client();
    let second = Client::new(Connection::connect(&world.path, LIMIT, BusyPoll::NONE).unwrap());
    assert!(matches!(second, Err(CallError::Fault(Fault::Refused { errno: 16 }))), "EBUSY: {second:?}");
    assert!(vfio_user::Client::new(&world.path).is_err());
    let mut magic = [0; 4];
    first.read(BAR0, 0, &mut magic).unwrap();
    drop(first);
    still_serves(&world);
}

#[test]
fn a_client_that_connects_and_sends_nothing_is_disconnected() {
    let world = World::new(&[]);
    let mut silent = [Raw::connect(&world.path), Raw::connect(&world.path)];
    assert!(silent.each_mut().map(Raw::receive).iter().all(Option::is_none), "they are hung up on");
    still_serves(&world);
}

#[test]
fn half_a_message_and_a_stall_ends_that_connection_and_no_other() {
    let world = World::new(&[]);
    let other = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    raw.send(&message(2, WRITE, COMMAND, &access(0, BAR2, &[7; 64], 64))[..40]);
    still_serves(&other);
    assert!(raw.receive().is_none(), "it is given up");
    still_serves(&world);
    let mut data = [0; 8];
    world.client().read(BAR2, 0, &mut data).unwrap();
    assert_eq!(data, [0; 8], "half a write is none");
}

#[test]
fn a_client_that_goes_in_the_middle_of_anything_is_followed_by_the_next() {
    let world = World::new(&[]);
    let whole = message(2, WRITE, COMMAND, &access(0, BAR2, &[7; 64], 64));
    for cut in [1, 15, 16, 17, 40, whole.len() - 1] {
        let (mut raw, _) = Raw::negotiated(&world.path);
        raw.send(&whole[..cut]);
        drop(raw);
        still_serves(&world);
    }
    // And one that never reads the replies.
    let (mut raw, _) = Raw::negotiated(&world.path);
    raw.0.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let read = message(3, READ, COMMAND, &access(0, BAR2, &[], 1 << 20));
    (0..8).for_each(|_| raw.send(&read));
    drop(raw);
    still_serves(&world);
}

#[test]
fn a_client_has_65535_windows_at_most_and_their_files_are_not_kept() {
    let world = World::new(&[]);
    let mut client = world.client();
    let (reader, writer) = std::io::pipe().unwrap();
    let map = DmaMap { read: true, write: true, offset: 0, address: 0, size: 0x1000, by_file: ByFile::Any };
    client.dma_map(map, Some(writer.as_fd())).unwrap();
    drop(writer);
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "nobody has it");
    let mapped =
        (1..0x1_0100_u64).take_while(|n| client.dma_map(DmaMap { address: n << 12, ..map }, None).is_ok());
    assert_eq!(mapped.count(), 65_534);
    drop(client);
    still_serves(&world);
}

#[test]
fn vectors_that_are_no_eventfds_are_refused() {
    let world = World::new(&[]);
    let mut client = world.client();
    let (_reader, writer) = std::io::pipe().unwrap();
    let spare = event();
    let refused =
        client.set_irqs(crate::world::SET, &[writer.as_fd(), spare.as_fd(), writer.as_fd()]).unwrap_err();
    assert!(refused.stands(), "{refused:?}");
    world.function.request_return();
    assert!(!crate::world::fired(&spare), "all are connected, or none");
    still_there(&mut client);
}

fn still_there(client: &mut Client) {
    let mut magic = [0; 4];
    client.read(BAR0, 0, &mut magic).unwrap();
    assert_eq!(&magic, b"EGMD");
}
