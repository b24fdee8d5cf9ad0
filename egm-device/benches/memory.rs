//! Prefault and scrub beside a parallel memset of memory of the same kind, on the same processors, alternating.
//!
//! ```text
//! cargo bench -p egm-device --bench memory -- --of prefault --mib 8192 --page 4K --rounds 5
//! ```
//! prints one line of JSON: seconds of each round of each way. `--of prefault`, on fresh memory: `prefault`, `memset`
//! (as many threads, the same chunks) and `populate`, which is one `MADV_POPULATE_WRITE` by one thread. `--of scrub`,
//! on memory that was written before: `scrub` and `memset`, which both begin without a mapping, and `mapped`, a memset
//! by way of a mapping that is complete already.
#![expect(unsafe_code, reason = "memset writes to a mapping by pointer")]
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use egm_address::{Offset, Span};
use egm_device::scrub::{self, ScrubOptions};
use egm_device::{Anonymous, Backing, HugePage, Mapping, prefault, workers_for};

/// A name, and the work that is timed.
type Work = (&'static str, fn(&Anonymous, &Mapping));

/// The chunk of a memset's thread.
const CHUNK: usize = 64 << 20;

const PREFAULT: &[Work] = &[
    ("prefault", |_, mapping| prefault(&[(mapping, None)], &|_| {}).unwrap()),
    ("memset", |_, mapping| memset(mapping, 0x5a)),
    ("populate", |_, mapping| mapping.populate(0, mapping.size()).unwrap()),
];
const SCRUB: &[Work] = &[
    ("scrub", |memory, _| scrub(memory)),
    ("memset", |memory, _| memset(&Mapping::new(memory, 0, memory.size(), 0).unwrap(), 0)),
    ("mapped", |_, mapping| memset(mapping, 0)),
];

fn main() {
    let huge = match argument("--page").as_deref() {
        None | Some("4K") => None,
        Some("2M") => Some(HugePage::Size2M),
        Some("1G") => Some(HugePage::Size1G),
        Some(other) => panic!("--page {other}: 4K, 2M or 1G"),
    };
    let (ways, written) = match argument("--of").as_deref() {
        None | Some("prefault") => (PREFAULT, false),
        Some("scrub") => (SCRUB, true),
        Some(other) => panic!("--of {other}: prefault or scrub"),
    };
    let number = |name, default| argument(name).map_or(default, |text| text.parse().unwrap());
    let (mib, rounds) = (number("--mib", 1024), number("--rounds", 5));
    let mut seconds = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for ((_, way), seconds) in ways.iter().zip(&mut seconds) {
            let memory = Anonymous::new("bench", mib << 20, huge).unwrap();
            let mut mapping = Mapping::new(&memory, 0, mib << 20, 0).unwrap();
            mapping.advise_huge(None);
            if written {
                memset(&mapping, 0x5a);
            }
            let begun = Instant::now();
            way(&memory, &mapping);
            seconds.push(begun.elapsed().as_secs_f64().to_string());
        }
    }
    let figures = ways.iter().zip(&seconds).map(|((name, _), s)| format!("\"{name}\":[{}]", s.join(",")));
    println!("{{{}}}", figures.collect::<Vec<_>>().join(","));
}

/// The argument after `name`; `cargo bench` adds arguments of its own.
fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|word| word != name).nth(1)
}

fn scrub(memory: &Anonymous) {
    let start = Offset::new(0);
    let all = [Span::new(start, memory.size()).unwrap()].into_iter().collect();
    let work = ScrubOptions {
        near: None,
        workers: None,
        pace: None,
        progress: &|_| {},
        cancel: &AtomicBool::new(false),
    };
    scrub::zero(memory, start, &all, &work).unwrap();
}

fn memset(mapping: &Mapping, byte: u8) {
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
                    unsafe { mapping.as_ptr().wrapping_add(from).write_bytes(byte, size) };
                }
            });
        }
    });
}
