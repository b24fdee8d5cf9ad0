//! `egm-guest list` and `egm-guest test`: EGM memory that this machine has as a PCI function, for a person.

use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use egm_address::{ByteSize, PciAddress};
use egm_memory::{Found, Function, Memory, MemoryError, find};
use serde::Serialize;

use crate::pattern;

const NONE: &str = "no PCI function of this machine has EGM memory";

/// One function in `egm-guest list --json`.
#[derive(Debug, Serialize)]
struct Row {
    function: String,
    size: u64,
    usable: u64,
    page: u64,
    start: u64,
    node: Option<u32>,
    proximity_domain: Option<u32>,
    retired: Vec<(u64, u64)>,
    events: u32,
}

impl Row {
    fn of(function: &Function) -> Result<Self, MemoryError> {
        let registers = function.registers()?;
        let retired = registers.retired()?;
        let lost: u64 = retired.iter().map(|span| span.end - span.start).sum();
        Ok(Self {
            function: function.address.to_string(),
            size: function.facts.size,
            usable: function.facts.size.saturating_sub(lost),
            page: function.facts.page,
            start: function.start,
            node: function.node,
            proximity_domain: function.facts.pxm,
            retired: retired.into_iter().map(|span| (span.start, span.end - span.start)).collect(),
            events: registers.events(),
        })
    }
}

/// Lists the functions, and what is wrong with those that are broken.
pub(crate) fn list(json: bool) -> ExitCode {
    let Found { functions, broken } = match find() {
        Ok(found) => found,
        Err(error) => return fail(&error),
    };
    let mut errors: Vec<MemoryError> = broken.into_iter().map(|(_, error)| error).collect();
    let mut rows = Vec::new();
    for function in &functions {
        match Row::of(function) {
            Ok(row) => rows.push(row),
            Err(error) => errors.push(error),
        }
    }
    match (json, rows.is_empty(), errors.is_empty()) {
        (true, _, _) => println!("{}", serde_json::json!(rows)),
        (false, true, true) => println!("{NONE}"),
        (false, true, false) => {} // the errors say it
        (false, false, _) => table(&rows),
    }
    errors.iter().fold(ExitCode::SUCCESS, |_, error| fail(error))
}

fn table(rows: &[Row]) {
    println!(
        "{:<14}{:>12}{:>12}  {:<20}{:>5}{:>9}{:>9}",
        "function", "size", "retired", "at", "node", "domain", "events"
    );
    let number = |number: Option<u32>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    for row in rows {
        let (size, retired) = (ByteSize::new(row.size), ByteSize::new(row.size.saturating_sub(row.usable)));
        println!(
            "{:<14}{:>12}{:>12}  {:<#20x}{:>5}{:>9}{:>9}",
            row.function,
            size.to_string(),
            retired.to_string(),
            row.start,
            number(row.node),
            number(row.proximity_domain),
            row.events
        );
    }
}

