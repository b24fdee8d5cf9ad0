//! Planning 1,000 slices of a region with 10,000 retired pages.
//!
//! ```text
//! cargo bench -p egm-device --bench carve -- --rounds 20
//! ```
//! prints a line for each figure: all slices with one `Carver`, and a single `place` beside 999 granted slices, as the
//! ledger calls it.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;
use std::time::Instant;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use egm_device::carve::plan::{Carver, Request, place};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind};
use egm_device::retired::Retired;

const REGION: u64 = 2 << 40;

fn main() {
    let rounds =
        std::env::args().skip_while(|word| word != "--rounds").nth(1).map_or(20, |n| n.parse().unwrap());
    let (region, requests) = (region(), requests());
    let none = SpanSet::default();
    let (mut all, mut one) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let begun = Instant::now();
        let mut carver = Carver::new(&region, &none, &none);
        let slices: Vec<_> = requests.iter().map(|request| carver.place(request).unwrap()).collect();
        all.push(begun.elapsed().as_secs_f64() * 1e3);
        let busy: SpanSet<InRegion> =
            slices.iter().skip(1).map(|s| Span::new(Offset::new(s.offset), s.size.get()).unwrap()).collect();
        let begun = Instant::now();
        black_box(place(&region, &busy, &none, &requests[0]).unwrap());
        one.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let (retired, slices) = (region.retired.spans().iter().count(), requests.len());
    println!("2 TiB, {retired} spans of retired pages, {slices} slices; medians of {rounds} rounds");
    println!("carve all          {:9.3} ms", median(all));
    println!("carve one of them  {:9.3} ms", median(one));
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A 2 TiB region with 10,000 retired blocks of 64 KiB, spread by a fixed generator.
fn region() -> Region {
    let mut random = 1u64;
    let pages = (0..10_000).map(|_| ((next(&mut random) % (REGION >> 16)) << 16, 1 << 16));
    Region {
        name: "egm4".to_owned(),
        kind: RegionKind::Memfd,
        node: None,
        size: ByteSize::new(REGION),
        page_size: ByteSize::new(2 << 20),
        base: None,
        functions: Vec::new(),
        retired: Retired::new(pages, REGION, 1 << 16),
    }
}

/// 1,000 slices of 2 MiB to 2 GiB.
fn requests() -> Vec<Request> {
    let mut random = 2u64;
    let owner = Owner { name: "bench".to_owned(), uid: 0, pid: 1, started: 1, domain: None };
    (0..1_000).map(|_| Request::new((next(&mut random) % 1024 + 1) << 21, owner.clone())).collect()
}

/// The next number of a linear congruential generator; its upper bits are good enough to spread things.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 20
}
