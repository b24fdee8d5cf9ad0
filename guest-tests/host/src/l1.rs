//! The emulated host: QEMU boots Debian's kernel, and in it this program runs the scenarios, all in one boot.
//!
//! The report directory is shared over 9p: tools go in, logs and results come out, whatever happens in between.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::cache::Cache;
use crate::error::LabError;
use crate::initramfs;
use crate::kernel::{self, StockKernel};
use crate::process::{Ending, Reaction, watch};
use crate::progress::{PREFIX, Stage};
use crate::qemu::{self, L1};
use crate::results::ScenarioResult;
use crate::scenarios::Scenario;
use crate::tools::Tools;

/// Time for the emulated host itself, beside the scenarios' own deadlines.
const OVERHEAD: Duration = Duration::from_secs(120);
/// Size of the NVMe drive.
const NVME: u64 = 64 << 20;
/// What a run leaves in the shared directory.
pub(crate) const RESULTS: &str = "results.json";

/// Runs `scenarios` in the emulated host; a scenario without a result there is broken, with the reason.
pub(crate) fn run(
    scenarios: &[Scenario],
    tools: &Tools,
    cache: &Cache,
    report: &Path,
) -> Result<Vec<ScenarioResult>, LabError> {
    let kernel = kernel::l1(cache, false)?;
    let stage = Stage::begin("starting the emulated host");
    let share = prepare(scenarios, tools, &kernel, report)?;
    let (image, nvme) = (share.join("l1-initramfs.cpio"), share.join("nvme.img"));
    let mut command = Command::new("qemu-system-x86_64");
    command.args(qemu::l1(&L1 {
        kernel: &kernel.image(),
        initramfs: &image,
        share: &share,
        nvme: &nvme,
        words: "",
    }));
    let deadline = scenarios.iter().map(|s| s.deadline * s.boots).sum::<Duration>() + OVERHEAD;
    let log = share.join("l1.log");
    let ending = watch(command, deadline, &log, &share.join("qemu.log"), |line| {
        if let Some(text) = line.strip_prefix(PREFIX) {
            stage.say(text);
        }
        Reaction::Go
    })?;
    stage.end();
    let results = fs::read(share.join(RESULTS)).ok().and_then(|json| serde_json::from_slice(&json).ok());
    Ok(complete(scenarios, results.unwrap_or_default(), ending, &log))
}

/// Puts everything that the emulated host needs into the shared directory, and removes an earlier run's results.
fn prepare(
    scenarios: &[Scenario],
    tools: &Tools,
    kernel: &StockKernel,
    report: &Path,
) -> Result<std::path::PathBuf, LabError> {
    fs::create_dir_all(report).map_err(LabError::file("make", report))?;
    let share = report.canonicalize().map_err(LabError::file("find", report))?;
    for stale in [RESULTS, "exit"] {
        match fs::remove_file(share.join(stale)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(LabError::file("remove", share.join(stale))(error));
            }
            _ => {}
        }
    }
    tools.copy_to(&share.join("tools"))?;
    let names: Vec<_> = scenarios.iter().map(|s| s.name).collect();
    let write = |name: &str, bytes: &[u8]| {
        let path = share.join(name);
        fs::write(&path, bytes).map_err(LabError::file("write", path))
    };
    write("arguments", names.join("\n").as_bytes())?;
    write("l1-initramfs.cpio", &initramfs::l1(kernel)?)?;
    let nvme = share.join("nvme.img");
    let file = fs::File::create(&nvme).map_err(LabError::file("make", &nvme))?;
    file.set_len(NVME).map_err(LabError::file("size", &nvme))?;
    Ok(share)
}

/// The results in order, with a broken one for each scenario that has none.
fn complete(
    scenarios: &[Scenario],
    results: Vec<ScenarioResult>,
    ending: Ending,
    log: &Path,
) -> Vec<ScenarioResult> {
    let why = match ending {
        Ending::Deadline => "the emulated host did not end in time",
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
    fn a_scenario_that_the_emulated_host_did_not_finish_is_broken_and_not_lost() {
        let done = ScenarioResult::broken(ALL[0].name, "done");
        let results = complete(&ALL[..2], vec![done.clone()], Ending::Deadline, Path::new("l1.log"));
        assert_eq!(results[0], done);
        assert_eq!(results[1].scenario, ALL[1].name);
        assert!(results[1].cases[0].reason.contains("in time"));
    }
}
