//! What all targets share: most mutated inputs stay whole messages, and messages are counted.

use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzzer_mutate;

/// Bytes of a message's head; its size is in bytes 4 to 8.
const HEAD: usize = 16;
/// How often the count is told.
const STEP: u64 = 100_000;

/// Any change of `data`, of which `size` bytes are an input. Seven times of eight its messages are made whole again: a wrong
/// size ends a conversation, and the rest of the input would be for nothing.
pub fn mutate(data: &mut [u8], size: usize, most: usize, seed: u32) -> usize {
    let size = fuzzer_mutate(data, size, most);
    let mut rest = &mut data[..size];
    while seed % 8 != 0 && rest.len() >= HEAD {
        let said = u32::from_le_bytes(rest[4..8].try_into().expect("four bytes"));
        let whole = usize::try_from(said).expect("64 bits").clamp(HEAD, rest.len());
        rest[4..8].copy_from_slice(&u32::try_from(whole).expect("an input is small").to_le_bytes());
        rest = &mut rest[whole..];
    }
    size
}

/// `messages` were taken: libFuzzer counts inputs, which have many or none.
pub fn count(messages: usize) {
    static SO_FAR: AtomicU64 = AtomicU64::new(0);
    let messages = u64::try_from(messages).expect("64 bits");
    let before = SO_FAR.fetch_add(messages, Ordering::Relaxed);
    if before / STEP != (before + messages) / STEP {
        eprintln!("messages {}", before + messages);
    }
}
