//! Speed of puts and gets, by the GPU's clock.

use egm_guest::findings::Figure;
use egm_vendor::cuda::Event;
use egm_vendor::nvshmem::Range;

use super::element::Element;
use crate::error::Broken;

/// Smallest transfer in bytes; each next one is four times as long.
const LEAST: u64 = 4 << 10;
/// Largest transfer in bytes.
const MOST: u64 = 1 << 30;
/// Bytes that a round moves at least, so that it is longer than what starts it takes.
const ROUND: u64 = 64 << 20;
/// Most transfers of a round.
const MOST_TIMES: u64 = 512;
/// Rounds of which the median is taken; one more comes before them.
const ROUNDS: usize = 7;

/// Something to queue on the PE's stream, many times.
pub(super) type Once<'a> = &'a dyn Fn(&Element<'_>) -> Result<(), Broken>;

/// Sizes from [`LEAST`] to `most`.
fn sizes(most: u64) -> Vec<usize> {
    let sizes = std::iter::successors(Some(LEAST), |size| Some(size * 4))
        .take_while(|size| *size <= most.clamp(LEAST, MOST));
    sizes.filter_map(|size| usize::try_from(size).ok()).collect()
}

/// Measures what `once` moves, `bytes` a time. Nothing is said to be measured that the clock does not show.
pub(super) fn measure(
    element: &mut Element<'_>,
    series: &str,
    bytes: usize,
    once: Once<'_>,
) -> Result<Figure, Broken> {
    let times = (ROUND / bytes as u64).clamp(1, MOST_TIMES);
    let (begin, end) = (Event::new(&element.context)?, Event::new(&element.context)?);
    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        element.stream.record(&begin)?;
        for _ in 0..times {
            once(element)?;
        }
        element.stream.record(&end)?;
        element.stream.synchronize()?;
        let seconds = begin.seconds_until(&end)?;
        if round > 0 {
            rounds.push((bytes as u64 * times) as f64 / seconds / 1e9);
        }
    }
    let figure = Figure::of(series, Some(bytes as u64), "GB/s", &mut rounds);
    if usize::try_from(figure.rounds) != Ok(ROUNDS) || figure.least <= 0.0 {
        element.untrue(format!("{series} of {bytes:#x} bytes took no time by the GPU's clock"));
    }
    Ok(figure)
}

/// `nvshmem.bandwidth`: PE 0 alone, then all at once, each with the next one.
pub(super) fn bandwidth(element: &mut Element<'_>) -> Result<(), Broken> {
    let sizes = sizes(element.most);
    let most = sizes.last().copied().unwrap_or(4096);
    let (to, from) = (element.pe.allocate(most)?, element.pe.allocate(most)?);
    element.fill(&from, element.seed_of(element.me(), 0))?;
    for is_put in [true, false] {
        element.fill(&to, element.seed_of(element.me(), 1))?;
        for bytes in &sizes {
            alone_and_at_once(element, is_put, to.range(0, *bytes)?, from.range(0, *bytes)?)?;
        }
        let writer = if is_put { element.previous() } else { element.next() };
        let wrong = element.differing(&to, element.seed_of(writer, 0))?;
        if wrong > 0 {
            let what = if is_put { "puts" } else { "gets" };
            element.untrue(format!("after {what} were measured, {wrong} words are wrong"));
        }
        element.pe.barrier();
    }
    element.pe.free(to)?;
    element.pe.free(from)?;
    Ok(())
}

fn alone_and_at_once(
    element: &mut Element<'_>,
    is_put: bool,
    to: Range<'_>,
    from: Range<'_>,
) -> Result<(), Broken> {
    let target = if element.count() == 1 { "itself" } else { "the next PE" };
    let what = if is_put { format!("put to {target}") } else { format!("get from {target}") };
    element.pe.barrier();
    if element.me() == 0 {
        one(element, is_put, to, from, &what)?;
    }
    element.pe.barrier();
    if element.count() > 1 {
        one(element, is_put, to, from, &format!("{what}, all PEs at once"))?;
        element.pe.barrier();
    }
    Ok(())
}

/// Measures one size; the figures of PE 0 are kept.
fn one(
    element: &mut Element<'_>,
    is_put: bool,
    to: Range<'_>,
    from: Range<'_>,
    series: &str,
) -> Result<(), Broken> {
    let figure = measure(element, series, to.len(), &|element| {
        let (pe, whom, stream) = (&element.pe, element.next(), &element.stream);
        let queued =
            if is_put { pe.put_on(to, from, whom, stream) } else { pe.get_on(to, from, whom, stream) };
        Ok(queued?)
    })?;
    if element.me() == 0 {
        element.found.figures.push(figure);
    }
    Ok(())
}
