//! Scenario: memory that belongs to one machine. Its process creates it (memfd), or KVM does for its VM (guest_memfd),
//! so no ledger records it and no plan names its addresses. No other machine can request the same bytes: a second
//! machine that runs meanwhile has other pages, which are zero. The pages of a killed machine become free memory of the
//! host; so a third machine reads zeros, too.
//!
//! The addresses of a memfd's pages are in the page map of its machine. For guest_memfd the lab reads the guest's word
//! in the file itself, through a duplicate that the kernel grants to root, and then at the host physical address of the
//! file's page.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use egm_fixtures::payload::Ports;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::engine::error::LabError;
use crate::engine::judge::{Expected, case};
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::pagemap::{self, PAGE, address};
use crate::hosts::parts::Plan;
use crate::hosts::physical::Physical;
use crate::runner::machine::{Machine, Runner};
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::host_words::{self, beats, host_address, meminfo, ram};

/// Memory of the machine's own process.
const LOCAL: &str = "local";
/// Bytes of the first guest's marked pages: enough to show among all that the host's kernel cannot evict.
const MARKED_BYTES: u64 = 8192 * PAGE;
/// The first guest. (An idle one with the TSC-deadline timer sleeps for ever where this kernel is the emulated host's.)
const BEAT: &str = "lapic=notscdeadline egm.checks=egm_beat egm.arg.beat.seconds=0 egm.arg.beat.pages=8192";
const USE: &str = "lapic=notscdeadline egm.checks=numa,egm_pattern";
/// Value that the agent's check `egm_beat` writes after its counter.
const MARK: u64 = 0x6d67_652d_7461_6562;
/// The kernel's name of such a file.
const NAME: &str = "[kvm-gmem]";

/// Runs the scenario on a slice of `region`.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    let own = region == LOCAL;
    // The kernel's counter for such pages.
    let meter = if own { "Shmem" } else { "Unevictable" };
    let machine = runner.machine(&Scenario { words: BEAT, ..*scenario }, report)?;
    let (total, before) = (meminfo("MemTotal")?, meminfo(meter)?);
    let (console, said) = (report.join("beat-console.log"), report.join("beat-vmm.log"));
    let ending = watch(runner.command(&machine), Limit::Total(scenario.deadline), &console, &said, |line| {
        let Some(address) = line.split("egm-beat 0x").nth(1) else { return Reaction::Go };
        let gpa = u64::from_str_radix(address.trim(), 16).ok();
        steps.step("seen", || if own { mapped(&machine, gpa) } else { seen(machine.plan.as_ref(), gpa) });
        steps.step("counted", || counted(meter, before));
        let beside = if own { apart } else { |_| Ok(()) };
        steps.step("zero-for-another", || zeros(runner, scenario, &machine, report, beside));
        Reaction::Kill
    })?;
    let fault = (ending != Ending::Signal(9)).then(|| format!("{ending:?}, not killed"));
    steps.cases.push(case("killed", fault, 0));
    steps.step("freed", || freed(meter, before));
    let next = steps.folder("next")?;
    steps.step("zero-for-the-next", || zeros(runner, scenario, &machine, &next, |_| Ok(())));
    let used = Scenario { words: USE, ..*scenario };
    let machine = runner.machine(&used, report)?;
    let boot = runner.boot(&used, &machine, report)?;
    let expected = Expected::power_off(&["numa", "egm_pattern"]);
    steps.judge(expected, &boot, "");
    steps.step("visible", || match meminfo("MemTotal")? {
        now if now == total => Ok(()),
        now => Err(Fault::Untrue(format!("MemTotal is {now}, it was {total}"))),
    });
    Ok(())
}

/// The guest's word increases in the machine's file, and at the host physical address of the file's page, in RAM of
/// the host's kernel. The VMM's page map has no address of it: KVM's page tables take it from the file.
fn seen(plan: Option<&Plan>, gpa: Option<u64>) -> Step {
    let gpa = gpa.ok_or("the guest did not say where its word beats")?;
    let inside = plan.and_then(|plan| plan.offset_in_slice(gpa)).ok_or("the word is not in the slice")?;
    let (process, file) = own_file()?;
    if let Some(address) = address(&process, mapping(&process)? + inside)? {
        return Err(Fault::Untrue(format!(
            "the machine itself has mapped the guest's page, at {address:#x}"
        )));
    }
    let page = Physical::map(&file, inside, PAGE)?;
    if page.word(8) != Some(MARK) {
        return Err(Fault::Untrue(format!("{inside:#x} bytes behind its start the file has no mark")));
    }
    beats(|| page.word(0), inside)?;
    let address =
        address(Path::new("/proc/self"), page.address())?.ok_or("a page that is read has no address")?;
    of_kernel(address)
}

