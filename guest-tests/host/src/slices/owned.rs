//! Scenario: a guest uses a slice, other machines are refused it, a kill leaves it dirty, the next owner finds zeros,
//! and it comes back clean.
//!
//! Where the plan names host physical addresses, the lab reads the guest's bytes at exactly those.

use std::fs;

use crate::engine::command::output;
use crate::engine::error::LabError;
use crate::engine::judge::{Expected, case};
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::engine::step::{Fault, Step};
use crate::hosts::extent::Extent;
use crate::hosts::parts::Plan;
use crate::hosts::pool::Pool;
use crate::runner::machine::{Machine, Runner};
use crate::runner::refusal::HOST_LACKS;
use crate::runner::regions::HUGE_PAGES;
use crate::runner::steps::Steps;
use crate::slices::grant::next_finds_zeros;
use crate::slices::host_words::{HostWords, MARK, NO_BEAT, host_address, meminfo, ram, seen, zeros};

/// Runs the scenario of a slice of `region`.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    let total = meminfo("MemTotal")?;
    let beat = Scenario { words: "egm.checks=egm_beat egm.arg.beat.seconds=0", ..*scenario };
    let machine = runner.machine(&beat, report)?;
    let host = machine.plan.as_ref().and_then(Plan::slice);
    let (mut beating, mut at) = (None, None);
    let ending = watch(
        runner.command(&machine),
        Limit::Total(scenario.deadline),
        &report.join("beat-console.log"),
        &report.join("beat-vmm.log"),
        |line| {
            let Some(address) = line.split("egm-beat 0x").nth(1) else { return Reaction::Go };
            beating = u64::from_str_radix(address.trim(), 16).ok();
            steps.step("seen", || {
                let address = host_address(&machine, beating)?;
                at = Some(address);
                seen(address)
            });
            steps.step("refused", || refused(runner, scenario, &machine));
            Reaction::Kill
        },
    )?;
    let fault = beating.is_none().then(|| NO_BEAT.to_owned());
    steps.cases.push(case("beat", fault, 0));
    let fault = (ending != Ending::Signal(9)).then(|| format!("{ending:?}, not killed"));
    steps.cases.push(case("killed", fault, 0));
    steps.step("dirty", || dirty(at));
    steps.step("scrubbed", || scrubbed(runner, region, scenario.slice_test.slice(), at));
    let used = Scenario { words: "egm.checks=numa,egm_pattern", ..*scenario };
    let machine = runner.machine(&used, report)?;
    let boot = runner.boot(&used, &machine, report)?;
    let expected = Expected::power_off(&["numa", "egm_pattern"]);
    steps.judge(expected, &boot, "");
    if host.is_some() {
        steps.step("returned", || zeros(host));
        steps.step("invisible", || invisible(host, total));
    } else if steps.pool.is_none() {
        steps.step("not the kernel's", || outside(at, total));
    } else {
        let whole = steps.pool.as_ref().map_or(Ok(()), pool_is_whole);
        steps.step("returned", || whole);
        steps.step("visible", || visible(at, total));
    }
    Ok(())
}

/// A second machine that requests the slice gets an error that names the owner.
fn refused(runner: &Runner, scenario: &Scenario, machine: &Machine) -> Step {
    let output = output(&mut runner.command(machine))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let owner = format!("held by {} (process ", scenario.name);
    if output.status.code() == Some(HOST_LACKS) && said.contains(&owner) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{}, and no \"{owner}\" in: {said}", output.status)))
}

/// The killed machine's bytes still lie at `address`.
fn dirty(address: Option<u64>) -> Step {
    let address = address.ok_or(NO_BEAT)?;
    match HostWords::at(address)?.word(8) {
        Some(MARK) => Ok(()),
        other => Err(Fault::Untrue(format!("at {address:#x} lies {other:x?}: nothing is left to scrub"))),
    }
}

/// The next owner finds zeros from end to end, and the word at `address` is then zero.
fn scrubbed(runner: &Runner, region: &str, size: &str, address: Option<u64>) -> Step {
    next_finds_zeros(runner, region, size)?;
    let address = address.ok_or(NO_BEAT)?;
    match HostWords::at(address)?.word(8) {
        Some(0) => Ok(()),
        other => Err(Fault::Untrue(format!("at {address:#x} lies {other:x?}, and the next owner had zeros"))),
    }
}

/// All pages of the pool are free: the kernel zeroes them at their next use.
fn pool_is_whole(pool: &Pool) -> Step {
    match pool.free()? {
        HUGE_PAGES => Ok(()),
        free => Err(Fault::Untrue(format!("{free} pages of {HUGE_PAGES} are free"))),
    }
}

/// `address` is not in RAM of the host's kernel, before or after.
fn outside(address: Option<u64>, before: u64) -> Step {
    let address = address.ok_or(NO_BEAT)?;
    let (iomem, total) = (fs::read_to_string("/proc/iomem")?, meminfo("MemTotal")?);
    if total == before && !ram(&iomem).any(|ram| ram.contains(address)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("MemTotal is {total}, it was {before}; {address:#x} is RAM or not: {iomem}")))
}

/// `address` is in RAM of the host's kernel, which counts that RAM before and after.
fn visible(address: Option<u64>, before: u64) -> Step {
    let address = address.ok_or(NO_BEAT)?;
    let (iomem, total) = (fs::read_to_string("/proc/iomem")?, meminfo("MemTotal")?);
    if total == before && ram(&iomem).any(|ram| ram.contains(address)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("MemTotal is {total}, it was {before}; {address:#x} is RAM or not: {iomem}")))
}

/// The slice is no memory of the host's kernel, and did not become any.
fn invisible(slice: Option<Extent>, before: u64) -> Step {
    let slice = slice.ok_or("the plan names no address")?;
    let iomem = fs::read_to_string("/proc/iomem")?;
    if let Some(ram) = ram(&iomem).find(|ram| ram.overlaps(slice)) {
        return Err(Fault::Untrue(format!("the kernel has it as RAM: {ram}")));
    }
    let all: u64 = ram(&iomem).map(|ram| ram.size).sum();
    let total = meminfo("MemTotal")?;
    if total != before || total > all {
        return Err(Fault::Untrue(format!("MemTotal is {total}, it was {before}; RAM of the kernel: {all}")));
    }
    Ok(())
}
