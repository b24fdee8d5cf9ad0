//! The device over a socket: any bytes from a client, each reply judged, and the device is there for the next.
#![no_main]

#[path = "../../tests/device/talk.rs"]
mod talk;

use std::sync::LazyLock;

use egm_device::device::config::Id;
use egm_device::device::core::Facts;
use egm_device::device::{Function, Setup};
use egm_device::Anonymous;
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 0x30_0000;

static FUNCTION: LazyLock<Function> = LazyLock::new(|| {
    let memory = Anonymous::new("fuzz", SIZE, None).expect("memory");
    let facts = Facts { size: SIZE, base: 0, page: 0x1000, pxm: None, scrub_at_reset: false };
    let hole = egm_address::Span::new(egm_address::BarOffset::new(0x8000), 0x3000).expect("a span");
    let setup = Setup { id: Id::default(), facts, retired: [hole].into_iter().collect(), bad: Box::new(|_| {}) };
    Function::new(setup, &memory).expect("a function")
});

fuzz_target!(|bytes: &[u8]| {
    talk::talk(&FUNCTION, bytes);
});
