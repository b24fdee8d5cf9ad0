//! Zeroes memory that keeps its bytes, before the next owner gets it.
//!
//! Each worker maps a chunk of its own, so that the replacement of a bad page affects no other worker. Piece by piece
//! it makes the chunk present, where the kernel has pages for it, and zeroes it under guard. Then it reads a random
//! sample back another way (`sample`): memory that is not zero there is an error. A chunk is done or it is not. Every
//! outcome reports what is done, so a scrub continues where the last one ended.

mod sample;

use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use egm_address::{CpuSet, InRegion, Offset, Span, SpanSet, align_down, align_up};
use egm_report::rate::Pace;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::backing::Backing;
use crate::mapping::{Mapping, MappingError, first_nonzero};
use crate::prefault::workers_for;
use crate::{poison, worker_pool};

/// Bytes that one worker maps and zeroes at a time.
const CHUNK: u64 = 64 << 20;
/// Bytes zeroed under one guard: the memory that a bad page costs for a moment.
const PIECE: usize = 2 << 20;
/// Bad pages that one scrub goes around: so many are no worn memory, but a device or a file system that fails.
const MAX_BAD: usize = 1024;
/// Longest sleep of a paced worker before it looks at the cancel flag.
const NAP: Duration = Duration::from_millis(50);

/// Options, progress and cancellation of a scrub.
pub struct ScrubOptions<'a> {
    /// The host processors near the memory, where known.
    pub near: Option<&'a CpuSet>,
    /// Threads; `None` for as many as there are processors near.
    pub workers: Option<NonZeroUsize>,
    /// In the background: bytes a second at most, and only on processors that have nothing else to do (where the host
    /// gives no thread for it, the calling one does the work as it is).
    pub pace: Option<NonZeroU64>,
    /// Called by any worker with the bytes done so far.
    pub progress: &'a (dyn Fn(u64) + Sync),
    /// Set from any thread to stop after the chunks in hand.
    pub cancel: &'a AtomicBool,
}

