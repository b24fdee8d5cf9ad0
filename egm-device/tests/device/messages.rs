//! Requests that libvfio-user refuses, message by message: each gets the same errno here, and the connection stands.

use std::os::fd::OwnedFd;

use crate::raw::{COMMAND, MAP, READ, Raw, WRITE, access, message};
use crate::world::{BAR0, BAR2, CONFIG, World, event};

const UNMAP: u16 = 3;
const DEVICE_INFO: u16 = 4;
const REGION_INFO: u16 = 5;
const IO_FDS: u16 = 6;
const IRQ_INFO: u16 = 7;
const SET_IRQS: u16 = 8;

const EINVAL: u32 = 22;
const ENOENT: u32 = 2;

/// Maximum number of bytes that a client can request.
const MOST: u32 = 1 << 20;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(head: [u32; 2], longs: &[u64]) -> Vec<u8> {
    [words(&head), longs.iter().flat_map(|long| long.to_le_bytes()).collect()].concat()
}

/// The errno of the reply to `body`, or `None` where the server carries it out.
fn errno(raw: &mut Raw, command: u16, body: &[u8], fds: &[OwnedFd]) -> Option<u32> {
    let bytes = message(9, command, COMMAND, body);
    if fds.is_empty() {
        raw.send(&bytes);
    } else {
        raw.send_with(&bytes, fds);
    }
    let (id, errno, _) = raw.receive().expect("the connection stands");
    assert_eq!(id, 9);
    errno
}

/// Sends each body in turn and compares the errnos.
#[track_caller]
fn expect(command: u16, bodies: &[(&str, Vec<u8>, Option<u32>)]) {
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    for (what, body, expected) in bodies {
        assert_eq!(errno(&mut raw, command, body, &[]), *expected, "{what}");
    }
}

#[test]
fn version_that_is_short_of_another_major_or_no_json_is_answered_with_einval_and_closed() {
    let world = World::new(&[]);
    let version = |text: &str| [b"\0\0\x01\0", text.as_bytes(), b"\0"].concat();
    let capability = |text: &str| version(&format!("{{\"capabilities\":{{{text}}}}}"));
    let wrong = [
        (1, vec![0, 0, 0]),
        (1, b"\x01\0\0\0{}\0".to_vec()),
        (1, b"\0\0\x01\0{}".to_vec()),
        (1, version("{")),
        (1, version("\"")),
        (1, version("{\"capabilities\":\"23\"}")),
        (1, capability("\"max_msg_fds\":\"foo\"")),
        (1, capability("\"max_msg_fds\":-1")),
        (1, capability("\"migration\":\"23\"")),
        (1, capability("\"migration\":{\"pgsize\":\"foo\"}")),
        (1, capability("\"migration\":{\"pgsize\":4095}")),
        (1, capability("\"migration\":{\"pgsize\":0}")),
        (1, capability("\"migration\":{\"pgsize\":2048}")),
        (1, capability("\"pgsizes\":0")),
        // Any command but a version.
        (SET_IRQS, words(&[20, 0x21, 2, 0, 0])),
    ];
    for (command, body) in wrong {
        let mut raw = Raw::connect(&world.path);
        raw.send(&message(1, command, COMMAND, &body));
        let text = String::from_utf8_lossy(&body).into_owned();
        assert_eq!(raw.receive(), Some((1, Some(EINVAL), vec![])), "{text:?}");
        assert!(raw.receive().is_none(), "{text:?}: the server hangs up");
    }
    // The vfio_user crate proposes a migration page of 4096 bytes.
    let mut raw = Raw::connect(&world.path);
    raw.send(&message(1, 1, COMMAND, &capability("\"migration\":{\"pgsize\":4096}")));
    assert_eq!(raw.receive().unwrap().1, None);
}

