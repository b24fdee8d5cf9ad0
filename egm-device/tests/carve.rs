//! Carving beside a model that checks every block of a small region.
#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use egm_address::{ByteSize, Hpa, InRegion, Offset, Span, SpanSet};
use egm_device::carve::plan::{Carver, Cause, PlacementError, Request, place};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind, Slice};
use egm_device::retired::Retired;
use proptest::prelude::*;

/// Bytes in a block, the grain of the model.
const BLOCK: u64 = 0x1000;
/// Blocks of the modelled regions.
const BLOCKS: u64 = 64;

fn owner() -> Owner {
    Owner { name: "test".to_owned(), uid: 0, pid: 1, started: 1, domain: None }
}

fn region(size: u64, page: u64, base: Option<u64>, retired: &[(u64, u64)]) -> Region {
    Region {
        name: "egm4".to_owned(),
        kind: RegionKind::Memfd,
        node: None,
        size: ByteSize::new(size),
        page_size: ByteSize::new(page),
        base: base.map(Hpa::new),
        functions: Vec::new(),
        retired: Retired::new(retired.iter().copied(), size, BLOCK),
    }
}

fn set(spans: &[(u64, u64)]) -> SpanSet<InRegion> {
    spans.iter().map(|&(start, size)| Span::new(Offset::new(start), size).unwrap()).collect()
}

fn short_of(result: Result<Slice, PlacementError>) -> Cause {
    result.unwrap_err().cause
}

/// State of a block in the model.
#[derive(Clone, Copy, Default)]
struct Block {
    busy: bool,
    clean: bool,
    retired: bool,
}

/// A small region in blocks: page of `page` blocks, first block at host block `base`.
#[derive(Debug, Clone)]
struct Small {
    page: u64,
    base: u64,
    busy: Vec<(u64, u64)>,
    clean: Vec<(u64, u64)>,
    retired: Vec<(u64, u64)>,
}

impl Small {
    fn bytes(spans: &[(u64, u64)]) -> Vec<(u64, u64)> {
        spans.iter().map(|&(start, size)| (start * BLOCK, size * BLOCK)).collect()
    }

    fn region(&self) -> Region {
        region(BLOCKS * BLOCK, self.page * BLOCK, Some(self.base * BLOCK), &Self::bytes(&self.retired))
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = vec![Block::default(); usize::try_from(BLOCKS).unwrap()];
        let mut mark = |spans: &[(u64, u64)], mark: fn(&mut Block)| {
            for &(start, size) in spans {
                (start..(start + size).min(BLOCKS))
                    .for_each(|b| mark(&mut blocks[usize::try_from(b).unwrap()]));
            }
        };
        mark(&self.busy, |b| b.busy = true);
        mark(&self.clean, |b| b.clean = true);
        mark(&self.retired, |b| b.retired = true);
        blocks
    }

    /// The place by definition: every aligned place is checked, the best kind and then the lowest wins.
    fn expected(&self, size: u64, align: u64) -> Option<u64> {
        let blocks = self.blocks();
        let align = align.max(self.page);
        let places =
            (0..=BLOCKS.saturating_sub(size)).filter(|start| (self.base + start).is_multiple_of(align));
        let kind = |start: u64| {
            let of = &blocks[usize::try_from(start).unwrap()..usize::try_from(start + size).unwrap()];
            let holes = of.iter().any(|b| b.retired);
            let clean = of.iter().all(|b| b.clean || b.retired);
            let place = of.iter().all(|b| !b.busy) && of.iter().any(|b| !b.retired);
            place.then_some((holes, !clean, start))
        };
        places.filter_map(kind).min().map(|(_, _, start)| start)
    }
}

fn spans(most: usize, longest: u64) -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..BLOCKS, 1..=longest), 0..most)
}

fn small() -> impl Strategy<Value = Small> {
    (0u32..3, 0u64..8, spans(6, 10), spans(6, 30), spans(12, 4))
        .prop_map(|(page, base, busy, clean, retired)| Small { page: 1 << page, base, busy, clean, retired })
}

