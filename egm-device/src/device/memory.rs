//! The bytes behind BAR 2: which of them a client may map, and the accesses to the rest.

use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::thread;

use egm_address::{BarOffset, CpuSet, InBar, InRegion, Offset, Span, SpanSet, align_down, align_up};
use egm_vfio_wire::message::{Area, MOST_AREAS};

use crate::backing::{Backing, Window};
use crate::mapping::{Mapping, base_page};
use crate::poison;
use crate::scrub::{self, ScrubError, ScrubOptions, Scrubbed};

/// A client's scrub takes one in so many of the processors near the memory, one at least.
const SHARE: usize = 8;
/// Bytes that a scrub by the doorbell zeroes in a second at most.
const PACE: u64 = 2 << 30;

/// Why a scrub runs, which decides the host resources that it may use beside its [`SHARE`] of the processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    /// The doorbell: a guest may ring it for ever, so [`PACE`] applies, and only idle processors are used.
    Doorbell,
    /// A reset: a client waits for its reply.
    Reset,
}

impl Effort {
    /// Bytes that it may zero in a second.
    fn pace(self) -> Option<NonZeroU64> {
        match self {
            Self::Doorbell => NonZeroU64::new(PACE),
            Self::Reset => None,
        }
    }
}

/// A slice's memory by a separate descriptor: the holder of the slice can return it once this is dropped.
#[derive(Debug)]
pub(super) struct SliceMemory {
    window: Window,
    /// The host processors near it, where known.
    near: Option<CpuSet>,
}

impl SliceMemory {
    pub(super) fn of(backing: &dyn Backing, near: Option<CpuSet>) -> io::Result<Self> {
        Ok(Self { window: Window::again(backing, granule(backing))?, near })
    }

    pub(super) fn offset(&self) -> u64 {
        self.window.offset()
    }

    /// Bytes that mappings keep to.
    pub(super) fn page(&self) -> u64 {
        self.window.page_size()
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.window.file().as_fd()
    }

    /// Reads `data` at `offset`, of which `usable` may be touched; the rest is ones. Returns the bytes found bad.
    pub(super) fn read(&self, offset: u64, data: &mut [u8], usable: &SpanSet<InBar>) -> SpanSet<InBar> {
        data.fill(0xff);
        let pieces = pieces(offset, data.len(), usable);
        let mut bad = Vec::new();
        for (at, from, length) in pieces {
            let piece = data.get_mut(from..).and_then(|rest| rest.get_mut(..length)).unwrap_or_default();
            let found = self.with(at, length, |mapping, at| drop(mapping.read(at, piece)));
            if let Some(found) = found {
                bad.push(found);
                data.get_mut(from..).unwrap_or_default().fill(0xff);
            }
        }
        bad.into_iter().collect()
    }

    /// Writes the part of `data` that is for `usable` bytes. Returns the bytes found bad.
    pub(super) fn write(&self, offset: u64, data: &[u8], usable: &SpanSet<InBar>) -> SpanSet<InBar> {
        let pieces = pieces(offset, data.len(), usable);
        let bad = pieces.into_iter().filter_map(|(at, from, length)| {
            let piece = data.get(from..)?.get(..length)?;
            self.with(at, length, |mapping, at| drop(mapping.write(at, piece)))
        });
        bad.collect()
    }

    /// Does `work` with the pages around `length` bytes at `at`, mapped for so long, and the place of `at` in them. (A page
    /// that turns out bad is replaced under `work`, so no other code may use the mapping.)
    fn with(&self, at: u64, length: usize, work: impl FnOnce(&Mapping, usize)) -> Option<Span<InBar>> {
        let start = align_down(at, self.page());
        let end = at.checked_add(u64::try_from(length).ok()?)?;
        let end = align_up(end, self.page())?.min(self.window.size());
        let congruent_to = self.offset().checked_add(start)?;
        let mapping = Mapping::new(&self.window, start, end.checked_sub(start)?, congruent_to).ok()?;
        let inside = usize::try_from(at.checked_sub(start)?).ok()?;
        let page = usize::try_from(self.page()).ok()?;
        let bad = poison::guarded(&mapping, page, || work(&mapping, inside)).ok()?.err()?;
        let first = start.checked_add(u64::try_from(bad.offset).ok()?)?;
        Span::new(BarOffset::new(first), u64::try_from(bad.size).ok()?).ok()
    }