/// The reason that some bytes are not zero.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Cause {
    #[error("cancelled")]
    Cancelled,
    /// The memory is bad: retire these bytes and go on with the rest.
    #[error("the memory at {:#x} of the region is bad ({:#x} bytes)", .0.start(), .0.size())]
    Bad(Span<InRegion>),
    #[error("{MAX_BAD} pages are bad, the last at {0:#x} of the region: the device or the file system fails")]
    TooManyBad(Offset),
    /// Bytes that the backing does not have were asked for.
    #[error("bytes {:#x} to {:#x} of the region lie outside the slice", .0.start(), .0.end())]
    Outside(Span<InRegion>),
    #[error("the memory at {at:#x} of the region cannot be mapped")]
    Mapping {
        at: Offset,
        #[source]
        source: MappingError,
    },
    /// Zeroes cannot be written to the medium, so the bytes before them may come back with the power.
    #[error("cannot store zeroes at {at:#x} of the region")]
    Persist {
        at: Offset,
        #[source]
        source: io::Error,
    },
    #[error("no guard against bad memory (SIGBUS)")]
    Guard(#[source] io::Error),
    /// The kernel's random numbers are unavailable, so no sample can be read back.
    #[error("cannot choose the blocks to read back")]
    Random(#[source] io::Error),
    /// The memory does not keep the zeroes: it fails, or something else writes to it.
    #[error("byte {at:#x} of the region is not zero after its scrub (read back in {:#x}..{:#x})", .block.start(), .block.end())]
    NotZero { at: Offset, block: Span<InRegion> },
}

/// A scrub that ended early.
#[derive(Debug, thiserror::Error)]
#[error("cannot complete the scrub: {:#x} bytes are done", done.size())]
pub struct ScrubError {
    /// Bytes of the region that are zero in spite of it.
    pub done: SpanSet<InRegion>,
    /// The first failure of any worker.
    #[source]
    pub cause: Cause,
}

/// Makes every byte of `spans` zero, which are offsets in the region, of a slice that begins there at `at` and has the
/// bytes of `backing`.
///
/// # Errors
/// [`ScrubError`], with what is done; the first cause of any worker.
pub fn zero(
    backing: &dyn Backing,
    at: Offset,
    spans: &SpanSet<InRegion>,
    work: &ScrubOptions<'_>,
) -> Result<(), ScrubError> {
    let none = || SpanSet::default();
    if let Some(outside) = spans.iter().find(|span| !lies_within(*span, at, backing.size())) {
        return Err(ScrubError { done: none(), cause: Cause::Outside(outside) });
    }
    let chunks: Vec<_> = spans.iter().flat_map(|span| chunks(span, at)).collect();
    let job = ScrubTask {
        backing,
        at,
        chunks,
        work,
        next: AtomicUsize::new(0),
        done: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        begun: Instant::now(),
        pace: work.pace.map(|per_second| Mutex::new(Pace::new(per_second))),
    };
    let processors = work.near.map(CpuSet::len).filter(|n| *n > 0);
    let processors = processors.or_else(|| thread::available_parallelism().ok().map(NonZeroUsize::get));
    let bytes = usize::try_from(spans.size()).unwrap_or(usize::MAX);
    let workers = work.workers.map_or_else(|| workers_for(bytes, processors.unwrap_or(1)), NonZeroUsize::get);
    let (threads, near, idle) = (workers, work.near, work.pace.is_some());
    let outcomes =
        worker_pool::run(&[worker_pool::Task { threads, near, idle, work: Box::new(|| job.run()) }]);
    let (done, causes): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    match causes.into_iter().flatten().next() {
        None => Ok(()),
        Some(cause) => Err(ScrubError { done: done.into_iter().flatten().collect(), cause }),
    }
}

/// Outcome of a scrub that goes around bad pages.
pub(crate) struct Scrubbed {
    pub(crate) done: SpanSet<InRegion>,
    pub(crate) bad: SpanSet<InRegion>,
    pub(crate) end: Result<(), ScrubError>,
}

impl Scrubbed {
    /// Whether the memory has bad pages, and not so many that the device or the file system fails.
    pub(crate) fn is_bad(&self) -> bool {
        let is_failure = |error: &ScrubError| matches!(error.cause, Cause::TooManyBad(_));
        !self.bad.is_empty() && !self.end.as_ref().is_err_and(is_failure)
    }
}

/// Makes `todo` zero by `zero`; leaves out [`MAX_BAD`] bad pages at most and returns them.
pub(crate) fn around_bad(
    mut todo: SpanSet<InRegion>,
    zero: impl Fn(&SpanSet<InRegion>) -> Result<(), ScrubError>,
) -> Scrubbed {
    let (mut done, mut bad) = (Vec::new(), Vec::new());
    let end = loop {
        let error = match zero(&todo) {
            Ok(()) => {
                done.extend(todo.iter());
                break Ok(());
            }
            Err(error) => error,
        };
        done.extend(error.done.iter());
        let Cause::Bad(page) = error.cause else { break Err(error) };
        if todo.overlapping(page).is_none() {
            break Err(error);
        }
        bad.push(page);
        if bad.len() >= MAX_BAD {
            break Err(ScrubError { cause: Cause::TooManyBad(page.start()), ..error });
        }
        todo = todo.minus(&error.done).minus(&SpanSet::from_iter([page]));
    };
    Scrubbed { done: done.into_iter().collect(), bad: bad.into_iter().collect(), end }
}

fn lies_within(span: Span<InRegion>, at: Offset, size: u64) -> bool {
    at.checked_add(size).is_some_and(|end| at <= span.start() && span.end() <= end)
}

/// `span` cut where multiples of [`CHUNK`], counted from the slice's start, lie.
fn chunks(span: Span<InRegion>, at: Offset) -> impl Iterator<Item = Span<InRegion>> {
    let mut from = span.start();
    std::iter::from_fn(move || {
        let into = from.offset_from(at)?.checked_rem(CHUNK)?;
        let next = from.checked_add(CHUNK.saturating_sub(into)).filter(|end| *end < span.end());
        let chunk = Span::between(from, next.unwrap_or_else(|| span.end()))?;
        from = chunk.end();
        Some(chunk)
    })
}

struct ScrubTask<'a> {
    backing: &'a dyn Backing,
    at: Offset,
    chunks: Vec<Span<InRegion>>,
    work: &'a ScrubOptions<'a>,
    next: AtomicUsize,
    done: AtomicU64,
    stop: AtomicBool,
    begun: Instant,
    pace: Option<Mutex<Pace>>,
}

