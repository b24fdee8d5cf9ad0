//! Speed: bandwidth with many requests under way, latency with one.

use std::time::{Duration, Instant};

use egm_guest::findings::Figure;
use egm_vendor::verbs::{Access, Registered, VerbsError, Work};

use super::super::Setting;
use super::data;
use super::loopback::{self, DEPTH, Loopback};
use super::site::Site;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;

/// Sizes of requests in bytes, as far as the largest that is asked for goes.
const SIZES: [usize; 6] = [4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// A round lasts this long at least.
const ROUND: Duration = Duration::from_millis(200);
/// Requests of a round of latency, as many as come within [`ROUND`] at least 10.
const FEW: usize = 10;

/// A measurement: its name and its operation.
type Series = (&'static str, fn(egm_vendor::verbs::Remote) -> Work);

fn rounds(setting: &Setting) -> Result<usize, Broken> {
    Ok(setting.args.get("rdma.rounds", 3usize)?.clamp(1, 100))
}

/// Sizes that are measured.
pub(super) fn sizes(setting: &Setting) -> impl Iterator<Item = usize> {
    let most = usize::try_from(setting.most).unwrap_or(usize::MAX);
    SIZES.into_iter().filter(move |size| *size == SIZES[0] || *size <= most)
}

pub(super) fn bandwidth(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    const ALL: [Series; 2] = [("write", Work::Write), ("read", Work::Read)];
    let largest = sizes(setting).last().unwrap_or(SIZES[0]);
    let rounds = rounds(setting)?;
    loopback::with(site, setting.seed, |wire| {
        let (mut near, mut far) = memories(wire, largest)?;
        let (mut claim, mut figures, mut best) = (Claim::default(), Vec::new(), 0f64);
        for (series, work) in ALL {
            for size in sizes(setting) {
                // The source has the pattern, the target another.
                let (here, there) = if series == "write" {
                    (setting.seed, !setting.seed)
                } else {
                    (!setting.seed, setting.seed)
                };
                data::put(&mut near, 0, size, here);
                data::put(&mut far, 0, size, there);
                let there = far.remote(0, size)?;
                let mut speeds = Vec::new();
                for _ in 0..rounds {
                    speeds.push(stream(wire, &near, size, work(there))?);
                }
                let target = if series == "write" { &far } else { &near };
                if let Some(at) = data::difference(target, 0, size, setting.seed) {
                    claim.untrue(format!("byte {at:#x} of {size:#x} is wrong after a timed {series}"));
                }
                let figure = Figure::of(format!("rdma {series}"), Some(size as u64), "GB/s", &mut speeds);
                best = best.max(figure.value);
                figures.push(figure);
            }
        }
        claim.seen(format!(
            "{DEPTH} work requests outstanding, rounds of {} ms, {rounds} rounds",
            ROUND.as_millis()
        ));
        Ok(claim.finish().with_value(best, "GB/s").with_figures(figures))
    })
}

/// GB/s of writes of `size` bytes, one round.
pub(super) fn write(site: &Site<'_>, setting: &Setting, size: usize) -> Result<f64, Broken> {
    let mut speed = 0.0;
    loopback::with(site, setting.seed, |wire| {
        let (near, far) = memories(wire, size)?;
        speed = stream(wire, &near, size, Work::Write(far.remote(0, size)?))?;
        Ok(Finding::passed(""))
    })?;
    Ok(speed)
}

fn memories<'d>(
    wire: &'d Loopback<'_>,
    size: usize,
) -> Result<(Registered<'d, Mapping>, Registered<'d, Mapping>), Broken> {
    let memory = || Mapping::new(size).map_err(Broken::system(format!("cannot have {size} bytes")));
    Ok((wire.domain.register(memory()?, Access::ALL)?, wire.domain.register(memory()?, Access::ALL)?))
}

/// GB/s of one round: requests of `size` bytes for [`ROUND`], all of which complete.
fn stream(
    wire: &Loopback<'_>,
    near: &Registered<'_, Mapping>,
    size: usize,
    work: Work,
) -> Result<f64, VerbsError> {
    let depth = usize::try_from(DEPTH.min(wire.site.abilities.max_qp_wr)).unwrap_or(1);
    let (mut under_way, mut done) = (0, 0usize);
    let begun = Instant::now();
    while begun.elapsed() < ROUND || done + under_way == 0 {
        while under_way < depth {
            wire.requester.post(0, near.sge(0, size)?, work)?;
            under_way += 1;
        }
        let came = wire.completions.wait(1, wire.site.timeout)?.len();
        under_way -= came.min(under_way);
        done += came;
    }
    done += wire.completions.wait(under_way, wire.site.timeout)?.len();
    Ok(done as f64 * size as f64 / begun.elapsed().as_nanos().max(1) as f64)
}

pub(super) fn latency(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    const ALL: [Series; 3] =
        [("write", Work::Write), ("read", Work::Read), ("fetch and add", |there| Work::FetchAdd(there, 1))];
    let rounds = rounds(setting)?;
    loopback::with(site, setting.seed, |wire| {
        let (mut near, mut far) = memories(wire, 4096)?;
        let there = far.remote(0, 8)?;
        let (mut claim, mut figures) = (Claim::default(), Vec::new());
        let without = usize::from(site.abilities.atomics == egm_vendor::verbs::Atomics::None);
        for (series, work) in ALL.into_iter().take(ALL.len() - without) {
            let is_write = series == "write";
            data::put(&mut near, 0, 8, if is_write { setting.seed } else { !setting.seed });
            data::put(&mut far, 0, 8, if is_write { !setting.seed } else { setting.seed });
            let (start, mut medians, mut done) = (word(&far), Vec::new(), 0);
            for _ in 0..rounds {
                let (median, requests) = one_by_one(wire, &near, work(there))?;
                medians.push(median);
                done += requests;
            }
            if series == "fetch and add" {
                // The word is one more for each, and the last answer is what it was before that one.
                let sum = start.wrapping_add(done);
                claim.equal("the word after timed fetch-and-adds", &word(&far), &sum);
                claim.equal("the answer of the last timed fetch-and-add", &word(&near), &sum.wrapping_sub(1));
            } else {
                let target = if is_write { &far } else { &near };
                let wrong = data::difference(target, 0, 8, setting.seed);
                claim.holds(wrong.is_none(), || format!("8 bytes are wrong after timed {series}s"));
            }
            figures.push(Figure::of(
                format!("rdma {series}, post to completion"),
                Some(8),
                "us",
                &mut medians,
            ));
        }
        let value = figures.first().map_or(0.0, |figure| figure.value);
        claim.seen("8 bytes, one request at a time, medians");
        Ok(claim.finish().with_value(value, "us").with_figures(figures))
    })
}

/// The first word of some memory.
fn word(region: &Registered<'_, Mapping>) -> u64 {
    let mut bytes = [0; 8];
    region.load(0, &mut bytes);
    u64::from_ne_bytes(bytes)
}

/// The median of requests that are made one after the other, in µs, and how many they were.
fn one_by_one(
    wire: &Loopback<'_>,
    near: &Registered<'_, Mapping>,
    work: Work,
) -> Result<(f64, u64), VerbsError> {
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.len() < FEW || begun.elapsed() < ROUND {
        let one = Instant::now();
        wire.requester.post(0, near.sge(0, 8)?, work)?;
        wire.completions.wait(1, wire.site.timeout)?;
        times.push(one.elapsed().as_nanos() as f64 / 1000.0);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times.len() as u64))
}
