//! Data arrives as it was sent: every byte, and no byte next to it.

use std::ops::Range;

use egm_vendor::verbs::{Access, Memory, Registered, Remote, Sge, VerbsError, Work};

use super::super::Setting;
use super::kinds::Kind;
use super::loopback::{self, DEPTH, Loopback};
use super::site::Site;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::{self, Random};
use crate::sys::Mapping;

/// Bytes that are written and compared at once.
const CHUNK: usize = 1 << 16;
/// Bytes around what is transferred that must stay as they are.
pub(in crate::validate) const GUARD: usize = 4096;
/// Largest request, in bytes.
const LARGEST: usize = 1 << 30;
/// Odd sizes, each at an odd place.
const SIZES: [usize; 7] = [1, 3, 255, 1023, 4095, 4097, 65_537];

/// Registered memory at both ends of a transfer.
pub(in crate::validate) struct Ends<'d, N, F> {
    pub(in crate::validate) near: Registered<'d, N>,
    pub(in crate::validate) far: Registered<'d, F>,
}

/// Fills `size` bytes from `offset` with the pattern `seed`.
pub(in crate::validate) fn put<M: Memory>(
    region: &mut Registered<'_, M>,
    offset: usize,
    size: usize,
    seed: u64,
) {
    each_chunk(size, seed, |at, bytes| region.store(offset + at, bytes));
}

/// The first byte of `size` from `offset` that is not of the pattern `seed`.
pub(in crate::validate) fn difference<M: Memory>(
    region: &Registered<'_, M>,
    offset: usize,
    size: usize,
    seed: u64,
) -> Option<usize> {
    let mut seen = vec![0u8; CHUNK];
    let mut wrong = None;
    each_chunk(size, seed, |at, bytes| {
        if wrong.is_none() {
            let seen = &mut seen[..bytes.len()];
            region.load(offset + at, seen);
            wrong = seen.iter().zip(bytes).position(|(seen, meant)| seen != meant).map(|place| at + place);
        }
    });
    wrong
}

/// Whether, of the pattern `poison` that was put at `start`, one of these `bytes` is another now.
pub(in crate::validate) fn changed<M: Memory>(
    region: &Registered<'_, M>,
    start: usize,
    bytes: Range<usize>,
    poison: u64,
) -> bool {
    let mut seen = vec![0u8; CHUNK];
    let mut changed = false;
    each_chunk(bytes.end, poison, |at, chunk| {
        let first = bytes.start.saturating_sub(at).min(chunk.len());
        let seen = &mut seen[first..chunk.len()];
        region.load(start + at + first, seen);
        changed |= *seen != chunk[first..];
    });
    changed
}

/// Calls `each` with the pattern's bytes, piece by piece.
fn each_chunk(size: usize, seed: u64, mut each: impl FnMut(usize, &[u8])) {
    let mut chunk = vec![0u8; CHUNK.min(size.next_multiple_of(8))];
    for at in (0..size).step_by(CHUNK) {
        let length = CHUNK.min(size - at);
        pattern::fill(&mut chunk, seed, (at / 8) as u64, 0);
        each(at, &chunk[..length]);
    }
}

/// Moves `size` bytes by as many requests as they need and waits for the last; each is of one kind.
pub(in crate::validate) fn transfer<'m>(
    wire: &Loopback<'_>,
    size: usize,
    local: impl Fn(usize, usize) -> Result<(Sge<'m>, Work), VerbsError>,
) -> Result<(), VerbsError> {
    let largest = usize::try_from(wire.site.place.port.largest_message).unwrap_or(LARGEST).min(LARGEST);
    let depth = usize::try_from(DEPTH.min(wire.site.abilities.max_qp_wr)).unwrap_or(1);
    let mut under_way = 0usize;
    for (id, at) in (0..size).step_by(largest).enumerate() {
        if under_way == depth {
            under_way = under_way.saturating_sub(wire.completions.wait(1, wire.site.timeout)?.len());
        }
        let (piece, work) = local(at, largest.min(size - at))?;
        wire.requester.post(id as u64, piece, work)?;
        under_way += 1;
    }
    wire.completions.wait(under_way, wire.site.timeout).map(drop)
}

/// Registers memory of each kind twice and moves data from one to the other and back.
pub(in crate::validate) fn moves(
    site: &Site<'_>,
    setting: &Setting,
    kinds: &[Kind],
    access: Access,
) -> Result<Finding, Broken> {
    if kinds.is_empty() {
        return Ok(Finding::skipped("no pool of huge pages has two free ones: write to nr_hugepages"));
    }
    let size = usize::try_from(setting.most).unwrap_or(LARGEST).clamp(1 << 17, LARGEST);
    loopback::with(site, setting.seed, |wire| {
        let mut claim = Claim::default();
        for kind in kinds {
            // A touch that finds no page of a pool ends the process.
            let size = size.min(kind.most().saturating_sub(2 * GUARD));
            if size == 0 {
                claim.seen(format!("{}: left out, for nothing of it is free", kind.name));
                continue;
            }
            if let Err(broken) = one_kind(wire, kind, size, access, setting.seed, &mut claim) {
                claim.untrue(broken.to_string());
            }
        }
        Ok(claim.finish())
    })
}

