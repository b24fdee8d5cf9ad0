//! Claim: a slice behind a PCI function matches its capability and registers: its memory keeps what is written, what is
//! not real reads ones, and its doorbells work.
//!
//! The memory also shows whether it was kept: the check leaves a pattern that counts the checks before it, and passes
//! only where it finds all zeros or such a pattern, whole. Its value is the number of those checks. `egm_device.size`
//! and `egm_device.pxm` are what the operator gave; `egm_device.functions` is the number of functions (default: 1).

use std::thread;
use std::time::{Duration, Instant};

use egm_address::{InBar, SpanSet};

use crate::cmdline::Arguments;
use crate::egm_function::{self, Function, MAGIC, VERSION, narrow, wide};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern;

/// The first word of a pattern is this plus the number of checks so far.
const MARK: u64 = u64::from_le_bytes(*b"\0\0egm-ok");
/// More checks than anybody does on one slice.
const MANY: u64 = 1 << 16;
/// In the status: a scrub runs; the guest has quiesced; the last scrub ended early.
const SCRUBS: u32 = 1;
const QUIESCED: u32 = 2;
const CUT_SHORT: u32 = 4;
const SCRUB: u32 = 1;
pub(super) const QUIESCE: u32 = 2;
const RESUME: u32 = 3;
const NONSENSE: u32 = 99;
/// A scrub of a large slice takes a while.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(super) fn run(args: &Arguments) -> Result<Finding, Broken> {
    let found = egm_function::all()?;
    let Some(first) = found.first() else {
        return Ok(Finding::skipped("the guest has no slice behind a PCI function"));
    };
    let mut claim = Claim::default();
    claim.equal("the number of functions", &found.len(), &args.get("egm_device.functions", 1)?);
    claim.equal("the slice", &first.facts.size, &args.get("egm_device.size", first.facts.size)?);
    let pxm = first.facts.pxm.unwrap_or(u32::MAX);
    claim.equal("the proximity domain", &pxm, &args.get("egm_device.pxm", pxm)?);
    let mut before = None;
    for function in &found {
        let checks = check(&mut claim, function)?;
        before.get_or_insert(checks);
    }
    let value = before.and_then(|checks| u32::try_from(checks).ok()).unwrap_or(0);
    Ok(claim.finish().with_value(value.into(), "checks before"))
}

/// Checks one function, and returns how many checks its memory has seen before.
pub(super) fn check(claim: &mut Claim, found: &egm_memory::Function) -> Result<u64, Broken> {
    let function = Function::open(found)?;
    let retired = function.retired()?;
    registers(claim, &function, &retired);
    let usable = function.usable()?;
    let before = kept(claim, &function, &usable);
    unreal(claim, &function, &retired);
    doorbells(claim, &function, &usable)?;
    written(claim, &function, &usable, before + 1);
    let bytes = usable.size();
    claim.seen(format!("{}: {bytes} bytes to use, {before} checks before", found.address));
    Ok(before)
}

/// Registers and capability agree, and nothing changes what can only be read.
fn registers(claim: &mut Claim, function: &Function, retired: &SpanSet<InBar>) {
    let (registers, facts, name) = (&function.registers, function.found.facts, &function.found.address);
    let word = |at| registers.read_word(at);
    registers.write_word(narrow::MAGIC, 0);
    claim.equal(format!("{name}: the magic"), &word(narrow::MAGIC), &MAGIC);
    claim.equal(format!("{name}: the version"), &word(narrow::VERSION), &VERSION);
    for (what, at, fact) in [
        ("size", wide::SIZE, facts.size),
        ("base", wide::BASE, facts.base),
        ("page size", wide::PAGE, facts.page),
    ] {
        claim.equal(format!("{name}: the {what}"), &registers.read(at), &fact);
        let halves = u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        claim.equal(format!("{name}: the {what} in halves"), &halves, &fact);
    }
    claim.equal(format!("{name}: the proximity domain"), &word(narrow::PXM), &facts.pxm.unwrap_or(u32::MAX));
    let generation = word(narrow::GENERATION);
    claim.equal(format!("{name}: the retired bytes"), &registers.read(wide::RETIRED), &retired.size());
    claim.equal(format!("{name}: the generation"), &word(narrow::GENERATION), &generation);
    registers.write_word(narrow::CONTROL, u32::MAX);
    claim.equal(format!("{name}: the control bits"), &word(narrow::CONTROL), &1);
    registers.write_word(narrow::CONTROL, 0);
    claim.equal(format!("{name}: the control bits"), &word(narrow::CONTROL), &0);
}

