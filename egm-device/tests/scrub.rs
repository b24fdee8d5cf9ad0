//! Guarantees of a scrub: all of it is zero, nothing else is touched, bad memory is an error with its place.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_device::backing::Backing;
use egm_device::scrub::{Cause, ScrubError, ScrubOptions, zero};

const PAGE: u64 = 0x1000;
const SIZE: u64 = 5 << 20;
/// Offset of the slice in its region.
const AT: Offset = Offset::new(0x4000_0000);

/// A slice that begins at `offset` of a plain file.
struct Plain {
    file: File,
    offset: u64,
}

impl Backing for Plain {
    fn file(&self) -> &File {
        &self.file
    }
    fn offset(&self) -> u64 {
        self.offset
    }
    fn size(&self) -> u64 {
        SIZE
    }
    fn page_size(&self) -> u64 {
        PAGE
    }
    fn is_invisible(&self) -> bool {
        false
    }
    fn outlives_power(&self) -> bool {
        false
    }
}

fn dirty() -> Plain {
    let file = tempfile::tempfile().unwrap();
    let offset = 2 * PAGE;
    file.write_all_at(&vec![0x5a; usize::try_from(offset + SIZE + PAGE).unwrap()], 0).unwrap();
    Plain { file, offset }
}

fn spans(list: &[(u64, u64)]) -> SpanSet<InRegion> {
    list.iter().map(|(start, size)| Span::new(AT.checked_add(*start).unwrap(), *size).unwrap()).collect()
}

fn work<'a>(progress: &'a (dyn Fn(u64) + Sync), cancel: &'a AtomicBool) -> ScrubOptions<'a> {
    ScrubOptions { near: None, workers: NonZeroUsize::new(2), pace: None, progress, cancel }
}

/// Whether each byte of the file is zero.
fn zeroes(memory: &Plain) -> Vec<bool> {
    let mut bytes = vec![0; usize::try_from(memory.file.metadata().unwrap().len()).unwrap()];
    memory.file.read_exact_at(&mut bytes, 0).unwrap();
    bytes.into_iter().map(|byte| byte == 0).collect()
}

#[test]
fn the_spans_are_zero_afterwards_and_retired_pages_and_neighbours_are_not_touched() {
    let memory = dirty();
    let parts = spans(&[(0, PAGE), (3 * PAGE, 2 << 20), (SIZE - 0x10, 0x10)]);
    let reports = AtomicU64::new(0);
    let progress = |bytes| {
        reports.fetch_max(bytes, Ordering::Relaxed);
    };
    zero(&memory, AT, &parts, &work(&progress, &AtomicBool::new(false))).unwrap();
    assert_eq!(reports.into_inner(), parts.size());
    for (at, is_zero) in (0u64..).zip(zeroes(&memory)) {
        let in_region = at.checked_sub(memory.offset).and_then(|at| AT.checked_add(at));
        let wanted = in_region.is_some_and(|at| parts.iter().any(|span| span.contains(at)));
        assert_eq!(is_zero, wanted, "byte {at:#x} of the file");
    }
}

#[test]
fn bad_memory_is_an_error_with_its_place_and_the_scrub_goes_on_around_it() {
    let memory = dirty();
    let good = 3 * PAGE; // the file ends there: what lies behind is SIGBUS, as a bad page is
    memory.file.set_len(memory.offset + good).unwrap();
    let all = spans(&[(0, SIZE)]);
    let error = zero(&memory, AT, &all, &work(&|_| {}, &AtomicBool::new(false))).unwrap_err();
    match error.cause {
        Cause::Bad(bad) => assert_eq!(spans(&[(good, PAGE)]), [bad].into_iter().collect()),
        other => panic!("{other:?}"),
    }
    assert!(error.done.is_empty());
    zero(&memory, AT, &spans(&[(0, good)]), &work(&|_| {}, &AtomicBool::new(false))).unwrap();
    assert!(zeroes(&memory)[usize::try_from(memory.offset).unwrap()..].iter().all(|zero| *zero));
}

