//! Scenarios of a page that goes bad while a guest uses it. The host's kernel takes the page offline by its physical
//! address, as after a machine check; for that it needs a `struct page`. EGM memory has none: there the lab's double
//! of an EGM driver reports the page.
//!
//! The guest can still read a device-DAX page, since nothing is really broken: the VMM reports it and goes on, the page
//! is retired, and the next guest has a hole there. A page of ordinary memory is gone: a guest that reads it gets a
//! machine check (on Arm a synchronous external abort), ends the reading program, and goes on. An Arm guest that is
//! notified of an EGM page takes it offline itself and ends the programs that used it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::engine::error::LabError;
use crate::engine::judge::{Expected, case};
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::extent::Extent;
use crate::hosts::grace::is_arm;
use crate::hosts::parts::Plan;
use crate::runner::machine::Runner;
use crate::runner::regions::regions;
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::host_words::host_address;

/// A physical address written here takes its page offline, as the kernel does with broken memory.
const OFFLINE: &str = "/sys/devices/system/memory/hard_offline_page";

/// The folder of the lab's double of an EGM driver, and in a device's folder there the file that takes the offset of a page.
const DOUBLE: &str = "/sys/kernel/debug/egm";
const POISON: &str = "poison";

/// Memory of the machine's own process.
const LOCAL: &str = "local";

/// Expected messages about a bad page of one kind of memory.
struct ExpectedMessages {
    /// Parts of the line that the VMM logs.
    machine: &'static [&'static str],
    /// From a guest that still uses the page; empty where that is allowed.
    guest: &'static [&'static str],
}

impl ExpectedMessages {
    fn of(region: &str) -> Self {
        const ALL: &[&str] = &["guest address", "reported to the guest", "no later owner gets it"];
        let (machine, guest): (_, &[&str]) = match region {
            LOCAL if is_arm() => (&ALL[..1], &["synchronous external abort", "SIGBUS"]),
            LOCAL => (&ALL[..1], &["[Hardware Error]: CPU 0: Machine Check", "SIGBUS"]),
            _ if double(region).exists() => {
                (ALL, &["Generic Hardware Error Source", "Memory failure", "SIGBUS"])
            }
            _ => (ALL, &[]),
        };
        Self { machine, guest }
    }
}

fn double(region: &str) -> PathBuf {
    Path::new(DOUBLE).join(region).join(POISON)
}

/// Runs the scenario of a bad page in a slice of `region`.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    if !Path::new(OFFLINE).exists() && !double(region).exists() {
        steps.skip("this host's kernel has no CONFIG_MEMORY_FAILURE");
        return Ok(());
    }
    let beat = Scenario { words: BEAT, ..*scenario };
    let machine = runner.machine(&beat, report)?;
    let (console, said) = (report.join("beat-console.log"), report.join("beat-vmm.log"));
    let all = ExpectedMessages::of(region);
    let mut bad = None;
    let ending = watch(runner.command(&machine), Limit::Total(scenario.deadline), &console, &said, |line| {
        let Some(address) = line.split("egm-beat 0x").nth(1) else { return Reaction::Go };
        let gpa = u64::from_str_radix(address.trim(), 16).ok();
        steps.step("noted", || {
            let address = host_address(&machine, gpa)?;
            bad = Some(address);
            spoil(region, machine.plan.as_ref(), address)?;
            noted(&said, all.machine)
        });
        if all.guest.is_empty() { Reaction::Terminate } else { Reaction::Go }
    })?;
    let fault = (ending != Ending::Exit(0)).then(|| format!("{ending:?}, and not in good order"));
    steps.cases.push(case("lives", fault, 0));
    if !all.guest.is_empty() {
        steps.step("reported", || reported(&console, all.guest));
    }
    if region == LOCAL {
        return Ok(());
    }
    steps.step("retired", || retired(runner, region, machine.plan.as_ref(), bad));
    let next = Scenario { words: "egm.checks=numa", ..*scenario };
    let machine = runner.machine(&next, report)?;
    steps.step("hole", || hole(machine.plan.as_ref(), bad));
    let boot = runner.boot(&next, &machine, report)?;
    steps.judge(Expected::power_off(&["numa"]), &boot, "");
    Ok(())
}