    /// Makes `usable` zero; `progress` receives bytes. Returns the bytes found bad, and how it ended.
    pub(super) fn scrub(
        &self,
        usable: &SpanSet<InBar>,
        effort: Effort,
        progress: &(dyn Fn(u64) + Sync),
        cancel: &AtomicBool,
    ) -> (SpanSet<InBar>, Result<(), ScrubError>) {
        let workers = Some(workers(self.near.as_ref()));
        let work = ScrubOptions { near: self.near.as_ref(), workers, pace: effort.pace(), progress, cancel };
        let todo = usable.iter().filter_map(moved::<_, InRegion>).collect();
        let Scrubbed { bad, end, .. } =
            scrub::around_bad(todo, |todo| scrub::zero(&self.window, Offset::new(0), todo, &work));
        (bad.iter().filter_map(moved).collect(), end)
    }
}

/// Threads of a client's scrub.
fn workers(near: Option<&CpuSet>) -> NonZeroUsize {
    let processors = near.map(CpuSet::len).filter(|processors| *processors > 0);
    let processors = processors.or_else(|| thread::available_parallelism().ok().map(NonZeroUsize::get));
    let share = if egm_address::fault!("scrub-on-all-processors") { 1 } else { SHARE };
    NonZeroUsize::new(processors.unwrap_or(1) / share).unwrap_or(NonZeroUsize::MIN)
}

/// Bytes that mappings of it keep to: invisible memory is mapped by host pages, whatever its region's slices keep to.
fn granule(backing: &dyn Backing) -> u64 {
    let host = base_page();
    if backing.is_invisible() { host } else { backing.page_size().max(host) }
}

/// The same numbers in another space: bytes of the slice are counted from 0 in both.
fn moved<A, B>(span: Span<A>) -> Option<Span<B>> {
    Span::new(egm_address::Address::new(span.start().get()), span.size()).ok()
}

/// Pieces of an access to `usable` bytes: offset in the slice, offset in the data, bytes.
fn pieces(offset: u64, length: usize, usable: &SpanSet<InBar>) -> Vec<(u64, usize, usize)> {
    let access = u64::try_from(length).ok().and_then(|length| Span::new(BarOffset::new(offset), length).ok());
    let Some(access) = access else { return Vec::new() };
    let piece = |span: Span<InBar>| {
        let both = span.intersection(access)?;
        let from = usize::try_from(both.start().offset_from(access.start())?).ok()?;
        Some((both.start().get(), from, usize::try_from(both.size()).ok()?))
    };
    usable.iter().filter_map(piece).collect()
}