/// The guest's word increases at the host physical address from the machine's page map, in RAM of the host's kernel.
fn mapped(machine: &Machine, gpa: Option<u64>) -> Step {
    of_kernel(host_address(machine, gpa)?)
}

fn of_kernel(address: u64) -> Step {
    let iomem = fs::read_to_string("/proc/iomem")?;
    if !ram(&iomem).any(|ram| ram.contains(address)) {
        return Err(Fault::Untrue(format!("{address:#x} is no RAM of the host's kernel")));
    }
    host_words::seen(address)
}

/// Both running machines have pages, and share none. A slice has `size` bytes.
fn apart(size: u64) -> Step {
    let all = pagemap::slices(size)?;
    let [one, other] = all.as_slice() else {
        return Err(Fault::Untrue(format!("{} machines have mapped a slice, not two", all.len())));
    };
    let (one, other) = (one.pages()?, other.pages()?);
    match one.intersection(&other).next() {
        None if one.is_empty() || other.is_empty() => Err("a machine has no page of its slice".into()),
        None => Ok(()),
        Some(page) => Err(Fault::Untrue(format!("both machines have the page at {page:#x}"))),
    }
}

/// The host kernel's counter includes the memory that the guest wrote.
fn counted(meter: &str, before: u64) -> Step {
    match meminfo(meter)?.saturating_sub(before) {
        more if more >= MARKED_BYTES => Ok(()),
        more => Err(Fault::Untrue(format!("{meter} is {more} bytes more, and {MARKED_BYTES} were written"))),
    }
}

/// The memory of the killed machine is free.
fn freed(meter: &str, before: u64) -> Step {
    eventually(TIMEOUT, || match meminfo(meter)?.saturating_sub(before) {
        more if more < MARKED_BYTES / 8 => Ok(()),
        more => Err(Fault::Untrue(format!("{meter} stays {more} bytes more"))),
    })
}

/// Another machine has such a slice too, and all of it is zero; `look` gets its size in bytes while that machine runs.
fn zeros(
    runner: &Runner,
    scenario: &Scenario,
    machine: &Machine,
    report: &Path,
    look: impl Fn(u64) -> Step,
) -> Step {
    let slice = machine.plan.as_ref().and_then(Plan::slice_in_guest).ok_or("there is no slice")?;
    let kernel = report.join("zeros.elf");
    fs::write(&kernel, egm_fixtures::payload::zeros(Ports::USUAL, slice.start, slice.size))?;
    let mut command = runner.command(machine);
    command.arg("--kernel").arg(&kernel);
    let (console, said) = (report.join("zeros-console.log"), report.join("zeros-vmm.log"));
    let (mut zeros, mut looked) = (false, Ok(()));
    let ending = watch(command, Limit::Total(scenario.deadline), &console, &said, |line| {
        if line.trim_end() != "zeros" {
            return Reaction::Go;
        }
        zeros = true;
        looked = look(slice.size);
        Reaction::Terminate
    })?;
    looked?;
    match (zeros, ending) {
        (true, Ending::Exit(0)) => Ok(()),
        other => Err(Fault::Untrue(format!("zeros, and its end: {other:?}"))),
    }
}

/// The process of the machine that runs, and a duplicate of its file.
fn own_file() -> Result<(PathBuf, File), Fault> {
    for process in fs::read_dir("/proc")?.flatten().map(|entry| entry.path()) {
        if !fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim() == "egm-vmm") {
            continue;
        }
        let number = |path: &Path| path.file_name()?.to_str()?.parse::<i32>().ok();
        for link in fs::read_dir(process.join("fd"))?.flatten().map(|entry| entry.path()) {
            if !fs::read_link(&link).is_ok_and(|target| target.to_string_lossy().contains(NAME)) {
                continue;
            }
            let pid = number(&process).and_then(Pid::from_raw).ok_or("a process without a number")?;
            let descriptor = number(&link).ok_or("a descriptor without a number")?;
            let pid = pidfd_open(pid, PidfdFlags::empty())?;
            return Ok((process, pidfd_getfd(pid, descriptor, PidfdGetfdFlags::empty())?.into()));
        }
    }
    Err(Fault::Untrue("no machine has a guest_memfd".to_owned()))
}

/// Address at which `process` has mapped its file.
fn mapping(process: &Path) -> Result<u64, Fault> {
    let maps = fs::read_to_string(process.join("maps"))?;
    let start = maps.lines().find(|line| line.contains(NAME)).and_then(|line| line.split('-').next());
    let start = start.ok_or("the machine has not mapped its guest_memfd")?;
    Ok(u64::from_str_radix(start, 16)?)
}
