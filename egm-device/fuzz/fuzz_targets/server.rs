//! The device over a socket: any bytes from a client, each reply judged, and the device is there for the next.
#![no_main]

mod messages;
#[path = "../../tests/device/talk.rs"]
mod talk;

use std::sync::LazyLock;

use egm_device::device::config::Id;
use egm_device::device::core::Facts;
use egm_device::device::{Function, Setup};
use egm_device::Anonymous;
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

/// Little, as each scrub makes all of it zero.
const SIZE: u64 = 0x3_0000;

static FUNCTION: LazyLock<Function> = LazyLock::new(|| {
    let memory = Anonymous::new("fuzz", SIZE, None).expect("memory");
    let facts = Facts { size: SIZE, base: 0, page: 0x1000, pxm: None, scrub_at_reset: false, msix: true };
    let hole = egm_address::Span::new(egm_address::BarOffset::new(0x8000), 0x3000).expect("a span");
    let setup = Setup { id: Id::default(), facts, retired: [hole].into_iter().collect(), bad: Box::new(|_| {}), scrubbed: Box::new(|_| {}), near: None };
    Function::new(setup, &memory).expect("a function")
});

fuzz_mutator!(|data: &mut [u8], size: usize, most: usize, seed: u32| { messages::mutate(data, size, most, seed) });

fuzz_target!(|bytes: &[u8]| {
    messages::count(talk::talk(&FUNCTION, bytes));
});