impl ScrubTask<'_> {
    /// One worker: what it did and why it ended before the chunks did.
    fn run(&self) -> (Vec<Span<InRegion>>, Option<Cause>) {
        let mut done = Vec::new();
        while let Some(chunk) = self.chunks.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.stop.load(Ordering::Relaxed) {
                return (done, None);
            }
            if let Err(cause) = self.wait(chunk.size()).and_then(|()| self.zero(*chunk)) {
                self.stop.store(true, Ordering::Relaxed);
                return (done, Some(cause));
            }
            done.push(*chunk);
            let before = self.done.fetch_add(chunk.size(), Ordering::Relaxed);
            (self.work.progress)(before.saturating_add(chunk.size()));
        }
        (done, None)
    }

    /// Waits until `bytes` more may be zeroed.
    fn wait(&self, bytes: u64) -> Result<(), Cause> {
        let now = self.begun.elapsed();
        let pace = self.pace.as_ref();
        let wait = pace.map(|p| p.lock().unwrap_or_else(PoisonError::into_inner).wait(bytes, now));
        let until = now.saturating_add(wait.unwrap_or_default());
        loop {
            if self.work.cancel.load(Ordering::Relaxed) {
                return Err(Cause::Cancelled);
            }
            match until.saturating_sub(self.begun.elapsed()) {
                Duration::ZERO => return Ok(()),
                left => thread::sleep(left.min(NAP)),
            }
        }
    }

    fn zero(&self, chunk: Span<InRegion>) -> Result<(), Cause> {
        let mapped = Mapped::new(self, chunk)?;
        let from = mapped.offset_of(chunk);
        let end = from.saturating_add(bytes(chunk));
        for piece in (from..end).step_by(PIECE) {
            let size = PIECE.min(end.saturating_sub(piece));
            // In one go is faster than a fault for each page. In a longer one the other workers, which map and unmap,
            // would wait for the lock that it holds. The zeroing reports any failure of it.
            let _ = mapped.mapping.reach(piece, size);
            if !egm_address::fault!("scrub-skipped") {
                mapped.guarded(|mapping| mapping.zero(piece, size))?;
            }
        }
        drop(mapped);
        self.backing.persist().map_err(|source| Cause::Persist { at: chunk.start(), source })?;
        if egm_address::fault!("read-back-skipped") {
            return Ok(());
        }
        self.read_back(chunk)
    }

    /// Reads a sample of `chunk` back, by no mapping that zeroed it: stores that went to other memory than the slice's
    /// are found as well.
    fn read_back(&self, chunk: Span<InRegion>) -> Result<(), Cause> {
        let mut random = [0; sample::RANDOM];
        getrandom(&mut random, GetRandomFlags::empty()).map_err(|error| Cause::Random(error.into()))?;
        let file = self.backing.file();
        // Devices are mapped instead: /dev/mem may read as zeroes, and others cannot be read.
        let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
        // Of invisible memory the kernel maps every page at once, so its blocks are mapped one by one.
        let is_visible = !is_file && !self.backing.is_invisible();
        let whole = is_visible.then(|| Mapped::new(self, chunk)).transpose()?;
        let mut buffer = vec![0; if is_file { bytes(chunk).min(sample::BLOCK) } else { 0 }];
        for block in sample::sample(chunk, random) {
            let buffer = buffer.get_mut(..bytes(block)).unwrap_or_default();
            let offset = block.start().offset_from(self.at).unwrap_or_default();
            let offset = self.backing.offset().saturating_add(offset);
            // A page that cannot be read is mapped too: the guard names it.
            let found = if is_file && file.read_exact_at(buffer, offset).is_ok() {
                first_nonzero(buffer).and_then(|found| block.start().checked_add(u64::try_from(found).ok()?))
            } else if let Some(mapped) = &whole {
                mapped.nonzero_in(block)?
            } else {
                Mapped::new(self, block)?.nonzero_in(block)?
            };
            if let Some(at) = found {
                return Err(Cause::NotZero { at, block });
            }
        }
        Ok(())
    }
}

