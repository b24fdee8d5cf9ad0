//! The emulated hosts: QEMU boots Debian's kernel, or one of our own, and in it this program runs many scenarios in one
//! boot.
//!
//! Each host shares a directory over 9p: tools go in, logs and results come out, whatever happens in between.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::engine::error::{LabError, chain};
use crate::engine::logs::remove;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::progress::{PREFIX, Stage};
use crate::engine::results::ScenarioResult;
use crate::engine::scenario::{GraceKernel, Scenario};
use crate::hosts::capability;
use crate::hosts::grace;
use crate::hosts::qemu::{self, Clock, L1};
use crate::hosts::schedule::{self, Group};
use crate::hosts::served::{self, Cards};
use crate::images::cache::Cache;
use crate::images::debian::Architecture;
use crate::images::emulator::Emulator;
use crate::images::initramfs;
use crate::images::kernel::{self, StockKernel};
use crate::images::rdma_kit::Kit;
use crate::images::tools::{Sandbox, Tools, beside};

/// Permitted silence of the emulated host, beyond the scenarios' deadlines: on a busy machine it boots for minutes.
const OVERHEAD: Duration = Duration::from_secs(240);
/// The images of its NVMe drives, in the shared directory.
const DRIVES: [&str; 2] = ["nvme0.img", "nvme1.img"];
const DRIVE: u64 = 64 << 20;
/// File with a run's results in the shared directory.
pub(crate) const RESULTS: &str = "results.json";
/// Folder of the emulated hosts' shared directories in the report directory.
const HOSTS: &str = "hosts";
/// The console of an emulated host.
pub(crate) const LOG: &str = "l1.log";
/// The runner's arguments there, before the names of scenarios.
const ARGUMENTS: [&str; 9] =
    ["run", "--where", "kvm", "--tools", "/run/tools", "--work", "/run/work", "--report", "/share"];

/// Runs `scenarios` in emulated hosts, `jobs` at a time or as many as this machine carries, with one host for all that need
/// the same one, or several where that is faster. If a host is unavailable, its scenarios are broken, with the reason; if
/// no host is available, that is the error.
pub(crate) fn run(
    scenarios: &[Scenario],
    tools: &Tools,
    cache: &Cache,
    report: &Path,
    jobs: Option<NonZeroUsize>,
) -> Result<Vec<ScenarioResult>, LabError> {
    let jobs = jobs.map_or_else(capability::jobs, NonZeroUsize::get);
    let hosts = report.join(HOSTS);
    // Logs of an earlier run would count as this run's.
    if hosts.exists() {
        fs::remove_dir_all(&hosts).map_err(LabError::file("remove", &hosts))?;
    }
    let groups = schedule::groups(scenarios, jobs);
    let stage = Stage::begin(&match groups.len() {
        1 => "starting the emulated host".to_owned(),
        count => format!("starting {count} emulated hosts, {jobs} at a time"),
    });
    let done = schedule::run_each(groups, jobs, |number, Group { scenarios, on_grace }| {
        let share = hosts.join((number + 1).to_string());
        let done = run_in(&scenarios, on_grace, tools, cache, &share, &stage)
            .and_then(|results| collect(&scenarios, &share, report).map(|()| results));
        (scenarios, done)
    });
    stage.end();
    let (mut results, mut missing) = (Vec::new(), Vec::new());
    for (scenarios, done) in done {
        match done {
            Ok(done) => results.extend(done),
            Err(error) => missing.push((scenarios, error)),
        }
    }
    if results.is_empty() && !missing.is_empty() {
        return Err(missing.swap_remove(0).1);
    }
    for (scenarios, error) in missing {
        let why = chain(&error);
        results.extend(scenarios.iter().map(|s| ScenarioResult::broken(s.name, &why)));
    }
    results.sort_by_key(|result| scenarios.iter().position(|s| s.name == result.scenario));
    Ok(results)
}

/// The consoles of the emulated hosts of a run that reports to `report`.
pub(crate) fn consoles(report: &Path) -> Vec<PathBuf> {
    let hosts = fs::read_dir(report.join(HOSTS)).into_iter().flatten().flatten();
    hosts.map(|host| host.path().join(LOG)).collect()
}

/// Moves the logs of `scenarios` from a host's `share` to `report`, in place of older ones.
fn collect(scenarios: &[Scenario], share: &Path, report: &Path) -> Result<(), LabError> {
    for Scenario { name, .. } in scenarios {
        let (from, to) = (share.join(name), report.join(name));
        if to.exists() {
            fs::remove_dir_all(&to).map_err(LabError::file("remove", &to))?;
        }
        if from.exists() {
            fs::rename(&from, &to).map_err(LabError::file("move", &from))?;
        }
    }
    Ok(())
}