/// The parts of `usable` that clients may map, whole pages of `page` bytes: the largest, when there are more than clients take.
pub(super) fn areas(usable: &SpanSet<InBar>, page: u64) -> Vec<Area> {
    let whole = usable.iter().filter_map(|span| {
        let start = align_up(span.start().get(), page)?;
        let size = align_down(span.end().get(), page).checked_sub(start)?;
        (size > 0).then_some(Area { offset: start, size })
    });
    let mut areas: Vec<_> = whole.collect();
    areas.sort_by_key(|area| std::cmp::Reverse(area.size));
    areas.truncate(usize::try_from(MOST_AREAS).unwrap_or(usize::MAX));
    areas.sort();
    areas
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;
    use crate::backing::Anonymous;

    const SIZE: u64 = 0x10_0000;
    const BYTES: usize = 0x10_0000;

    fn set(spans: impl IntoIterator<Item = (u64, u64)>) -> SpanSet<InBar> {
        spans.into_iter().map(|(start, size)| Span::new(BarOffset::new(start), size).unwrap()).collect()
    }

    fn memory() -> SliceMemory {
        SliceMemory::of(&Anonymous::new("test", SIZE, None).unwrap(), None).unwrap()
    }

    #[test]
    fn a_doorbell_that_is_rung_for_ever_has_a_pace_and_a_reset_has_none() {
        assert_eq!(Effort::Doorbell.pace().map(NonZeroU64::get), Some(PACE));
        assert_eq!(Effort::Reset.pace(), None);
    }

    #[test]
    fn areas_are_whole_pages_of_what_is_usable_and_the_largest_of_too_many() {
        assert_eq!(
            areas(&set([(0x800, 0x1000), (0x4000, 0x3800)]), 0x1000),
            [Area { offset: 0x4000, size: 0x3000 }]
        );
        let many = (0..5000_u64).map(|n| (n * 0x4000, if n < 1000 { 0x1000 } else { 0x2000 }));
        let areas = areas(&set(many), 0x1000);
        assert_eq!(areas.len(), 4096);
        assert_eq!(areas.iter().filter(|area| area.size == 0x2000).count(), 4000);
        assert!(areas.is_sorted());
    }

    #[test]
    fn a_scrub_makes_what_is_usable_zero_and_nothing_else() {
        let (memory, all) = (memory(), set([(0, SIZE)]));
        assert!(memory.write(0, &vec![7; BYTES], &all).is_empty());
        let usable = set([(0, 0x4000), (0x8000, SIZE - 0x8000)]);
        let (bad, end) = memory.scrub(&usable, Effort::Reset, &|_| {}, &AtomicBool::new(false));
        assert!(bad.is_empty() && end.is_ok());
        let mut data = vec![1; BYTES];
        let _ = memory.read(0, &mut data, &all);
        let expected = (0..SIZE).map(|at| if (0x4000..0x8000).contains(&at) { 7 } else { 0 });
        assert!(data.iter().copied().eq(expected));
        let (_, end) = memory.scrub(&usable, Effort::Reset, &|_| {}, &AtomicBool::new(true));
        assert!(end.is_err(), "it was cancelled");
    }

    /// Memory of a file without a medium: the kernel refuses to store its bytes.
    struct NoMedium(std::fs::File);

    impl Backing for NoMedium {
        fn file(&self) -> &std::fs::File {
            &self.0
        }
        fn offset(&self) -> u64 {
            0
        }
        fn size(&self) -> u64 {
            SIZE
        }
        fn page_size(&self) -> u64 {
            base_page()
        }
        fn is_invisible(&self) -> bool {
            false
        }
        fn outlives_power(&self) -> bool {
            true
        }
    }

    #[test]
    fn zeros_of_a_client_s_scrub_reach_the_medium_or_the_scrub_fails() {
        let file = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
        let memory = SliceMemory::of(&NoMedium(file), None).unwrap();
        for effort in [Effort::Doorbell, Effort::Reset] {
            let (_, end) = memory.scrub(&set([(0, SIZE)]), effort, &|_| {}, &AtomicBool::new(false));
            assert!(matches!(end.unwrap_err().cause, scrub::Cause::Persist { .. }), "{effort:?}");
        }
    }

    #[test]
    fn a_scrub_by_the_doorbell_takes_an_eighth_of_the_processors_while_they_are_idle() {
        const SIZE: u64 = 256 << 20; // worth four threads, were they not bounded
        const SCHED_IDLE: &str = "5";
        let sixteen: CpuSet = "0-15".parse().unwrap();
        assert_eq!(workers(Some(&"0-71".parse().unwrap())).get(), 9);
        assert_eq!(workers(Some(&"3".parse().unwrap())).get(), 1);
        let memory = SliceMemory::of(&Anonymous::new("test", SIZE, None).unwrap(), Some(sixteen)).unwrap();
        let threads = Mutex::new(BTreeSet::new());
        let progress = |_| {
            // proc_pid_stat(5): behind the name, from field 3 on, field 41 is the policy.
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let policy = stat.rsplit(')').next().unwrap().split_ascii_whitespace().nth(38).unwrap();
            threads.lock().unwrap().insert((format!("{:?}", thread::current().id()), policy.to_owned()));
        };
        let (_, end) = memory.scrub(&set([(0, SIZE)]), Effort::Doorbell, &progress, &AtomicBool::new(false));
        assert!(end.is_ok());
        let threads = threads.into_inner().unwrap();
        assert!(threads.len() <= 2, "{threads:?}");
        assert!(threads.iter().all(|(_, policy)| policy == SCHED_IDLE), "{threads:?}");
    }

    proptest! {
        #[test]
        fn trapped_accesses_are_memory_where_it_is_usable_and_ones_elsewhere(
            holes in prop::collection::vec((0..255_u64, 1..16_u64), 0..6),
            offset in 0..SIZE, length in 0..0x6000_usize, seed: u8,
        ) {
            let memory = memory();
            let slice = set([(0, SIZE)]);
            let usable = slice.minus(&set(holes.into_iter().map(|(page, pages)| (page << 12, pages << 12))));
            let data: Vec<_> = (0..=250_u8).cycle().take(length).map(|n| seed.wrapping_add(n)).collect();
            prop_assert!(memory.write(offset, &data, &usable).is_empty());
            let mut back = vec![0; length];
            prop_assert!(memory.read(offset, &mut back, &usable).is_empty());
            for (n, (byte, wrote)) in back.iter().zip(&data).enumerate() {
                let at = BarOffset::new(offset + n as u64);
                let real = usable.iter().any(|span| span.contains(at));
                prop_assert_eq!(*byte, if real { *wrote } else { 0xff });
            }
        }
    }
}