#[test]
fn version_that_comes_with_descriptors_is_refused() {
    let world = World::new(&[]);
    let mut raw = Raw::connect(&world.path);
    raw.send_with(&message(1, 1, COMMAND, b"\0\0\x01\0{}\0"), &[event()]);
    assert_eq!(raw.receive(), Some((1, Some(EINVAL), vec![])));
    assert!(raw.receive().is_none());
}

#[test]
fn dma_map_needs_its_argsz_and_known_flags() {
    let map = |argsz, flags, address| longs([argsz, flags], &[0, address, 0x1000]);
    expect(
        MAP,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", map(32, 3, 0)[..31].to_vec(), Some(EINVAL)),
            ("argsz 31", map(31, 3, 0), Some(EINVAL)),
            ("argsz 0", map(0, 3, 0), Some(EINVAL)),
            ("unknown flag", map(32, 0x13, 0), Some(EINVAL)),
            ("all flags", map(32, u32::MAX, 0), Some(EINVAL)),
            ("mapping without a file", map(32, 7, 0), Some(EINVAL)),
            ("file access without a file", map(32, 0xb, 0), Some(EINVAL)),
            ("read and write", map(32, 3, 0), None),
            ("longer argsz", map(40, 1, 0x1000), None),
        ],
    );
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    let file = || vec![OwnedFd::from(tempfile::tempfile().unwrap())];
    assert_eq!(errno(&mut raw, MAP, &map(32, 0xf, 0), &file()), Some(EINVAL), "two ways to the file");
    assert_eq!(errno(&mut raw, MAP, &map(32, 7, 0), &file()), None);
    assert_eq!(errno(&mut raw, MAP, &map(32, 0xb, 0x1000), &file()), None);
}

#[test]
fn dma_unmap_needs_its_argsz_known_flags_and_a_window() {
    let unmap = |argsz, flags, address, size| longs([argsz, flags], &[address, size]);
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    let map = |raw: &mut Raw, address| errno(raw, MAP, &longs([32, 3], &[0, address, 0x1000]), &[]);
    assert_eq!(map(&mut raw, 0x1000), None);
    for (what, body, expected) in [
        ("no payload", vec![], Some(EINVAL)),
        ("short", unmap(24, 0, 0x1000, 0x1000)[..23].to_vec(), Some(EINVAL)),
        ("argsz 8", unmap(8, 0, 0x1000, 0x1000), Some(EINVAL)),
        ("argsz 23", unmap(23, 0, 0x1000, 0x1000), Some(EINVAL)),
        ("argsz above a transfer", unmap(MOST + 1, 0, 0x1000, 0x1000), Some(EINVAL)),
        ("dirty bitmap", unmap(24, 1, 0x1000, 0x1000), Some(EINVAL)),
        ("unknown flag", unmap(24, 4, 0x1000, 0x1000), Some(EINVAL)),
        ("all and dirty bitmap", unmap(24, 3, 0, 0), Some(EINVAL)),
        ("all and unknown flag", unmap(24, 6, 0, 0), Some(EINVAL)),
        ("all with an address", unmap(24, 2, 0x1000, 0), Some(EINVAL)),
        ("all with a size", unmap(24, 2, 0, 0x1000), Some(EINVAL)),
        ("never mapped", unmap(24, 0, 0x10_0000, 0x1000), Some(ENOENT)),
        ("half a window", unmap(24, 0, 0x1000, 0x800), Some(EINVAL)),
        ("the window", unmap(24, 0, 0x1000, 0x1000), None),
        ("the window again", unmap(24, 0, 0x1000, 0x1000), Some(ENOENT)),
        ("all of nothing", unmap(24, 2, 0, 0), None),
    ] {
        assert_eq!(errno(&mut raw, UNMAP, &body, &[]), expected, "{what}");
    }
    // QEMU unmaps an address space in ranges that are powers of two.
    assert_eq!((map(&mut raw, 0x1000), map(&mut raw, 0x3000)), (None, None));
    assert_eq!(errno(&mut raw, UNMAP, &unmap(24, 0, 0, 0x4000), &[]), None);
    assert_eq!(map(&mut raw, 0x1000), None, "both are gone");
}

