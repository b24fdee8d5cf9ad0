//! Scenario: a guest uses a slice, other machines are refused it, a kill leaves it dirty, the next owner finds zeros,
//! and it comes back clean.
//!
//! Where the plan names host physical addresses, the lab reads the guest's bytes at exactly those.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::command::output;
use crate::error::LabError;
use crate::host_parts::Plan;
use crate::judge::{Expected, case};
use crate::kcore::Ram;
use crate::pagemap;
use crate::physical::Physical;
use crate::pool::Pool;
use crate::process::{Ending, Limit, Reaction, watch};
use crate::regions::HUGE_PAGES;
use crate::run::{Machine, Runner};
use crate::scenario::Scenario;
use crate::steps::{Fault, Step, Steps};

/// Value that the agent's check `egm_beat` writes after its counter.
const MARK: u64 = 0x6d67_652d_7461_6562;
/// Maximum time without an increase of a beating word, under emulation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// The VMM's exit code when the host lacks something.
pub(crate) const HOST_LACKS: i32 = 3;

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
    let expected = Expected { exit: 0, summary: true, checks: &["numa", "egm_pattern"] };
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

const NO_BEAT: &str = "the guest did not say where its word beats";

/// The host physical memory from `address` on.
pub(crate) fn physical(address: u64, size: u64) -> std::io::Result<Physical> {
    Physical::map(&File::open("/dev/mem")?, address, size)
}

/// Memory of the host at a physical address.
pub(crate) enum HostWords {
    /// Through `/dev/mem`.
    Mapped(Physical),
    /// Through `/proc/kcore`, for the kernel's own RAM, which `/dev/mem` refuses.
    OfKernel(Ram, u64),
}

impl HostWords {
    /// The page at `address`.
    pub(crate) fn at(address: u64) -> Result<Self, Fault> {
        let iomem = fs::read_to_string("/proc/iomem")?;
        match Ram::open() {
            Ok(all) if ram(&iomem).any(|(_, from, to)| (from..to).contains(&address)) => {
                Ok(Self::OfKernel(all, address))
            }
            _ => Ok(Self::Mapped(physical(address, 4096)?)),
        }
    }

    /// The word at `offset`, now.
    pub(crate) fn word(&self, offset: u64) -> Option<u64> {
        match self {
            Self::Mapped(page) => page.word(offset),
            Self::OfKernel(ram, address) => ram.word(address + offset).ok(),
        }
    }
}

/// The guest increments the word at this host physical address.
pub(crate) fn seen(address: u64) -> Step {
    let page = HostWords::at(address)?;
    match page.word(8) {
        Some(MARK) => beats(|| page.word(0), address),
        mark => Err(Fault::Untrue(format!(
            "at host address {address:#x} lies {mark:x?} and no mark of the guest"
        ))),
    }
}