/// Number of checks that the memory has seen: none when all is zero.
fn kept(claim: &mut Claim, function: &Function, usable: &SpanSet<InBar>) -> u64 {
    let first = words(usable).next().map_or(0, |at| function.memory.read(at));
    let checks = first.checked_sub(MARK).filter(|checks| (1..MANY).contains(checks));
    let expected = |at: usize| checks.map_or(0, |_| pattern::word(first, at as u64 / 8));
    same(claim, function, usable, "is neither zero nor what a check left", expected);
    checks.unwrap_or(0)
}

/// Requires that bytes beyond the slice and retired bytes read ones, whatever is written there.
fn unreal(claim: &mut Claim, function: &Function, retired: &SpanSet<InBar>) {
    let (name, size) = (&function.found.address, function.memory.size());
    claim.holds(size.is_power_of_two() && size as u64 >= function.found.facts.size, || {
        format!("{name}: its memory BAR has {size:#x} bytes")
    });
    let slice = usize::try_from(function.found.facts.size).unwrap_or(usize::MAX);
    let beyond = [slice, slice + (size.saturating_sub(slice) / 16 * 8), size.saturating_sub(8)];
    let ends = retired.iter().flat_map(|span| [span.start().get(), span.last().get() & !7]);
    let places =
        ends.filter_map(|at| usize::try_from(at).ok()).chain(beyond.into_iter().filter(|at| *at >= slice));
    for at in places.filter(|at| *at < size) {
        function.memory.write(at, 0);
        let is = function.memory.read(at);
        claim.holds(is == u64::MAX, || format!("{name}: {at:#x} is not real and reads {is:#x}"));
    }
}

/// Nonsense is counted, quiesce and resume are seen, and a scrub leaves zeros.
fn doorbells(claim: &mut Claim, function: &Function, usable: &SpanSet<InBar>) -> Result<(), Broken> {
    let (registers, name) = (&function.registers, &function.found.address);
    let status = || registers.read_word(narrow::STATUS);
    let ring = |value| registers.write_word(narrow::DOORBELL, value);
    let mistakes = registers.read_word(narrow::MISTAKES);
    ring(NONSENSE);
    claim.equal(format!("{name}: the mistakes"), &registers.read_word(narrow::MISTAKES), &(mistakes + 1));
    ring(QUIESCE);
    claim.equal(format!("{name}: the status, quiesced"), &(status() & QUIESCED), &QUIESCED);
    ring(RESUME);
    claim.equal(format!("{name}: the status, resumed"), &(status() & QUIESCED), &0);
    for at in words(usable) {
        function.memory.write(at, !pattern::word(MARK, at as u64));
    }
    same(claim, function, usable, "is not what was written", |at| !pattern::word(MARK, at as u64));
    ring(SCRUB);
    let begun = Instant::now();
    while status() & SCRUBS != 0 {
        if begun.elapsed() > TIMEOUT {
            return Err(Broken::Argument(name.to_string(), "does not end its scrub"));
        }
        thread::sleep(Duration::from_millis(10));
    }
    claim.equal(format!("{name}: the status, scrubbed"), &(status() & CUT_SHORT), &0);
    claim.equal(format!("{name}: the scrubbed bytes"), &registers.read(wide::SCRUBBED), &usable.size());
    same(claim, function, usable, "is not zero after a scrub", |_| 0);
    Ok(())
}

/// Leaves the pattern of this check.
fn written(claim: &mut Claim, function: &Function, usable: &SpanSet<InBar>, checks: u64) {
    let value = |at: usize| pattern::word(MARK + checks, at as u64 / 8);
    words(usable).for_each(|at| function.memory.write(at, value(at)));
    same(claim, function, usable, "is not what was written", value);
}

/// Requires that each usable word equals `expected`; names the first that does not.
fn same(
    claim: &mut Claim,
    function: &Function,
    usable: &SpanSet<InBar>,
    otherwise: &str,
    expected: impl Fn(usize) -> u64,
) {
    let wrong = words(usable).find(|at| function.memory.read(*at) != expected(*at));
    if let Some(at) = wrong {
        let (name, is) = (&function.found.address, function.memory.read(at));
        claim.untrue(format!("{name}: {is:#x} at {at:#x} {otherwise}"));
    }
}

/// Offsets of the words of 64 bits in `usable`.
fn words(usable: &SpanSet<InBar>) -> impl Iterator<Item = usize> + '_ {
    let spans = usable.iter().map(|span| span.start().get()..=span.last().get());
    spans.flat_map(|span| span.step_by(8)).filter_map(|at| usize::try_from(at).ok())
}