#[test]
fn device_info_needs_its_payload_and_argsz() {
    expect(
        DEVICE_INFO,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", words(&[16, 0, 0]), Some(EINVAL)),
            ("argsz 15", words(&[15, 0, 0, 0]), Some(EINVAL)),
            ("whole", words(&[16, 0, 0, 0]), None),
            // The vfio_user crate counts the header.
            ("longer argsz", words(&[32, 0, 0, 0]), None),
        ],
    );
}

#[test]
fn region_info_needs_its_payload_argsz_and_an_index() {
    let info = |argsz, index| words(&[argsz, 0, index, 0, 0, 0, 0, 0]);
    expect(
        REGION_INFO,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", info(32, 0)[..31].to_vec(), Some(EINVAL)),
            ("argsz 31", info(31, 0), Some(EINVAL)),
            ("index 9", info(32, 9), Some(EINVAL)),
            ("whole", info(32, BAR2), None),
            ("larger argsz", info(u32::MAX, BAR2), None),
        ],
    );
}

#[test]
fn region_io_fds_need_argsz_no_flags_no_count_and_a_region() {
    expect(
        IO_FDS,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", words(&[16, 0, BAR0]), Some(EINVAL)),
            ("flags", words(&[512, 1, BAR0, 0]), Some(EINVAL)),
            ("count", words(&[512, 0, BAR0, 1]), Some(EINVAL)),
            ("argsz 15", words(&[15, 0, BAR0, 0]), Some(EINVAL)),
            ("argsz above a transfer", words(&[MOST + 1, 0, BAR0, 0]), Some(EINVAL)),
            ("index 9", words(&[512, 0, 9, 0]), Some(EINVAL)),
            ("no such region", words(&[512, 0, 1, 0]), Some(EINVAL)),
            ("whole", words(&[512, 0, BAR0, 0]), None),
        ],
    );
}

#[test]
fn irq_info_needs_its_payload_argsz_and_an_index() {
    expect(
        IRQ_INFO,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", words(&[16, 0, 2]), Some(EINVAL)),
            ("argsz 15", words(&[15, 0, 2, 0]), Some(EINVAL)),
            ("index 5", words(&[16, 0, 5, 0]), Some(EINVAL)),
            ("whole", words(&[16, 0, 2, 0]), None),
        ],
    );
}

/// `flags`, index, start and count of a set, with an argsz that fits.
fn set(flags: u32, index: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

#[test]
fn set_irqs_needs_argsz_one_action_one_kind_of_data_and_existing_vectors() {
    let bools = |count: usize| [set(0x22, 2, 0, 3), vec![1; count]].concat();
    expect(
        SET_IRQS,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", set(0x21, 2, 0, 0)[..19].to_vec(), Some(EINVAL)),
            ("argsz 3", words(&[3, 0x21, 2, 0, 0]), Some(EINVAL)),
            ("argsz 19", words(&[19, 0x21, 2, 0, 0]), Some(EINVAL)),
            ("bad index", set(0x21, 5, 0, 0), Some(EINVAL)),
            ("mask and unmask", set(0x19, 2, 0, 1), Some(EINVAL)),
            ("none and bool", set(0x23, 2, 0, 1), Some(EINVAL)),
            ("start beyond", set(0x21, 2, 3, 1), Some(EINVAL)),
            ("end beyond", set(0x21, 2, 2, 2), Some(EINVAL)),
            ("overflow", set(0x21, 2, u32::MAX, u32::MAX), Some(EINVAL)),
            ("kind without vectors", set(0x21, 0, 0, 0), Some(EINVAL)),
            ("mask of the error interrupt", set(0x9, 3, 0, 1), Some(EINVAL)),
            ("mask of the request interrupt", set(0x9, 4, 0, 1), Some(EINVAL)),
            ("two error interrupts", set(0x21, 3, 0, 2), Some(EINVAL)),
            ("two request interrupts", set(0x21, 4, 0, 2), Some(EINVAL)),
            ("count 0 with a start", set(0x21, 2, 1, 0), Some(EINVAL)),
            ("count 0 with a mask", set(0x9, 2, 0, 0), Some(EINVAL)),
            ("count 0 with bools", set(0x22, 2, 0, 0), Some(EINVAL)),
            ("fewer bools than vectors", bools(2), Some(EINVAL)),
            ("more bools than vectors", bools(4), Some(EINVAL)),
            ("a bool for each", bools(3), None),
            ("disable", set(0x21, 2, 0, 0), None),
        ],
    );
}