/// Runs `scenarios`, which need the same host: a Grace one with the kernel `on_grace`, or a PC.
fn run_in(
    scenarios: &[Scenario],
    on_grace: Option<GraceKernel>,
    tools: &Tools,
    cache: &Cache,
    share: &Path,
    stage: &Stage,
) -> Result<Vec<ScenarioResult>, LabError> {
    fs::create_dir_all(share).map_err(LabError::file("make", share))?;
    let mut of_grace = on_grace.map(|_| Tools::of_grace(cache)).transpose()?;
    if let Some(of_arm) = of_grace.as_mut().filter(|_| scenarios.iter().any(|s| s.rdma)) {
        of_arm.rdma = Some(Kit::of(Architecture::Arm64, cache)?);
    }
    let kernel = match on_grace {
        Some(kind) => kernel::grace(kind, cache, false)?,
        None if scenarios.iter().any(Scenario::needs_own_kernel) => kernel::built(cache, false)?,
        None => kernel::l1(cache, false)?,
    };
    of_grace.unwrap_or_else(|| tools.needed_by(scenarios)).copy_to(&share.join("tools"))?;
    let plugged = scenarios.iter().any(|s| s.plugged);
    let wire = scenarios.iter().any(|s| s.rdma);
    let grace = on_grace.is_some();
    let gigantic = !grace && scenarios.iter().any(|s| s.gigantic);
    let host = Host { kernel: &kernel, cache, plugged, grace, wire, clock: Clock::Real, gigantic };
    let sandbox = tools.sandbox.into_iter().flat_map(Sandbox::words);
    let arguments: Vec<_> = ARGUMENTS.into_iter().chain(sandbox).collect();
    run_under(&host, &arguments, scenarios, share, stage)
}

/// Runs `scenarios` under one kernel, by this program with `arguments` and their names; a scenario without a result there is
/// broken, with the reason.
fn run_under(
    host: &Host<'_>,
    arguments: &[&str],
    scenarios: &[Scenario],
    share: &Path,
    stage: &Stage,
) -> Result<Vec<ScenarioResult>, LabError> {
    let silence = scenarios.iter().map(|s| s.deadline).max().unwrap_or_default() + OVERHEAD;
    let names = scenarios.iter().map(|s| s.name);
    let arguments: Vec<_> = arguments.iter().copied().chain(names).collect();
    let ending = boot_under(host, share, &arguments, silence, stage)?;
    let json = fs::read(share.join(RESULTS)).ok();
    let results: Option<Vec<ScenarioResult>> = json.and_then(|json| serde_json::from_slice(&json).ok());
    let results = results.unwrap_or_default();
    Ok(complete(scenarios, results, ending, &share.join(LOG)))
}

/// Boots the emulated host with `kernel` and no cards of the lab's own: see [`boot_under`].
pub(crate) fn boot(
    kernel: &StockKernel,
    cache: &Cache,
    clock: Clock,
    share: &Path,
    arguments: &[&str],
    silence: Duration,
) -> Result<Ending, LabError> {
    let host = Host { kernel, cache, plugged: false, grace: false, wire: false, clock, gigantic: false };
    let stage = Stage::begin("starting the emulated host");
    let ending = boot_under(&host, share, arguments, silence, &stage)?;
    stage.end();
    Ok(ending)
}

#[derive(Clone, Copy)]
pub(crate) struct Host<'a> {
    pub(crate) kernel: &'a StockKernel,
    /// The cache of emulators.
    pub(crate) cache: &'a Cache,
    /// Whether it has cards of the lab's own.
    pub(crate) plugged: bool,
    /// Whether it is a Grace host, or else a PC.
    pub(crate) grace: bool,
    /// Whether the traffic of its first network card is recorded, if it is a Grace host.
    pub(crate) wire: bool,
    /// Source of its time.
    pub(crate) clock: Clock,
    /// Whether it sets a hugetlb page of 1 GiB aside at its boot: later none may be contiguous.
    pub(crate) gigantic: bool,
}

/// Boots the emulated host, which runs this program with `arguments`, each without spaces, and goes off. It has `share`
/// as `/share`, a copy of `share/tools` in `/run/tools`, and leaves its console in `share` as [`LOG`]. It is killed
/// when it prints nothing for as long as `silence`. Its progress shows on `stage`.
fn boot_under(
    host: &Host<'_>,
    share: &Path,
    arguments: &[&str],
    silence: Duration,
    stage: &Stage,
) -> Result<Ending, LabError> {
    for old in ["exit", "command"] {
        remove(&share.join(old))?;
    }
    let path = share.join("arguments");
    fs::write(&path, arguments.join("\n")).map_err(LabError::file("write", path))?;
    let (command, _cards) = emulate(host, share, "")?;
    watch(command, Limit::Silence(silence), &share.join(LOG), &share.join("qemu.log"), |line| {
        if let Some(text) = line.strip_prefix(PREFIX) {
            stage.print_line(text);
        }
        Reaction::Go
    })
}