fn bytes(span: Span<InRegion>) -> usize {
    usize::try_from(span.size()).unwrap_or(usize::MAX)
}

/// Bytes of a slice, mapped for one worker with the whole pages around them.
struct Mapped {
    mapping: Mapping,
    /// The mapping's first byte, in the region.
    start: Offset,
    /// Bytes in a page of the backing.
    page: usize,
}

impl Mapped {
    fn new(job: &ScrubTask<'_>, span: Span<InRegion>) -> Result<Self, Cause> {
        let (backing, page) = (job.backing, job.backing.page_size().max(1));
        let first = span.start().offset_from(job.at).unwrap_or_default();
        let start = align_down(first, page);
        let end = align_up(first.saturating_add(span.size()), page).unwrap_or(u64::MAX).min(backing.size());
        let congruent_to = backing.offset().saturating_add(start);
        let mapping = Mapping::new(backing, start, end.saturating_sub(start), congruent_to)
            .map_err(|source| Cause::Mapping { at: span.start(), source })?;
        let start = job.at.checked_add(start).unwrap_or(job.at);
        Ok(Self { mapping, start, page: usize::try_from(page).unwrap_or(usize::MAX) })
    }

    /// Offset of the first byte of `span` in the mapping.
    fn offset_of(&self, span: Span<InRegion>) -> usize {
        let offset = span.start().offset_from(self.start).unwrap_or_default();
        usize::try_from(offset).unwrap_or(usize::MAX)
    }

    /// Offset in the region of byte `offset` of the mapping.
    fn place(&self, offset: usize) -> Offset {
        let offset = u64::try_from(offset).unwrap_or(u64::MAX);
        self.start.checked_add(offset).unwrap_or(self.start)
    }

    /// Does `work` with the mapping; a bad page becomes an error.
    fn guarded<T>(&self, work: impl FnOnce(&Mapping) -> Result<T, MappingError>) -> Result<T, Cause> {
        let mut outcome = None;
        poison::guarded(&self.mapping, self.page, || outcome = Some(work(&self.mapping)))
            .map_err(Cause::Guard)?
            .map_err(|bad| self.bad(bad))?;
        let outcome = outcome.ok_or_else(|| Cause::Guard(io::ErrorKind::Other.into()))?;
        outcome.map_err(|source| Cause::Mapping { at: self.start, source })
    }

    /// The first byte of `block` that is not zero.
    fn nonzero_in(&self, block: Span<InRegion>) -> Result<Option<Offset>, Cause> {
        let from = self.offset_of(block);
        let found = self.guarded(|mapping| mapping.first_nonzero(from, bytes(block)))?;
        Ok(found.map(|found| self.place(found)))
    }