/// Writes all bytes of `wanted`, or of every function, reads them back, and prints how fast that was.
pub(crate) fn test(wanted: &[PciAddress]) -> ExitCode {
    let Found { functions, broken } = match find() {
        Ok(found) => found,
        Err(error) => return fail(&error),
    };
    let good = functions.iter().map(|function| function.address);
    let known: Vec<PciAddress> = good.chain(broken.iter().map(|(address, _)| *address)).collect();
    let missing = wanted.iter().find(|address| !known.contains(address));
    if let Some(address) = missing {
        eprintln!("error: {address} has no EGM memory\n  help: egm-guest list shows what has");
        return ExitCode::FAILURE;
    }
    if known.is_empty() {
        eprintln!("error: {NONE}");
        return ExitCode::FAILURE;
    }
    let chosen = |address: PciAddress| wanted.is_empty() || wanted.contains(&address);
    let mut good = true;
    for (_, error) in broken.iter().filter(|(address, _)| chosen(*address)) {
        good = false;
        fail(error);
    }
    for function in functions.iter().filter(|function| chosen(function.address)) {
        match one(function) {
            Ok(said) => println!("{}: {said}", function.address),
            Err(Wrong::Memory(error)) => {
                good = false;
                fail(&error);
            }
            Err(Wrong::Word { offset, is, expected }) => {
                good = false;
                println!("{}: at {offset:#x} is {is:#x} in place of {expected:#x}", function.address);
            }
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Reason why a test failed.
enum Wrong {
    Memory(MemoryError),
    Word { offset: u64, is: u64, expected: u64 },
}

impl From<MemoryError> for Wrong {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

fn one(function: &Function) -> Result<String, Wrong> {
    let retired = function.registers()?.retired()?;
    let memory = function.map()?;
    let usable = without(memory.size(), &retired);
    let bytes: u64 = usable.iter().map(|span| span.end - span.start).sum();
    let begun = Instant::now();
    for offset in words(&usable) {
        let _ = memory.write_word(offset, expected(offset));
    }
    let wrote = begun.elapsed();
    // Before anything is read: writes may be combined on their way.
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    let begun = Instant::now();
    words(&usable).try_for_each(|offset| same(&memory, offset, expected(offset)))?;
    let read = begun.elapsed();
    let ones = retired.iter().filter_map(|span| Some(span.start.checked_next_multiple_of(8)?..span.end));
    ones.filter(|span| !span.is_empty()).try_for_each(|span| same(&memory, span.start, u64::MAX))?;
    Ok(format!(
        "{} keep what is written, {} retired; write {}, read {}",
        ByteSize::new(bytes),
        ByteSize::new(memory.size().saturating_sub(bytes)),
        speed(bytes, wrote),
        speed(bytes, read)
    ))
}

fn expected(offset: u64) -> u64 {
    pattern::word(0, offset / 8)
}

fn same(memory: &Memory, offset: u64, expected: u64) -> Result<(), Wrong> {
    match memory.read_word(offset) {
        Some(is) if is != expected => Err(Wrong::Word { offset, is, expected }),
        _ => Ok(()),
    }
}

/// Parts of `size` bytes that are not in `retired`, which is ascending.
fn without(size: u64, retired: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut usable = Vec::new();
    let mut from = 0;
    for span in retired {
        usable.push(from..span.start.min(size));
        from = from.max(span.end);
    }
    usable.push(from..size);
    usable.retain(|span| !span.is_empty());
    usable
}

/// Offsets of the whole words in `spans`.
fn words(spans: &[Range<u64>]) -> impl Iterator<Item = u64> + '_ {
    spans.iter().flat_map(|span| (span.start.next_multiple_of(8)..span.end & !7).step_by(8))
}

fn speed(bytes: u64, time: Duration) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a figure for a person")]
    let rate = bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
    format!("{rate:.2} GB/s")
}

fn fail(error: &MemoryError) -> ExitCode {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    eprintln!("error: {error}");
    causes.for_each(|cause| eprintln!("  caused by: {cause}"));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of 0x100 bytes that are left.
    fn left(retired: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let retired: Vec<_> = retired.iter().map(|&(start, end)| start..end).collect();
        without(0x100, &retired).into_iter().map(|span| (span.start, span.end)).collect()
    }

    #[test]
    fn retired_spans_are_left_out_wherever_they_lie() {
        assert_eq!(left(&[]), [(0, 0x100)]);
        assert_eq!(left(&[(0, 0x10), (0x20, 0x30), (0xf0, 0x100)]), [(0x10, 0x20), (0x30, 0xf0)]);
        assert_eq!(left(&[(0, 0x80), (0x40, 0x60), (0xf0, 0x200)]), [(0x80, 0xf0)], "of a device that lies");
        assert_eq!(left(&[(0, 0x100)]), []);
    }

    #[test]
    fn words_are_whole_and_aligned() {
        assert_eq!(words(&[0..0xc, 0x14..0x24]).collect::<Vec<_>>(), [0, 0x18]);
    }
}