/// The `word` at host physical address `address` increases.
pub(crate) fn beats(word: impl Fn() -> Option<u64>, address: u64) -> Step {
    let first = word();
    let begun = Instant::now();
    while word() == first {
        if begun.elapsed() > TIMEOUT {
            return Err(Fault::Untrue(format!(
                "the word at host address {address:#x} stands still at {first:x?}"
            )));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The host physical address of guest physical address `gpa`: from the plan, or, for pages that the kernel chooses,
/// from the page map of the running machine.
pub(crate) fn host_address(machine: &Machine, gpa: Option<u64>) -> Result<u64, Fault> {
    let plan = machine.plan.as_ref().ok_or("there is no plan")?;
    let gpa = gpa.ok_or(NO_BEAT)?;
    let inside = plan.offset_in_slice(gpa).ok_or_else(|| format!("{gpa:#x} is not in the slice"))?;
    match (plan.slice(), plan.slice_in_guest()) {
        (Some((start, _)), _) => Ok(start + inside),
        (None, Some((_, size))) => pagemap::of_slice(size, inside),
        (None, None) => Err("the plan has no slice".into()),
    }
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

/// The next owner of `size` bytes of `region`, a program that is no machine, finds zeros.
pub(crate) fn next_finds_zeros(runner: &Runner, region: &str, size: &str) -> Step {
    let output = grant(runner, region, size)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Fault::Untrue(format!("{}: {said}", output.status)))
}

/// Output of `egm-lab zeros` on a grant of `size` bytes of `region`.
pub(crate) fn grant(runner: &Runner, region: &str, size: &str) -> Result<Output, LabError> {
    let mut command = Command::new(&runner.tools.device);
    command.args(["carve", "grant", "--region", region, "--size", size, "--"]);
    output(command.arg(&runner.tools.lab).arg("zeros"))
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
    if total == before && !ram(&iomem).any(|(_, from, to)| (from..to).contains(&address)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("MemTotal is {total}, it was {before}; {address:#x} is RAM or not: {iomem}")))
}

/// `address` is in RAM of the host's kernel, which counts that RAM before and after.
fn visible(address: Option<u64>, before: u64) -> Step {
    let address = address.ok_or(NO_BEAT)?;
    let (iomem, total) = (fs::read_to_string("/proc/iomem")?, meminfo("MemTotal")?);
    if total == before && ram(&iomem).any(|(_, from, to)| (from..to).contains(&address)) {
        return Ok(());
    }
    Err(Fault::Untrue(format!("MemTotal is {total}, it was {before}; {address:#x} is RAM or not: {iomem}")))
}

/// The returned slice is zero.
pub(crate) fn zeros(slice: Option<(u64, u64)>) -> Step {
    let (start, size) = slice.ok_or("the plan names no address")?;
    match physical(start, size)?.first_not_zero() {
        None => Ok(()),
        Some(offset) => Err(Fault::Untrue(format!("host address {:#x} is not zero", start + offset))),
    }
}

/// The slice is no memory of the host's kernel, and did not become any.
fn invisible(slice: Option<(u64, u64)>, before: u64) -> Step {
    let (start, size) = slice.ok_or("the plan names no address")?;
    let iomem = fs::read_to_string("/proc/iomem")?;
    if let Some(line) = ram(&iomem).find(|(_, from, to)| *from < start + size && start < *to) {
        return Err(Fault::Untrue(format!("the kernel has it as RAM: {}", line.0)));
    }
    let all: u64 = ram(&iomem).map(|(_, from, to)| to - from).sum();
    let total = meminfo("MemTotal")?;
    if total != before || total > all {
        return Err(Fault::Untrue(format!("MemTotal is {total}, it was {before}; RAM of the kernel: {all}")));
    }
    Ok(())
}

/// The lines of `/proc/iomem` that are RAM of the kernel, with first byte and end.
pub(crate) fn ram(iomem: &str) -> impl Iterator<Item = (&str, u64, u64)> {
    iomem.lines().filter(|line| line.trim_start() == *line && line.contains("System RAM")).filter_map(
        |line| {
            let (from, to) = line.split_once(" : ")?.0.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some((line, number(from)?, number(to)?.checked_add(1)?))
        },
    )
}

/// The value of `what` in `/proc/meminfo`, in bytes.
pub(crate) fn meminfo(what: &str) -> Result<u64, LabError> {
    let path = Path::new("/proc/meminfo");
    let text = fs::read_to_string(path).map_err(LabError::file("read", path))?;
    let kib = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
    let kib = kib.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| LabError::Content { what: path.display().to_string(), problem: format!("no {what}") })
}

/// `egm-lab zeros`: whether the slice that `egm-device carve grant` passes is zero from end to end.
pub(crate) fn check_zeros() -> Result<bool, LabError> {
    let Inherited { file, offset, size } = Inherited::new()?;
    let memory = Physical::map(&file, offset, size).map_err(LabError::file("map", "the slice"))?;
    let first = memory.first_not_zero();
    if let Some(offset) = first {
        eprintln!("byte {offset:#x} of the slice is not zero");
    }
    Ok(first.is_none())
}

/// The slice that `egm-device carve grant` passes to this process.
pub(crate) struct Inherited {
    /// Its file.
    pub(crate) file: File,
    /// Its first byte in the file.
    pub(crate) offset: u64,
    /// Its bytes.
    pub(crate) size: u64,
}

impl Inherited {
    pub(crate) fn new() -> Result<Self, LabError> {
        let number = |name: &str| {
            let text = std::env::var(name).unwrap_or_default();
            text.parse::<u64>().map_err(|_| LabError::Usage(format!("{name} is \"{text}\", not a number")))
        };
        let file = inherited(number("EGM_SLICE_FD")?).map_err(LabError::file("take", "EGM_SLICE_FD"))?;
        Ok(Self { file, offset: number("EGM_SLICE_OFFSET")?, size: number("EGM_SLICE_SIZE")? })
    }
}

/// A descriptor that this process was started with; opening its path anew would not do, because EGM devices open once.
fn inherited(descriptor: u64) -> std::io::Result<File> {
    let descriptor = i32::try_from(descriptor).map_err(std::io::Error::other)?;
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(pidfd_getfd(this, descriptor, PidfdGetfdFlags::empty())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_of_the_kernel_is_told_from_what_lies_inside_it_and_from_other_memory() {
        let iomem = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n  00002000-00002fff : Kernel code\n\
                     1c0000000-1ffffffff : Reserved\n200000000-23fffffff : Persistent Memory (legacy)\n";
        let all: Vec<_> = ram(iomem).map(|(_, from, to)| (from, to)).collect();
        assert_eq!(all, [(0x1000, 0x9_fc00)]);
    }
}