#[test]
fn a_scrub_in_the_background_does_all_of_it_too() {
    let memory = dirty();
    let never = AtomicBool::new(false);
    let work = ScrubOptions { pace: NonZeroU64::new(1 << 40), ..work(&|_| {}, &never) };
    zero(&memory, AT, &spans(&[(0, SIZE)]), &work).unwrap();
    assert_eq!(zeroes(&memory).into_iter().filter(|zero| *zero).count(), usize::try_from(SIZE).unwrap());
}

/// A slice of which the first `decoys` mappings are of other memory, as those of a device that takes no stores.
struct Elsewhere {
    slice: Plain,
    decoy: File,
    decoys: AtomicU64,
}

impl Backing for Elsewhere {
    fn file(&self) -> &File {
        let used = self.decoys.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if used.is_ok() { &self.decoy } else { &self.slice.file }
    }
    fn offset(&self) -> u64 {
        self.slice.offset
    }
    fn size(&self) -> u64 {
        SIZE
    }
    fn page_size(&self) -> u64 {
        PAGE
    }
    fn is_invisible(&self) -> bool {
        false
    }
    fn outlives_power(&self) -> bool {
        false
    }
}

#[track_caller]
fn not_zero(outcome: Result<(), ScrubError>) -> (Offset, Span<InRegion>) {
    let error = outcome.unwrap_err();
    assert!(error.done.is_empty(), "what is not zero was called done");
    match error.cause {
        Cause::NotZero { at, block } => (at, block),
        other => panic!("{other:?}"),
    }
}

#[test]
fn zeroes_that_went_to_other_memory_are_found_by_another_mapping() {
    let (slice, decoy) = (dirty(), dirty().file);
    let memory = Elsewhere { slice, decoy, decoys: AtomicU64::new(1) };
    let never = AtomicBool::new(false);
    let (at, block) = not_zero(zero(&memory, AT, &spans(&[(0x800, SIZE - 0x800)]), &work(&|_| {}, &never)));
    let first = AT.checked_add(0x800).unwrap();
    assert_eq!((at, block), (first, Span::new(first, 0x1_0000).unwrap()));
    zero(&memory, AT, &spans(&[(0, SIZE)]), &work(&|_| {}, &never)).unwrap();
}

#[test]
fn one_byte_of_the_last_block_that_stays_is_named() {
    let (slice, decoy) = (dirty(), dirty().file);
    slice.file.write_all_at(&vec![0; usize::try_from(SIZE).unwrap()], slice.offset).unwrap();
    slice.file.write_all_at(b"x", slice.offset + SIZE - 5).unwrap();
    let memory = Elsewhere { slice, decoy, decoys: AtomicU64::new(1) };
    let never = AtomicBool::new(false);
    let outcome = zero(&memory, AT, &spans(&[(0, SIZE)]), &work(&|_| {}, &never));
    let text = outcome.as_ref().unwrap_err().cause.to_string();
    let (at, block) = not_zero(outcome);
    assert_eq!(at, AT.checked_add(SIZE - 5).unwrap());
    assert_eq!(block.end(), AT.checked_add(SIZE).unwrap());
    assert_eq!(
        text,
        "byte 0x404ffffb of the region is not zero after its scrub (read back in 0x404f0000..0x40500000)"
    );
}

#[test]
fn bytes_that_another_process_writes_behind_the_scrub_are_found() {
    let memory = dirty();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                memory.file.write_all_at(b"tenant", memory.offset + 0x40).unwrap();
            }
        });
        let never = AtomicBool::new(false);
        let scrub = || zero(&memory, AT, &spans(&[(0, SIZE)]), &work(&|_| {}, &never));
        // A round without a turn of the writer finds nothing.
        let found = (0..1_000).map(|_| scrub()).find(Result::is_err);
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        let (at, _) = not_zero(found.expect("every scrub called it clean"));
        assert!(at.offset_from(AT).is_some_and(|at| (0x40..0x46).contains(&at)), "{at:#x}");
    });
}
