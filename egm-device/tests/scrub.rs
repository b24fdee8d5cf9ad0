//! What a scrub promises: all of it is zero, nothing else is touched, bad memory is an error with its place.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_device::backing::Backing;
use egm_device::scrub::{Cause, Work, zero};

const PAGE: u64 = 0x1000;
const SIZE: u64 = 5 << 20;
/// Where the slice begins in its region.
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

fn work<'a>(progress: &'a (dyn Fn(u64) + Sync), cancel: &'a AtomicBool) -> Work<'a> {
    Work { near: None, workers: NonZeroUsize::new(2), pace: None, progress, cancel }
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
    let told = AtomicU64::new(0);
    let progress = |bytes| {
        told.fetch_max(bytes, Ordering::Relaxed);
    };
    zero(&memory, AT, &parts, &work(&progress, &AtomicBool::new(false))).unwrap();
    assert_eq!(told.into_inner(), parts.size());
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
    let work = Work { pace: NonZeroU64::new(1 << 40), ..work(&|_| {}, &never) };
    zero(&memory, AT, &spans(&[(0, SIZE)]), &work).unwrap();
    assert_eq!(zeroes(&memory).into_iter().filter(|zero| *zero).count(), usize::try_from(SIZE).unwrap());
}