#[test]
fn set_irqs_takes_as_many_eventfds_as_vectors_and_nothing_else() {
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    let events = |count| (0..count).map(|_| event()).collect::<Vec<_>>();
    for (what, body, fds, expected) in [
        ("bools", [set(0x22, 2, 0, 1), vec![1]].concat(), events(1), Some(EINVAL)),
        ("none", set(0x21, 2, 0, 1), events(1), Some(EINVAL)),
        ("one for two", set(0x24, 2, 0, 2), events(1), Some(EINVAL)),
        ("two for one", set(0x24, 2, 0, 1), events(2), Some(EINVAL)),
        ("two for two", set(0x24, 2, 0, 2), events(2), None),
        ("none for two lets them go", set(0x24, 2, 0, 2), vec![], None),
    ] {
        assert_eq!(errno(&mut raw, SET_IRQS, &body, &fds), expected, "{what}");
    }
}

#[test]
fn region_accesses_stay_in_their_region_and_carry_the_bytes_that_they_count() {
    let read = |offset, region, count| access(offset, region, &[], count);
    expect(
        READ,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("short", read(0, BAR0, 4)[..15].to_vec(), Some(EINVAL)),
            ("index 9", read(0, 9, 4), Some(EINVAL)),
            ("far beyond configuration space", read(1 << 40, CONFIG, 4), Some(EINVAL)),
            ("behind configuration space", read(0x1000, CONFIG, 4), Some(EINVAL)),
            ("across its end", read(0xffe, CONFIG, 4), Some(EINVAL)),
            ("behind the registers", read(0x4000, BAR0, 4), Some(EINVAL)),
            ("a region that is not there", read(0, 1, 4), Some(EINVAL)),
            ("nothing, behind the end", read(0x4001, BAR0, 0), Some(EINVAL)),
            ("end above 2^64", read(u64::MAX, CONFIG, 4), Some(EINVAL)),
            ("more than a transfer", read(0, BAR2, MOST as usize + 1), Some(EINVAL)),
            ("last word", read(0xffc, CONFIG, 4), None),
            ("nothing", read(0x4000, BAR0, 0), None),
        ],
    );
    let write = |offset, region, data: &[u8], count| access(offset, region, data, count);
    expect(
        WRITE,
        &[
            ("no payload", vec![], Some(EINVAL)),
            ("fewer bytes", write(0, BAR2, &[1; 3], 4), Some(EINVAL)),
            ("more bytes", write(0, BAR2, &[1; 5], 4), Some(EINVAL)),
            ("behind configuration space", write(0x1000, CONFIG, &[1; 4], 4), Some(EINVAL)),
            ("a region that is not there", write(0, 8, &[1; 4], 4), Some(EINVAL)),
            ("its bytes", write(0, BAR2, &[1; 4], 4), None),
        ],
    );
}

#[test]
fn an_unknown_command_and_one_without_payload_are_refused_and_the_connection_stands() {
    let world = World::new(&[]);
    let (mut raw, _) = Raw::negotiated(&world.path);
    for command in [0, 11, 12, 19, 0xffff] {
        assert_eq!(errno(&mut raw, command, &[0], &[]), Some(EINVAL), "command {command}");
    }
    assert_eq!(errno(&mut raw, 13, &[], &[]), None, "only a reset has no payload");
}