/// The guest increments a word for ever. Its kernel logs errors and killed programs, although the agent makes it quiet.
const BEAT: &str =
    "egm.checks=egm_beat egm.arg.beat.seconds=0 sysctl.debug.exception-trace=1 ignore_loglevel";

const NO_BEAT: &str = "the guest did not say where its word beats";

/// Makes the page at host physical address `address` go bad.
fn spoil(region: &str, plan: Option<&Plan>, address: u64) -> Step {
    let double = double(region);
    if double.exists() {
        fs::write(double, in_region(plan, address)?.to_string())?;
    } else {
        fs::write(OFFLINE, format!("{address:#x}")).or_else(reported_anyway)?;
    }
    Ok(())
}

/// Accepts two errors of the kernel, which marked the page and notified the processes that map it: a reference to the page is
/// left ("busy"), or its huge page could not be split, so that all of that is bad.
fn reported_anyway(error: io::Error) -> io::Result<()> {
    match Errno::from_io_error(&error) {
        Some(Errno::BUSY | Errno::HWPOISON) => Ok(()),
        _ => Err(error),
    }
}

/// The VMM's log names the slice, and the consequences for its guest and later owners.
fn noted(log: &Path, all: &[&str]) -> Step {
    eventually(TIMEOUT, || {
        let text = fs::read_to_string(log)?;
        let line = text.lines().find(|line| line.starts_with("warning: bad memory: \"egm0\""));
        let line = line.ok_or_else(|| format!("the machine reports no bad memory: {text}"))?;
        match all.iter().find(|part| !line.contains(**part)) {
            None => Ok(()),
            Some(part) => Err(Fault::Untrue(format!("no \"{part}\" in: {line}"))),
        }
    })
}

/// The guest's kernel received the report of the page and ended the program that used it.
fn reported(console: &Path, all: &[&str]) -> Step {
    let text = fs::read_to_string(console)?;
    match all.iter().find(|words| !text.contains(**words)) {
        None => Ok(()),
        Some(words) => Err(Fault::Untrue(format!("the guest's kernel does not print \"{words}\""))),
    }
}

/// Offset in its region of host physical address `address`, which is in the slice.
fn in_region(plan: Option<&Plan>, address: u64) -> Result<u64, Fault> {
    let slice = plan.and_then(Plan::slice).ok_or("the plan has no slice")?;
    let in_region = plan.and_then(Plan::slice_in_region).ok_or("the plan has no slice")?;
    Ok(address.checked_sub(slice.start).ok_or("the page lies before the slice")? + in_region.start)
}

/// `egm-device regions` lists the page as retired.
fn retired(runner: &Runner, region: &str, plan: Option<&Plan>, bad: Option<u64>) -> Step {
    let bad = in_region(plan, bad.ok_or(NO_BEAT)?)?;
    let all = regions(runner)?;
    let one = all.iter().find(|one| one["name"] == region).ok_or("the region is gone")?;
    let spans = one["retired"].as_array().into_iter().flatten();
    if spans.filter_map(Extent::of_span).any(|extent| extent.contains(bad)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{bad:#x} is not retired: {}", one["retired"])))
}

/// The next plan's slice has the page, and its guest does not.
fn hole(plan: Option<&Plan>, bad: Option<u64>) -> Step {
    let bad = bad.ok_or(NO_BEAT)?;
    match plan.and_then(|plan| plan.has_ram_at(bad)) {
        Some(false) => Ok(()),
        Some(true) => Err(Fault::Untrue(format!("host address {bad:#x} is the next guest's RAM"))),
        None => Err(Fault::Undecided("the next slice lies elsewhere")),
    }
}
