//! Common code of all targets: most mutated inputs stay whole messages, and messages are counted.

use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzzer_mutate;

/// Bytes of a message's head; its size is in bytes 4 to 8.
const HEAD: usize = 16;
/// Bytes of a message with a wrong size: little of the rest is lost.
const SHORT: usize = 32;
/// Version message, which a conversation begins with.
const HANDSHAKE: &[u8; 20] = b"\x01\0\x01\0\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// Interval of prints of the count.
const STEP: u64 = 100_000;

/// Any change of `data`, of which `size` bytes are an input. Mostly its messages are made whole again, and the first
/// one a handshake: what is wrong there ends a conversation, and the rest of the input would be for nothing.
pub fn mutate(data: &mut [u8], size: usize, most: usize, seed: u32) -> usize {
    let size = fuzzer_mutate(data, size, most);
    let mut rest = &mut data[..size];
    if seed % 8 > 1
        && let Some(head) = rest.get_mut(..HANDSHAKE.len())
    {
        head.copy_from_slice(HANDSHAKE);
    }
    while seed % 8 != 0 && rest.len() >= HEAD {
        let said = u32::from_le_bytes(rest[4..8].try_into().expect("four bytes"));
        let fits = usize::try_from(said).ok().filter(|said| (HEAD..=rest.len()).contains(said));
        let whole = fits.unwrap_or_else(|| rest.len().min(SHORT));
        // An answer to nothing ends a conversation too.
        rest[8] &= if seed % 8 == 1 { 0xff } else { 0x10 };
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
