//! Zeroes that do not pass through the caches. This is an unsafe module, internal to the crate.
//!
//! Why it exists: an ordinary store on x86 reads a cache line before it replaces it, and evicts a line of another
//! program for memory that no program reads soon. Non-temporal stores do neither; `scripts/bench` shows what that
//! brings. Elsewhere memset zeroes so by itself (arm64: `DC ZVA`).
#![expect(unsafe_code, reason = "streaming stores take pointers")]

/// Makes `size` bytes from `start` zero. They are visible to all processors when it returns.
///
/// # Safety
/// The bytes are mapped writable and no reference to them exists.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")] // which every x86-64 processor has
pub(crate) unsafe fn zero(start: *mut u8, size: usize) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
    const STORE: usize = size_of::<__m128i>();

    let head = start.align_offset(STORE).min(size);
    let stores = size.saturating_sub(head) / STORE;
    let tail = head.saturating_add(stores.saturating_mul(STORE));
    // SAFETY: `head` bytes at most are the caller's.
    unsafe { start.write_bytes(0, head) };
    let aligned = start.wrapping_add(head).cast::<__m128i>();
    let zero = _mm_setzero_si128();
    for n in 0..stores {
        // SAFETY: `head + stores * STORE` bytes at most are the caller's, and `aligned` is a multiple of STORE.
        unsafe { _mm_stream_si128(aligned.wrapping_add(n), zero) };
    }
    // SAFETY: `tail` bytes and what is left are the caller's.
    unsafe { start.wrapping_add(tail).write_bytes(0, size.saturating_sub(tail)) };
    _mm_sfence(); // streaming stores are weakly ordered: "done" must not overtake them
}

/// As above.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn zero(start: *mut u8, size: usize) {
    // SAFETY: the bytes are the caller's.
    unsafe { start.write_bytes(0, size) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn exactly_the_bytes_asked_for_become_zero(from in 0usize..200, size in 0usize..1000) {
            let mut bytes = vec![1u8; 1300];
            let start = bytes.as_mut_ptr().wrapping_add(from);
            // SAFETY: `from + size` is below the vector's length, and no reference to it is alive.
            unsafe { zero(start, size) };
            for (at, byte) in bytes.into_iter().enumerate() {
                prop_assert_eq!(byte == 0, (from..from + size).contains(&at), "byte {}", at);
            }
        }
    }
}