    fn bad(&self, bad: poison::BadPage) -> Cause {
        match Span::new(self.place(bad.offset), u64::try_from(bad.size).unwrap_or(u64::MAX)) {
            Ok(span) => Cause::Bad(span),
            Err(_) => Cause::Guard(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backing::Anonymous;

    fn span(start: u64, size: u64) -> Span<InRegion> {
        Span::new(Offset::new(start), size).unwrap()
    }

    proptest! {
        #[test]
        fn chunks_are_the_span_in_order_and_none_is_larger_than_a_chunk(
            start in 0u64..1 << 40, size in 1u64..1 << 34, at in 0u64..1 << 40,
        ) {
            let whole = span(at + start, size);
            let cut: Vec<_> = chunks(whole, Offset::new(at)).collect();
            prop_assert!(cut.iter().all(|chunk| chunk.size() <= CHUNK));
            prop_assert!(cut.windows(2).all(|pair| pair[0].end() == pair[1].start()));
            prop_assert_eq!(cut.iter().copied().collect::<SpanSet<_>>(), [whole].into_iter().collect());
            prop_assert!(cut.len() as u64 <= size / CHUNK + 2);
        }
    }

    #[test]
    fn bytes_outside_the_slice_are_refused_before_anything_is_done() {
        let memory = Anonymous::new("test", 0x10_0000, None).unwrap();
        let work = ScrubOptions {
            near: None,
            workers: None,
            pace: None,
            progress: &|_| {},
            cancel: &AtomicBool::new(false),
        };
        for wrong in [span(0, 0x1000), span(0x10_0000, 0x10_0001), span(u64::MAX - 1, 1)] {
            let error =
                zero(&memory, Offset::new(0x10_0000), &[wrong].into_iter().collect(), &work).unwrap_err();
            assert!(matches!(error.cause, Cause::Outside(_)) && error.done.is_empty());
        }
    }

    #[test]
    fn a_scrub_of_memory_that_fails_everywhere_ends_early_and_sets_nothing_aside() {
        let page = rustix::param::page_size() as u64;
        let file = tempfile::tempfile().unwrap();
        let size = 64 * MAX_BAD as u64 * page;
        file.set_len(size).unwrap();
        let region = crate::backing::tests::region(crate::region::RegionKind::Memfd, size, page);
        let slice = crate::backing::tests::slice(0, size);
        let memory = crate::backing::adopt(&region, &slice, file.try_clone().unwrap()).unwrap();
        file.set_len(0).unwrap();
        let cancel = AtomicBool::new(false);
        let work = ScrubOptions {
            near: None,
            workers: NonZeroUsize::new(1),
            pace: None,
            progress: &|_| {},
            cancel: &cancel,
        };
        let rounds = AtomicUsize::new(0);
        let scrubbed = around_bad([span(0, size)].into_iter().collect(), |todo| {
            rounds.fetch_add(1, Ordering::Relaxed);
            zero(memory.as_ref(), Offset::new(0), todo, &work)
        });
        assert!(rounds.into_inner() <= MAX_BAD && !scrubbed.is_bad());
        let cause = scrubbed.end.unwrap_err().cause;
        assert!(matches!(cause, Cause::TooManyBad(_)), "{cause}");
    }

    #[test]
    fn a_cancelled_scrub_reports_what_is_done_and_can_go_on() {
        let memory = Anonymous::new("test", 3 * CHUNK, None).unwrap();
        let (all, cancel) = (SpanSet::from_iter([span(0, 3 * CHUNK)]), AtomicBool::new(false));
        let progress = |_| cancel.store(true, Ordering::Relaxed);
        let work = ScrubOptions {
            near: None,
            workers: NonZeroUsize::new(1),
            pace: None,
            progress: &progress,
            cancel: &cancel,
        };
        let error = zero(&memory, Offset::new(0), &all, &work).unwrap_err();
        assert!(matches!(error.cause, Cause::Cancelled));
        assert_eq!(error.done, [span(0, CHUNK)].into_iter().collect());
        let work = ScrubOptions { progress: &|_| {}, cancel: &AtomicBool::new(false), ..work };
        zero(&memory, Offset::new(0), &all.minus(&error.done), &work).unwrap();
    }
}
