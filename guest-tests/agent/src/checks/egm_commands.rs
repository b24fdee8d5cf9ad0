//! Claim: `egm-guest list` and `egm-guest test`, called as a person calls them, report the functions as they are, and
//! end with the exit codes that scripts rely on.
//!
//! They run as processes of their own. Their output is compared with registers and memory as [`egm_function`] reads
//! them, in another way than the commands do. What was in the memory is gone afterwards.

use std::process::{Command, Stdio};

use egm_address::ByteSize;
use egm_memory::Facts;
use serde::Deserialize;

use crate::cmdline::Arguments;
use crate::egm_function::{self, Function};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern;

/// A function that no machine has.
const ABSENT: &str = "ffff:ff:1f.7";
const SUCCESS: i32 = 0;
const FAILURE: i32 = 1;
/// Exit code of clap for words that mean nothing.
const USAGE: i32 = 2;
/// Number of words of each memory that are compared.
const LOOKS: usize = 1024;

/// Result of a command.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

/// A function in `egm-guest list --json`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Row {
    function: String,
    size: u64,
    usable: u64,
    page: u64,
    start: u64,
    proximity_domain: Option<u32>,
}

pub(super) fn run(_: &Arguments) -> Result<Finding, Broken> {
    let found = egm_function::all()?.iter().map(Function::open).collect::<Result<Vec<_>, _>>()?;
    let mut claim = Claim::default();
    claim.holds(!found.is_empty(), || "the guest has no slice behind a PCI function");
    listed(&mut claim, &found)?;
    refused(&mut claim, &found)?;
    tested(&mut claim, &found)?;
    claim.seen(format!("{} functions listed and tested", found.len()));
    Ok(claim.finish())
}

/// The table and the JSON have each function once, with the values of its registers.
fn listed(claim: &mut Claim, found: &[Function]) -> Result<(), Broken> {
    let json = call(&["list", "--json"])?;
    claim.equal("the exit code of list --json", &json.code, &Some(SUCCESS));
    let rows: Vec<Row> = serde_json::from_str(&json.out)
        .map_err(|_| Broken::text("egm-guest list --json", &json.out, "a list of functions"))?;
    let expected = found.iter().map(row).collect::<Result<Vec<_>, _>>()?;
    claim.equal("list --json", &rows, &expected);
    let table = call(&["list"])?;
    claim.equal("the exit code of list", &table.code, &Some(SUCCESS));
    for row in &expected {
        let (start, size) = (format!("{:#x}", row.start), ByteSize::new(row.size).to_string());
        let printed = table.out.lines().filter(|line| line.starts_with(&row.function));
        let printed: Vec<_> = printed.filter(|line| line.contains(&start) && line.contains(&size)).collect();
        claim.equal(format!("lines of list with {}, {start} and {size}", row.function), &printed.len(), &1);
    }
    Ok(())
}

fn row(function: &Function) -> Result<Row, Broken> {
    let Facts { size, page, pxm, .. } = function.found.facts;
    Ok(Row {
        function: function.found.address.to_string(),
        size,
        usable: function.usable()?.size(),
        page,
        start: function.found.start,
        proximity_domain: pxm,
    })
}

/// Neither a test without consent nor one of a function that is not there touches a byte.
fn refused(claim: &mut Claim, found: &[Function]) -> Result<(), Broken> {
    let before = words(found)?;
    let unasked = call(&["test"])?;
    claim.equal("the exit code of test without consent", &unasked.code, &Some(USAGE));
    claim.holds(unasked.err.contains("--overwrite"), || {
        format!("without consent test prints {:?}", unasked.err)
    });
    let missing = call(&["test", "--overwrite", ABSENT])?;
    claim.equal("the exit code of test of an absent function", &missing.code, &Some(FAILURE));
    let is_explained = missing.err.contains(ABSENT) && missing.err.contains("help: egm-guest list");
    claim.holds(is_explained, || format!("test of an absent function prints {:?}", missing.err));
    claim.holds(words(found)? == before, || "a test that was refused wrote to the memory");
    Ok(())
}

/// `egm-guest test` prints a line for each function, and leaves its pattern.
fn tested(claim: &mut Claim, found: &[Function]) -> Result<(), Broken> {
    let all = call(&["test", "--overwrite"])?;
    claim.equal("the exit code of test", &all.code, &Some(SUCCESS));
    claim.equal("lines of test", &all.out.lines().count(), &found.len());
    for function in found {
        let name = function.found.address.to_string();
        let usable = function.usable()?.size();
        let promise = format!("{name}: {} keep what is written, ", ByteSize::new(usable));
        let is_printed =
            all.out.lines().any(|line| line.starts_with(&promise) && line.contains(" GB/s, read "));
        claim.holds(is_printed, || format!("test prints {:?}, without {promise:?}", all.out));
        let one = call(&["test", "--overwrite", &name])?;
        claim.equal(format!("the exit code of test {name}"), &one.code, &Some(SUCCESS));
        claim.equal(format!("lines of test {name}"), &one.out.lines().count(), &1);
    }
    let left = words(found)?.into_iter().find(|(at, is)| *is != pattern::word(0, *at as u64 / 8));
    claim.holds(left.is_none(), || format!("after the test (offset, word) {left:x?} is not its pattern"));
    Ok(())
}

/// Some words of each memory, spread over it, with their offsets.
fn words(found: &[Function]) -> Result<Vec<(usize, u64)>, Broken> {
    let mut words = Vec::new();
    for function in found {
        for span in function.usable()?.iter() {
            let step = usize::try_from(span.size() / 8).unwrap_or(usize::MAX).div_ceil(LOOKS).max(1) * 8;
            let offsets = (span.start().get()..=span.last().get() & !7).step_by(step);
            let offsets = offsets.filter_map(|at| usize::try_from(at).ok());
            words.extend(offsets.map(|at| (at, function.memory.read(at))));
        }
    }
    Ok(words)
}

/// Runs this program with the arguments `words` and without standard input.
fn call(words: &[&str]) -> Result<Ended, Broken> {
    let output = Command::new("/proc/self/exe").args(words).stdin(Stdio::null()).output();
    let output = output.map_err(Broken::system(format!("cannot run egm-guest {}", words.join(" "))))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Ended { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) })
}