proptest! {
    #[test]
    fn the_place_is_the_one_that_a_block_by_block_search_finds(
        small in small(), pages in 1u64..12, align in 0u32..5,
    ) {
        let size = pages * small.page;
        let request = Request { align: BLOCK << align, ..Request::new(size * BLOCK, owner()) };
        let (busy, clean) = (set(&Small::bytes(&small.busy)), set(&Small::bytes(&small.clean)));
        let got = place(&small.region(), &busy, &clean, &request);
        prop_assert_eq!(got.ok().map(|slice| slice.offset / BLOCK), small.expected(size, 1 << align));
    }

    #[test]
    fn slices_of_one_carver_are_those_of_single_calls_and_never_overlap(
        small in small(), sizes in prop::collection::vec((1u64..8, 0u32..4), 1..12),
    ) {
        let region = small.region();
        let (mut busy, clean) = (set(&Small::bytes(&small.busy)), set(&Small::bytes(&small.clean)));
        let mut carver = Carver::new(&region, &busy, &clean);
        for (pages, align) in sizes {
            let size = pages * small.page * BLOCK;
            let request = Request { align: BLOCK << align, ..Request::new(size, owner()) };
            let slice = carver.place(&request);
            prop_assert_eq!(&slice, &place(&region, &busy, &clean, &request));
            if let Ok(slice) = slice {
                let span = Span::new(Offset::new(slice.offset), slice.size.get()).unwrap();
                prop_assert_eq!(busy.overlapping(span), None);
                busy = busy.iter().chain([span]).collect();
            }
        }
    }

    #[test]
    fn a_fixed_place_is_given_exactly_when_the_model_has_it(small in small(), pages in 1u64..8, at in 0..BLOCKS) {
        let size = pages * small.page;
        let (busy, clean) = (set(&Small::bytes(&small.busy)), set(&Small::bytes(&small.clean)));
        let request = Request { at: Some(at * BLOCK), ..Request::new(size * BLOCK, owner()) };
        let blocks = small.blocks();
        let of = blocks.iter().skip(usize::try_from(at).unwrap()).take(usize::try_from(size).unwrap());
        let free = of.clone().all(|b| !b.busy) && of.clone().any(|b| !b.retired);
        let inside = at + size <= BLOCKS && (small.base + at).is_multiple_of(small.page);
        prop_assert_eq!(place(&small.region(), &busy, &clean, &request).is_ok(), free && inside);
    }

    #[test]
    fn what_was_short_would_have_been_enough(small in small(), pages in 1u64..16) {
        let size = pages * small.page * BLOCK;
        let busy = set(&Small::bytes(&small.busy));
        let request = Request::new(size, owner());
        let free = u64::try_from(small.blocks().iter().filter(|b| !b.busy).count()).unwrap() * BLOCK;
        let Err(short) = place(&small.region(), &busy, &SpanSet::default(), &request) else { return Ok(()) };
        match short.cause {
            Cause::Region { size: have, short_by } => prop_assert_eq!(have + short_by, size),
            Cause::Granted { granted, free: f, short_by } => {
                prop_assert_eq!((granted, f, f + short_by), (BLOCKS * BLOCK - free, free, size));
            }
            Cause::Fragmented { free: f, largest, short_by } => {
                prop_assert_eq!((f, largest + short_by), (free, size));
                let smaller = Request::new(largest / (small.page * BLOCK) * small.page * BLOCK, owner());
                let got = place(&small.region(), &busy, &SpanSet::default(), &smaller);
                let retired = matches!(&got, Err(PlacementError { cause: Cause::Retired { .. }, .. }));
                prop_assert!(got.is_ok() || smaller.size == 0 || retired);
            }
            Cause::Retired { free: f, retired } => prop_assert!(f == free && retired >= size),
            other => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn every_cause_names_what_was_short() {
    let plain = region(0x10_0000, 0x1_0000, None, &[(0, 0x1_0000)]);
    let none = SpanSet::default();
    let ask = |size, at| Request { at, ..Request::new(size, owner()) };
    let place = |busy: &[(u64, u64)], request: &Request| place(&plain, &set(busy), &none, request);
    let size = place(&[], &ask(0x1_1000, None));
    assert_eq!(short_of(size), Cause::Size { page: 0x1_0000, instead: 0x2_0000 });
    assert!(matches!(short_of(place(&[], &ask(0, None))), Cause::Size { instead: 0x1_0000, .. }));
    let odd = Request { align: 0x3_0000, ..ask(0x1_0000, None) };
    assert_eq!(short_of(place(&[], &odd)), Cause::Align);
    let region = short_of(place(&[], &ask(0x20_0000, None)));
    assert_eq!(region, Cause::Region { size: 0x10_0000, short_by: 0x10_0000 });
    let granted = short_of(place(&[(0, 0x9_0000)], &ask(0x8_0000, None)));
    assert_eq!(granted, Cause::Granted { granted: 0x9_0000, free: 0x7_0000, short_by: 0x1_0000 });
    let split = short_of(place(&[(0x7_0000, 0x1_0000)], &ask(0x9_0000, None)));
    assert_eq!(split, Cause::Fragmented { free: 0xf_0000, largest: 0x8_0000, short_by: 0x1_0000 });
    let bad = short_of(place(&[(0x1_0000, 0xf_0000)], &ask(0x1_0000, None)));
    assert_eq!(bad, Cause::Retired { free: 0x1_0000, retired: 0x1_0000 });
    let odd = short_of(place(&[], &ask(0x1_0000, Some(0x1000))));
    assert_eq!(odd, Cause::Unaligned { at: 0x1000, next: 0x1_0000 });
    let end = short_of(place(&[], &ask(0x2_0000, Some(0xf_0000))));
    assert_eq!(end, Cause::End { at: 0xf_0000, short_by: 0x1_0000 });
    assert!(matches!(short_of(place(&[], &ask(0x1_0000, Some(u64::MAX)))), Cause::End { .. }));
    let taken = short_of(place(&[(0x3_0000, 0x2_0000)], &ask(0x4_0000, Some(0x1_0000))));
    let first = Offset::new(0x3_0000);
    assert_eq!(taken, Cause::Taken { at: 0x1_0000, first, short_by: 0x2_0000 });
}

#[test]
fn each_page_size_is_kept_in_host_memory() {
    for page in [1 << 30, 2 << 20, 64 << 10, 4 << 10] {
        // The region begins in the middle of a page.
        let region = region(page * 8, page, Some(page * 5 + page / 2), &[]);
        let slice = place(&region, &SpanSet::default(), &SpanSet::default(), &Request::new(page, owner()));
        assert_eq!(slice.unwrap().offset, page / 2);
    }
}

#[test]
fn a_slice_over_a_retired_page_keeps_it_as_a_hole() {
    let region = region(0x4_0000, 0x1_0000, None, &[(0x1_8000, 0x1000), (0x3_0000, 0x1000)]);
    let slice =
        place(&region, &SpanSet::default(), &SpanSet::default(), &Request::new(0x3_0000, owner())).unwrap();
    assert_eq!(slice.offset, 0);
    let holes = region.retired.within(Span::new(Offset::new(slice.offset), slice.size.get()).unwrap());
    assert_eq!(holes, set(&[(0x1_8000, 0x1000)]));
}

#[test]
fn a_slice_may_be_the_whole_region() {
    let region = region(0x10_0000, 0x1_0000, None, &[]);
    let none = SpanSet::default();
    let slice = place(&region, &none, &none, &Request::new(0x10_0000, owner())).unwrap();
    assert_eq!((slice.offset, slice.size.get()), (0, 0x10_0000));
}

/// A carver keeps its free runs in pieces of 128; these regions have several.
#[test]
fn every_free_run_of_a_region_with_many_holes_is_given_once_from_below() {
    let runs = 400;
    let held: Vec<_> = (0..runs).map(|run| ((2 * run + 1) * BLOCK, BLOCK)).collect();
    let region = region(2 * runs * BLOCK, BLOCK, None, &[]);
    let mut carver = Carver::new(&region, &set(&held), &SpanSet::default());
    for run in 0..runs {
        let slice = carver.place(&Request::new(BLOCK, owner())).unwrap();
        assert_eq!(slice.offset, 2 * run * BLOCK);
    }
    let none_left = Cause::Granted { granted: 2 * runs * BLOCK, free: 0, short_by: BLOCK };
    assert_eq!(short_of(carver.place(&Request::new(BLOCK, owner()))), none_left);
}

#[test]
fn a_slice_over_many_retired_pages_takes_all_of_them() {
    let pages = 400;
    let retired: Vec<_> = (0..pages).map(|page| (2 * page * BLOCK, BLOCK)).collect();
    let region = region(2 * pages * BLOCK, BLOCK, None, &retired);
    let mut carver = Carver::new(&region, &SpanSet::default(), &SpanSet::default());
    let large = pages * BLOCK;
    for offset in [0, large] {
        assert_eq!(carver.place(&Request::new(large, owner())).unwrap().offset, offset);
    }
    assert!(matches!(short_of(carver.place(&Request::new(BLOCK, owner()))), Cause::Granted { free: 0, .. }));
}

/// Blocks of the regions that are enumerated: each is held, free and dirty, free and clean, or free and retired.
const FEW: u64 = 5;

/// Whether `state`, with two bits for each block, has the block as held (0), dirty (1), clean (2) or retired (3).
fn is(state: u64, block: u64, kind: u64) -> bool {
    (state >> (2 * block)) & 3 == kind
}

/// The lowest best place in a region with `state`, which begins at host block `base`: all places are compared.
fn search(state: u64, base: u64, size: u64, align: u64) -> Option<u64> {
    let places = (0..FEW).filter(|start| start + size <= FEW && (base + start).is_multiple_of(align));
    let kind = |start: u64| {
        let any = |kind: u64| (start..start + size).any(|block| is(state, block, kind));
        (!any(0) && (any(1) || any(2))).then_some((any(3), any(1), start))
    };
    places.filter_map(kind).min().map(|(_, _, start)| start)
}

/// 1,024 states, five sizes and a sixth that is too large, three alignments: 18,432 requests.
#[test]
fn every_request_of_every_small_region_is_placed_as_by_a_search() {
    for state in 0..1_u64 << (2 * FEW) {
        let base = state % 3;
        let blocks = |kind: u64| -> Vec<_> {
            (0..FEW).filter(|&block| is(state, block, kind)).map(|block| (block * BLOCK, BLOCK)).collect()
        };
        let (busy, clean) = (set(&blocks(0)), set(&blocks(2)));
        let region = region(FEW * BLOCK, BLOCK, Some(base * BLOCK), &blocks(3));
        for (size, align) in (1..=FEW + 1).flat_map(|size| [1, 2, 4].map(|align| (size, align))) {
            let request = Request { align: align * BLOCK, ..Request::new(size * BLOCK, owner()) };
            let offset = place(&region, &busy, &clean, &request).ok().map(|slice| slice.offset);
            let expected = search(state, base, size, align).map(|start| start * BLOCK);
            assert_eq!(offset, expected, "state {state:#o}, base {base}, size {size}, alignment {align}");
        }
    }
}

/// 1,024 states, and 15 pairs of sizes for each, with one block too many at most: 15,360 pairs.
#[test]
fn every_two_slices_of_a_small_region_are_apart() {
    for state in 0..1_u64 << (2 * FEW) {
        let blocks = |kind: u64| -> Vec<_> {
            (0..FEW).filter(|&block| is(state, block, kind)).map(|block| (block * BLOCK, BLOCK)).collect()
        };
        let (busy, clean) = (set(&blocks(0)), set(&blocks(2)));
        let region = region(FEW * BLOCK, BLOCK, None, &blocks(3));
        for (first, second) in
            (1..=FEW).flat_map(|first| (1..=FEW + 1 - first).map(move |second| (first, second)))
        {
            let mut carver = Carver::new(&region, &busy, &clean);
            let mut left = state;
            for size in [first, second] {
                let offset =
                    carver.place(&Request::new(size * BLOCK, owner())).ok().map(|slice| slice.offset);
                let expected = search(left, 0, size, 1);
                assert_eq!(
                    offset,
                    expected.map(|start| start * BLOCK),
                    "state {state:#o}, {first}, {second}"
                );
                // The blocks of a slice are held: their two bits are 0.
                let taken = expected.into_iter().flat_map(|start| start..start + size);
                left = taken.fold(left, |left, block| left & !(3_u64 << (2 * block)));
            }
        }
    }
}