/// Moves data in memory of one kind; what does not arrive is noted in `claim`.
fn one_kind(
    wire: &Loopback<'_>,
    kind: &Kind,
    size: usize,
    access: Access,
    seed: u64,
    claim: &mut Claim,
) -> Result<(), Broken> {
    let (near, far) = (kind.memory(size + 2 * GUARD)?, kind.memory(size + 2 * GUARD)?);
    let registered = wire
        .domain
        .register(near, access)
        .and_then(|near| Ok(Ends { near, far: wire.domain.register(far, access)? }));
    let name = &kind.name;
    let moved = registered.and_then(|mut ends| {
        whole(wire, &mut ends, size, seed, claim, name)?;
        pieces(wire, &mut ends, seed, claim, name)
    });
    match moved {
        Ok(()) => claim
            .seen(format!("{name}: {size} bytes written, read and sent, {} unaligned pieces", SIZES.len())),
        Err(error) => claim.untrue(format!("{name}: {error}")),
    }
    Ok(())
}

/// All of it: a write, a read, a send.
pub(in crate::validate) fn whole<N: Memory, F: Memory>(
    wire: &Loopback<'_>,
    Ends { near, far }: &mut Ends<'_, N, F>,
    size: usize,
    seed: u64,
    claim: &mut Claim,
    name: &str,
) -> Result<(), VerbsError> {
    let mut random = Random::new(seed);
    let mut report = |what: &str, wrong: Option<usize>| {
        if let Some(at) = wrong {
            claim.untrue(format!("{name}: byte {at:#x} of a {what} of {size:#x} bytes is wrong"));
        }
    };
    let (sent, poison) = (random.next(), random.next());
    put(near, GUARD, size, sent);
    put(far, 0, size + 2 * GUARD, poison);
    let there = far.remote(GUARD, size)?;
    transfer(wire, size, |at, length| {
        Ok((near.sge(GUARD + at, length)?, Work::Write(there.plus(at as u64))))
    })?;
    report("write", difference(far, GUARD, size, sent));
    report("write's surroundings before", difference(far, 0, GUARD, poison));
    report(
        "write's surroundings behind",
        changed(far, 0, GUARD + size..size + 2 * GUARD, poison).then_some(size),
    );

    let (sent, poison) = (random.next(), random.next());
    put(far, GUARD, size, sent);
    put(near, 0, size + 2 * GUARD, poison);
    transfer(wire, size, |at, length| {
        Ok((near.sge(GUARD + at, length)?, Work::Read(there.plus(at as u64))))
    })?;
    report("read", difference(near, GUARD, size, sent));
    report("read's surroundings before", difference(near, 0, GUARD, poison));
    report(
        "read's surroundings behind",
        changed(near, 0, GUARD + size..size + 2 * GUARD, poison).then_some(size),
    );

    let (sent, poison) = (random.next(), random.next());
    let size = size.min(1 << 20);
    put(near, GUARD, size, sent);
    put(far, GUARD, size, poison);
    wire.responder.post_receive(1, far.sge(GUARD, size)?)?;
    wire.requester.post(2, near.sge(GUARD, size)?, Work::Send)?;
    let done = wire.completions.wait(2, wire.site.timeout)?;
    report("send", difference(far, GUARD, size, sent));
    let arrived = done.iter().find(|completion| completion.id == 1).map(|completion| completion.bytes);
    if arrived != u32::try_from(size).ok() {
        claim.untrue(format!("{name}: a send of {size:#x} bytes reports that {arrived:?} arrived"));
    }
    Ok(())
}

/// Odd sizes at odd places: each byte of it and none next to it.
fn pieces(
    wire: &Loopback<'_>,
    Ends { near, far }: &mut Ends<'_, Mapping, Mapping>,
    seed: u64,
    claim: &mut Claim,
    name: &str,
) -> Result<(), VerbsError> {
    let mut random = Random::new(!seed);
    for size in SIZES {
        let (sent, poison) = (random.next(), random.next());
        let (from, to) = (random.below(GUARD), 8 + random.below(GUARD));
        put(near, from, size, sent);
        put(far, 0, to + size + 8, poison);
        let there: Remote = far.remote(to, size)?;
        wire.requester.post(1, near.sge(from, size)?, Work::Write(there))?;
        wire.completions.wait(1, wire.site.timeout)?;
        if let Some(at) = difference(far, to, size, sent) {
            claim.untrue(format!(
                "{name}: byte {at:#x} of a write of {size:#x} bytes from {from:#x} to {to:#x} is wrong"
            ));
        }
        if difference(far, 0, to, poison).is_some() || changed(far, 0, to + size..to + size + 8, poison) {
            claim.untrue(format!("{name}: a write of {size:#x} bytes to {to:#x} changed bytes beside it"));
        }
    }
    Ok(())
}
