//! Prefault beside a parallel memset of fresh memory of the same kind, on the same processors, alternating.
//!
//! ```text
//! cargo bench -p egm-device --bench prefault -- --mib 8192 --page 4K --rounds 5
//! ```
//! prints one line of JSON: seconds of each round of `prefault`, of `memset` (as many threads, the same chunks) and of
//! `populate`, which is one `MADV_POPULATE_WRITE` by one thread.
#![expect(unsafe_code, reason = "memset writes to a mapping by pointer")]
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use egm_device::{Anonymous, HugePage, Mapping, prefault, workers_for};

/// A name and what it does.
type Way = (&'static str, fn(&Mapping));

/// The chunk of a memset's thread.
const CHUNK: usize = 64 << 20;

fn main() {
    let huge = match argument("--page").as_deref() {
        None | Some("4K") => None,
        Some("2M") => Some(HugePage::Size2M),
        Some("1G") => Some(HugePage::Size1G),
        Some(other) => panic!("--page {other}: 4K, 2M or 1G"),
    };
    let number = |name, default| argument(name).map_or(default, |text| text.parse().unwrap());
    let (mib, rounds) = (number("--mib", 1024), number("--rounds", 5));
    let ways: [Way; 3] = [("prefault", ours), ("memset", memset), ("populate", populate)];
    let mut seconds = ways.map(|_| Vec::new());
    for _ in 0..rounds {
        for ((_, way), seconds) in ways.iter().zip(&mut seconds) {
            let memory = Anonymous::new("bench", mib << 20, huge).unwrap();
            let mapping = Mapping::new(&memory, 0, mib << 20, 0).unwrap();
            mapping.advise_huge(false);
            let begun = Instant::now();
            way(&mapping);
            seconds.push(begun.elapsed().as_secs_f64().to_string());
        }
    }
    let figures = ways.iter().zip(&seconds).map(|((name, _), s)| format!("\"{name}\":[{}]", s.join(",")));
    println!("{{{}}}", figures.collect::<Vec<_>>().join(","));
}

/// The word after `name`; `cargo bench` adds words of its own.
fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|word| word != name).nth(1)
}

fn ours(mapping: &Mapping) {
    prefault(&[(mapping, None)], &|_| {}).unwrap();
}

fn populate(mapping: &Mapping) {
    mapping.populate(0, mapping.size()).unwrap();
}

fn memset(mapping: &Mapping) {
    let next = AtomicUsize::new(0);
    let processors = thread::available_parallelism().unwrap().get();
    thread::scope(|scope| {
        for _ in 0..workers_for(mapping.size(), processors) {
            scope.spawn(|| {
                loop {
                    let from = next.fetch_add(CHUNK, Ordering::Relaxed);
                    let size = CHUNK.min(mapping.size().saturating_sub(from));
                    if size == 0 {
                        break;
                    }
                    // SAFETY: `from .. from + size` lies in the mapping and no other thread takes the same chunk.
                    unsafe { mapping.as_ptr().wrapping_add(from).write_bytes(0x5a, size) };
                }
            });
        }
    });
}
