//! Stories of a page that goes bad while a guest uses it. The host's kernel takes the page out of service by its physical
//! address, as it would after a machine check, so it must have a `struct page`.
//!
//! Of device-DAX the guest may go on reading, since nothing is really broken: the machine says so and lives, the page is
//! retired, and the next machine's guest has a hole there. Ordinary memory's page is gone: the guest that reads it gets a
//! machine check, ends the program that read, and lives.

use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::error::LabError;
use crate::frame::{Fault, Frame, Step};
use crate::host_parts::Plan;
use crate::judge::{Expected, case};
use crate::process::{Ending, Limit, Reaction, watch};
use crate::run::Runner;
use crate::scenarios::Scenario;
use crate::slices::{PATIENCE, host_address, regions};

/// Takes the page with the physical address that is written to it out of service, as broken memory would be.
const OFFLINE: &str = "/sys/devices/system/memory/hard_offline_page";

/// Memory of the machine's own process.
const LOCAL: &str = "local";

/// Tells the story of a bad page in a slice of `region`.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, region, report, .. } = *frame;
    if !Path::new(OFFLINE).exists() {
        frame.skip("this host's kernel has no CONFIG_MEMORY_FAILURE");
        return Ok(());
    }
    let beat = Scenario { words: "egm.checks=egm_beat egm.arg.beat.seconds=0", ..*scenario };
    let machine = runner.machine(&beat, report)?;
    let (console, said) = (report.join("beat-console.log"), report.join("beat-vmm.log"));
    let reads = region == LOCAL;
    let mut bad = None;
    let ending = watch(runner.command(&machine), Limit::Total(scenario.deadline), &console, &said, |line| {
        let Some(address) = line.split("egm-beat 0x").nth(1) else { return Reaction::Go };
        let gpa = u64::from_str_radix(address.trim(), 16).ok();
        frame.step("told", || {
            let address = host_address(&machine, gpa)?;
            bad = Some(address);
            fs::write(OFFLINE, format!("{address:#x}"))?;
            told(&said, reads)
        });
        if reads { Reaction::Go } else { Reaction::Terminate }
    })?;
    let fault = (ending != Ending::Exit(0)).then(|| format!("{ending:?}, and not in good order"));
    frame.cases.push(case("lives", fault, 0));
    if reads {
        frame.step("machine-check", || checked(&console));
        return Ok(());
    }
    frame.step("retired", || retired(runner, region, machine.plan.as_ref(), bad));
    let next = Scenario { words: "egm.checks=numa", ..*scenario };
    let machine = runner.machine(&next, report)?;
    frame.step("hole", || hole(machine.plan.as_ref(), bad));
    let boot = runner.boot(&next, &machine, report)?;
    frame.judge(Expected { exit: 0, summary: true, checks: &["numa"] }, &boot, "");
    Ok(())
}

const NO_BEAT: &str = "the guest did not say where its word beats";

/// The machine names the slice, and that its guest and later owners are taken care of.
fn told(log: &Path, reads: bool) -> Step {
    let begun = Instant::now();
    loop {
        let text = fs::read_to_string(log)?;
        if let Some(line) = text.lines().find(|line| line.starts_with("bad memory: \"egm0\"")) {
            let slice = ["guest address", "the guest is told", "no later owner gets it"];
            let all = if reads { slice.get(..1) } else { slice.get(..) }.unwrap_or_default();
            return match all.iter().find(|part| !line.contains(**part)) {
                None => Ok(()),
                Some(part) => Err(Fault::Untrue(format!("no \"{part}\" in: {line}"))),
            };
        }
        if begun.elapsed() > PATIENCE {
            return Err(Fault::Untrue(format!("the machine says nothing of bad memory: {text}")));
        }
        std::thread::yield_now();
    }
}

/// The guest's kernel heard of the page and ended who read it.
fn checked(console: &Path) -> Step {
    let text = fs::read_to_string(console)?;
    match ["[Hardware Error]: CPU 0: Machine Check", "SIGBUS"].into_iter().find(|words| !text.contains(words))
    {
        None => Ok(()),
        Some(words) => Err(Fault::Untrue(format!("the guest's kernel says nothing of \"{words}\""))),
    }
}

/// The ledger calls the page retired.
fn retired(runner: &Runner, region: &str, plan: Option<&Plan>, bad: Option<u64>) -> Step {
    let bad = bad.ok_or(NO_BEAT)?;
    let (base, offset) = plan.and_then(Plan::slice_in_region).ok_or("the plan has no slice")?;
    let bad = bad.checked_sub(base).ok_or("the page lies before the slice")? + offset;
    let all = regions(runner)?;
    let one = all.iter().find(|one| one["name"] == region).ok_or("the region is gone")?;
    let spans = one["retired"].as_array().cloned().unwrap_or_default();
    let covers = |span: &serde_json::Value| {
        let start = span["start"].as_str().and_then(|text| u64::from_str_radix(text.get(2..)?, 16).ok());
        start.zip(span["size"].as_u64()).is_some_and(|(start, size)| (start..start + size).contains(&bad))
    };
    if spans.iter().any(covers) {
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
