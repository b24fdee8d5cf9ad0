//! Whatever a client sends: no panic, no wrong reply, and the device goes on.
//!
//! `EGM_HOSTILE_CASES=500000` runs so many conversations of about a dozen messages, instead of a few hundred.

use egm_device::device::registers::Register;
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::blocking_files::serves_and_ends;
use crate::cli::Host;
use crate::raw::{self, COMMAND, Raw};
use crate::talk::talk;
use crate::world::{BAR0, BAR2, CONFIG, SIZE, World, register};

fn config() -> Config {
    let cases = std::env::var("EGM_HOSTILE_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: cases.unwrap_or(256), ..Config::default() }
}

/// The body of a request that is nearly right.
fn body(command: u16, at: u64, small: u32, bytes: &[u8]) -> Vec<u8> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let count = u32::try_from(bytes.len()).unwrap();
    let region = [BAR0, BAR2, CONFIG, small][small as usize % 4];
    let head = match command {
        1 => return b"\0\0\0\0{}\0".to_vec(),
        2 => [words(&[32, small & 3]), [0, at << 12, 0x1000].map(u64::to_le_bytes).concat()].concat(),
        3 => [words(&[24, small & 2]), [at << 12, 0x1000].map(u64::to_le_bytes).concat()].concat(),
        4 => words(&[16, 0, 0, 0]),
        5..8 => words(&[32, 0, small, 0, 0, 0, 0, 0]),
        8 => words(&[20, [0x21, 0x22, 0x24, small][small as usize % 4], small % 5, small % 3, small % 4]),
        9 => return [at.to_le_bytes().to_vec(), words(&[region, small << 8])].concat(),
        10 => [at.to_le_bytes().to_vec(), words(&[region, count])].concat(),
        _ => Vec::new(),
    };
    [head, bytes.to_vec()].concat()
}

fn message() -> impl Strategy<Value = Vec<u8>> {
    let at = prop_oneof![0..0x60_u64, 0..0x4000_u64, 0..2 * SIZE, any::<u64>()];
    let flags = prop::sample::select(&[0, 0, 0, 0, 0, 0, 0x10, 0x10, 1, 0x21, 7][..]);
    let bytes = prop_oneof![Just(vec![1, 0, 0, 0]), prop::collection::vec(any::<u8>(), 0..24),];
    (any::<u16>(), 0..20_u16, flags, at, 0..12_u32, bytes, 0..60_u32).prop_map(
        |(id, command, flags, at, small, bytes, lie)| {
            let body = body(command, at, small, &bytes);
            let size = 16 + u32::try_from(body.len()).unwrap() + u32::from(lie == 0);
            let head = [id, command].into_iter().flat_map(u16::to_le_bytes);
            head.chain([size, flags, 0].into_iter().flat_map(u32::to_le_bytes)).chain(body).collect()
        },
    )
}

#[test]
fn whatever_clients_send_replies_are_right_and_the_next_finds_the_device_as_it_is() {
    let world = World::new(&[(0x8000, 0x3000)]);
    let messages = std::cell::Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(config());
    let conversations = (prop::collection::vec(message(), 0..24), prop::bool::weighted(0.9));
    let outcome = runner.run(&conversations, |(all, negotiates)| {
        let handshake = b"\x01\0\x01\0\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let mut bytes = if negotiates { handshake.to_vec() } else { Vec::new() };
        bytes.extend(all.into_iter().flatten());
        messages.set(messages.get() + talk(&world.function, &bytes));
        Ok(())
    });
    outcome.unwrap();
    println!("{} messages", messages.get());
    let mut client = world.client();
    let facts = [Register::Size, Register::Spans, Register::RetiredBytes, Register::Generation];
    assert_eq!(facts.map(|fact| register(&mut client, fact)), [SIZE, 1, 0x3000, 0]);
}

/// All of its bytes come, so that its length is the one rule that it breaks.
#[test]
fn a_message_longer_than_agreed_ends_its_connection_and_no_other() {
    const RESET: u16 = 13;
    let host = Host::new();
    let server = host.serve("serve --region local --size 2MiB --socket vm.sock --timeout 0");
    let mut hostile = Raw::negotiated(&host.path("vm.sock")).0;
    hostile.send(&raw::message(2, RESET, COMMAND, &vec![0; 4 << 20]));
    assert!(hostile.receive().is_none(), "the server took it");
    assert_eq!(serves_and_ends(server, &host), Some(0));
}