/// The command that emulates `host`, with additional kernel `words`, and its cards, which must outlive it.
pub(crate) fn emulate(
    &Host { kernel, cache, plugged, grace, wire, clock, gigantic }: &Host<'_>,
    share: &Path,
    words: &str,
) -> Result<(Command, Cards), LabError> {
    let share = share.canonicalize().map_err(LabError::file("find", share))?;
    let (image, drives) = (share.join("l1-initramfs.cpio"), DRIVES.map(|name| share.join(name)));
    let bytes = initramfs::l1(kernel, grace, cache)?;
    fs::write(&image, bytes).map_err(LabError::file("write", &image))?;
    for drive in &drives {
        let file = fs::File::create(drive).map_err(LabError::file("make", drive))?;
        file.set_len(DRIVE).map_err(LabError::file("size", drive))?;
    }
    let egm = (grace && plugged).then(|| grace::make_egm(&share)).transpose()?.unwrap_or_default();
    let cards: &[served::Plugged] = match (plugged, grace) {
        (false, _) => &[],
        (true, false) => served::PLUGGED,
        (true, true) => served::PLUGGED_GRACE,
    };
    let sockets = served::sockets(cards, &share);
    let servers = match cards {
        [] => Vec::new(),
        _ => served::plug(cards, &beside("egm-function")?, &share)?,
    };
    let frequency = match clock {
        Clock::Real => frequency(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        Clock::Instructions => "tsc_early_khz=1000000".to_owned(),
    };
    // QEMU maps guest memory for cards page by page, at most 65,535 pages: large ones are needed (from Linux 6.13).
    let large = if plugged { "transparent_hugepage_shmem=always" } else { "" };
    let gigantic = if gigantic { "hugepagesz=1G hugepages=1" } else { "" };
    let append =
        if grace { format!("{large} {words}") } else { format!("{frequency} {large} {gigantic} {words}") };
    let machine = L1 {
        kernel: &kernel.image(),
        initramfs: &image,
        share: &share,
        drives: &drives,
        cards: &sockets,
        wire,
        clock,
        words: append.trim(),
    };
    let (emulator, arguments) = if grace {
        let emulator = Emulator::arm(cache)?;
        let profile = if plugged { grace::Profile::VfioUser } else { grace::Profile::Qemu };
        let tree = grace::tree(profile, &emulator, &share)?;
        (emulator, grace::l1(&machine, &tree))
    } else {
        (Emulator::of(cache)?, qemu::l1(&machine))
    };
    let mut command = emulator.command();
    command.args(arguments);
    Ok((command, Cards { servers, egm }))
}

/// Kernel word for the emulated host's TSC frequency. Its TSC is this machine's, and without the word it measures the
/// frequency against a timer that QEMU emulates. On a busy machine its time once ran four times too fast, most likely
/// for that reason. Only on a virtual machine is `cpu MHz` the frequency; elsewhere it changes with the load.
fn frequency(cpuinfo: &str) -> String {
    let value = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim())
    };
    let is_virtual = value("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
    let khz = value("cpu MHz").filter(|_| is_virtual).map(|mhz| mhz.replace('.', ""));
    khz.map(|khz| format!("tsc_early_khz={khz}")).unwrap_or_default()
}

/// The results in order, with a broken one for each scenario that has none.
fn complete(
    scenarios: &[Scenario],
    results: Vec<ScenarioResult>,
    ending: Ending,
    log: &Path,
) -> Vec<ScenarioResult> {
    let why = match ending {
        Ending::Deadline => "the emulated host fell silent and was stopped",
        Ending::Signal(_) => "QEMU was killed",
        Ending::Exit(0) => "the emulated host went off without a result",
        Ending::Exit(_) => "QEMU failed; its words are in qemu.log",
    };
    let reason = format!("{why}: see {}", log.display());
    scenarios
        .iter()
        .map(|s| {
            let result = results.iter().find(|r| r.scenario == s.name).cloned();
            result.unwrap_or_else(|| ScenarioResult::broken(s.name, &reason))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::ALL;

    #[test]
    fn a_virtual_machine_passes_its_clock_frequency_to_the_emulated_host() {
        let cpu = |flags: &str| format!("processor\t: 0\ncpu MHz\t\t: 2445.432\nflags\t\t: fpu {flags} lm\n");
        assert_eq!(frequency(&cpu("hypervisor")), "tsc_early_khz=2445432");
        assert_eq!((frequency(&cpu("svm")), frequency("")), (String::new(), String::new()));
    }

    #[test]
    fn the_logs_of_a_host_replace_those_of_an_earlier_run() {
        let folder = tempfile::tempdir().unwrap();
        let (share, report) = (folder.path().join("hosts/1"), folder.path());
        let [ran, lost] = [ALL[0].name, ALL[1].name];
        for path in [share.join(ran), report.join(ran), report.join(lost)] {
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("log"), if path.starts_with(&share) { "new" } else { "old" }).unwrap();
        }
        collect(&ALL[..2], &share, report).unwrap();
        assert_eq!(fs::read_to_string(report.join(ran).join("log")).unwrap(), "new");
        assert!(!report.join(lost).exists(), "a host that died left no log");
    }

    #[test]
    fn a_scenario_that_the_emulated_host_did_not_finish_is_broken_and_not_lost() {
        let done = ScenarioResult::broken(ALL[0].name, "done");
        let results = complete(&ALL[..2], vec![done.clone()], Ending::Deadline, Path::new("l1.log"));
        assert_eq!(results[0], done);
        assert_eq!(results[1].scenario, ALL[1].name);
        assert!(results[1].cases[0].reason.contains("silent"));
    }
}
