//! The emulated host: QEMU boots Debian's kernel, and in it this program runs the scenarios, all in one boot.
//!
//! The report directory is shared over 9p: tools go in, logs and results come out, whatever happens in between.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::cache::Cache;
use crate::error::LabError;
use crate::initramfs;
use crate::kernel;
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
/// The console of the emulated host.
pub(crate) const LOG: &str = "l1.log";
/// How the runner is called there, before the names of scenarios.
const ARGUMENTS: [&str; 9] =
    ["run", "--where", "kvm", "--tools", "/run/tools", "--work", "/run/work", "--report", "/share"];

/// Runs `scenarios` in the emulated host; a scenario without a result there is broken, with the reason.
pub(crate) fn run(
    scenarios: &[Scenario],
    tools: &Tools,
    cache: &Cache,
    report: &Path,
) -> Result<Vec<ScenarioResult>, LabError> {
    tools.copy_to(&report.join("tools"))?;
    remove(&report.join(RESULTS))?;
    let deadline = scenarios.iter().map(|s| s.deadline * s.boots).sum::<Duration>() + OVERHEAD;
    let mut arguments = ARGUMENTS.to_vec();
    arguments.extend(scenarios.iter().map(|s| s.name));
    let ending = boot(cache, report, &arguments, deadline)?;
    let results = fs::read(report.join(RESULTS)).ok().and_then(|json| serde_json::from_slice(&json).ok());
    Ok(complete(scenarios, results.unwrap_or_default(), ending, &report.join(LOG)))
}

/// Boots the emulated host, which runs this program with `arguments`, each without spaces, and goes off. It has `share`
/// as `/share`, a copy of `share/tools` in `/run/tools`, and leaves its console in `share` as [`LOG`].
pub(crate) fn boot(
    cache: &Cache,
    share: &Path,
    arguments: &[&str],
    deadline: Duration,
) -> Result<Ending, LabError> {
    let kernel = kernel::l1(cache, false)?;
    let stage = Stage::begin("starting the emulated host");
    let share = share.canonicalize().map_err(LabError::file("find", share))?;
    let (image, nvme) = (share.join("l1-initramfs.cpio"), share.join("nvme.img"));
    let write = |path: &Path, bytes: &[u8]| fs::write(path, bytes).map_err(LabError::file("write", path));
    remove(&share.join("exit"))?;
    write(&share.join("arguments"), arguments.join("\n").as_bytes())?;
    write(&image, &initramfs::l1(&kernel)?)?;
    let file = fs::File::create(&nvme).map_err(LabError::file("make", &nvme))?;
    file.set_len(NVME).map_err(LabError::file("size", &nvme))?;
    let mut command = Command::new("qemu-system-x86_64");
    command.args(qemu::l1(&L1 {
        kernel: &kernel.image(),
        initramfs: &image,
        share: &share,
        nvme: &nvme,
        words: "",
    }));
    let ending = watch(command, deadline, &share.join(LOG), &share.join("qemu.log"), |line| {
        if let Some(text) = line.strip_prefix(PREFIX) {
            stage.say(text);
        }
        Reaction::Go
    })?;
    stage.end();
    Ok(ending)
}

/// Removes an earlier run's file, which must not pass for this one's.
pub(crate) fn remove(path: &Path) -> Result<(), LabError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(LabError::file("remove", path)(error)),
        _ => Ok(()),
    }
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
