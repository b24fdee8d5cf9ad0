//! Time to make guest memory present, and zero again: compared with memset in one process, with QEMU as a launch.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::figures::{Report, Row, Summary, Target};
use super::launch::Launched;
use super::measured;
use super::monitor::{Monitor, provided};
use super::payload::{qemu_memory, seconds_to_first_byte, write_hello};
use crate::engine::error::LabError;
use crate::engine::peer_program::PeerProgram;

/// Memory to make present, unless a third of the available memory is less.
const MIB: u64 = 4 << 10;
/// Rounds of each method.
const ROUNDS: usize = 5;
/// Time for QEMU to have its memory.
const DEADLINE: Duration = Duration::from_secs(120);
/// The pool of 2 MiB pages.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// All figures of prefault.
pub(super) fn run(egm_vmm: &Path, work: &Path, peers: &[PeerProgram]) -> Result<Report, LabError> {
    let mib = size()?;
    let mut report = Report::default();
    report.extend("prefault, base pages", in_process("prefault", mib, "4K"));
    report.extend("prefault, 2 MiB pages", huge("prefault", mib));
    report.extend("prefault as a launch", launches(egm_vmm, work, mib, peers));
    Ok(report)
}

/// All figures of the scrub.
pub(super) fn scrub() -> Result<Report, LabError> {
    let mib = size()?;
    let mut report = Report::default();
    report.extend("scrub, base pages", in_process("scrub", mib, "4K"));
    report.extend("scrub, 2 MiB pages", huge("scrub", mib));
    Ok(report)
}

fn size() -> Result<u64, LabError> {
    Ok(MIB.min(available_mib()? / 3 / 1024 * 1024).max(1024))
}

fn speed(mib: u64) -> impl Fn(f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "MiB of a host are far below 2^52")]
    let gib = mib as f64 / 1024.0;
    move |seconds| gib / seconds
}

fn in_process(what: &str, mib: u64, page: &str) -> Result<Report, LabError> {
    let (size, rounds) = (mib.to_string(), ROUNDS.to_string());
    let words = ["--of", what, "--mib", &size, "--page", page, "--rounds", &rounds];
    let seconds = measured("egm-device", "memory", &words)?;
    let speeds = |way: &str| seconds.get(way).and_then(|s| Summary::of(s)).map(|s| s.map(speed(mib)));
    let mut report = Report::default();
    if let Some(ours) = speeds(what) {
        let name = format!("{what} {} GiB, {page} pages", mib / 1024);
        let row = || Row::new(name.clone(), "GiB/s", ours);
        let memset = row().beside("parallel memset", speeds("memset"));
        report.rows.push(memset.should(Target::RatioAtLeast(0.9)));
        for (way, name) in
            [("populate", "one MADV_POPULATE_WRITE"), ("mapped", "parallel memset, mapped before")]
        {
            let speeds = speeds(way);
            report.rows.extend(speeds.is_some().then(|| row().beside(name, speeds)));
        }
    }
    Ok(report)
}

/// With a pool of 2 MiB pages, created for it and released afterwards.
fn huge(what: &str, mib: u64) -> Result<Report, LabError> {
    let before = pool()?;
    let pages = mib / 2;
    let set = |pages: u64| fs::write(POOL, pages.to_string()).map_err(LabError::file("write", POOL));
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    set(before.saturating_add(pages.saturating_sub(free)))?;
    let now = pool()?;
    let report = if now.saturating_sub(before).saturating_add(free) >= pages {
        in_process(what, mib, "2M")
    } else {
        Err(LabError::Host {
            what: format!(
                "the pool of 2 MiB pages grew to {now} only, and {pages} more free ones are needed"
            ),
            remedy: "reserve them at boot: hugepages=N".into(),
        })
    };
    set(before)?;
    report
}

fn pool() -> Result<u64, LabError> {
    let text = fs::read_to_string(POOL).map_err(LabError::file("read", POOL))?;
    text.trim().parse().map_err(|_| LabError::Content { what: POOL.into(), problem: text })
}

/// The same memory as part of a launch: the difference between a launch with prefault and one without.
fn launches(egm_vmm: &Path, work: &Path, mib: u64, peers: &[PeerProgram]) -> Result<Report, LabError> {
    let payload = write_hello(work, "prefault", mib)?;
    let launch = |monitor: &Monitor, prefault: bool| -> Result<Option<f64>, LabError> {
        let command = monitor.command(&payload.prefaulted(prefault))?;
        command.map(|command| seconds_to_first_byte(command, work)).transpose()
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let qemu = |prealloc: bool| -> Result<f64, LabError> {
        let command = qemu_memory(mib, threads, prealloc);
        let launched = Launched::start(command, "(qemu)", DEADLINE, &work.join("stderr.log"))?;
        Ok(launched.elapsed.as_secs_f64())
    };
    let mut monitors = vec![(Monitor::Egm(egm_vmm.into()), Vec::new())];
    monitors.extend(provided(peers).into_iter().map(|monitor| (monitor, Vec::new())));
    let mut of_qemu = Vec::new();
    for _ in 0..ROUNDS {
        for (monitor, samples) in &mut monitors {
            if let Some(with) = launch(monitor, true)? {
                samples.extend(launch(monitor, false)?.map(|without| with - without));
            }
        }
        if super::qemu_is_here() {
            of_qemu.push(qemu(true)? - qemu(false)?);
        }
    }
    let summary = |samples: &[f64]| Summary::of(samples).map(|s| s.map(speed(mib)));
    let mut report = Report::default();
    let mut samples = monitors.iter();
    let ours = samples.next().and_then(|(_, samples)| summary(samples));
    if let Some(figures) = ours {
        let row = || Row::new(format!("prefault {} GiB in a launch", mib / 1024), "GiB/s", figures);
        let beside_qemu = row().beside(&format!("QEMU prealloc-threads={threads}"), summary(&of_qemu));
        report.rows.push(beside_qemu.should(Target::RatioAtLeast(1.0)));
        for (monitor, samples) in samples {
            match summary(samples) {
                Some(theirs) => report.rows.push(row().beside(monitor.name(), Some(theirs))),
                None => report.skipped.push(format!("prefault: {} has none", monitor.name())),
            }
        }
    }
    Ok(report)
}

fn available_mib() -> Result<u64, LabError> {
    const MEMINFO: &str = "/proc/meminfo";
    let text = fs::read_to_string(MEMINFO).map_err(LabError::file("read", MEMINFO))?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map(|kib| kib / 1024)
        .ok_or_else(|| LabError::Content { what: MEMINFO.into(), problem: "it has no MemAvailable".into() })
}
