//! Scenario: a guest drives a host function. The device keeps the data that the guest wrote, a guest that resets itself
//! leaves the function usable, and afterwards the function is free. The host's IOMMU must log no fault.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::output;
use crate::disk::{self, Proof};
use crate::error::LabError;
use crate::judge::Expected;
use crate::run::Runner;
use crate::scenario::Scenario;
use crate::steps::{Fault, Step, Steps};

/// The image of the first NVMe drive, where the emulated host sees it.
const IMAGE: &str = "/share/nvme0.img";

/// Memory of a machine without Linux.
pub(crate) const PAYLOAD_MEMORY: &str = "64MiB";

/// Runs the scenario with its functions.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let machine = runner.machine(scenario, report)?;
    let first = runner.boot(scenario, &machine, report)?;
    steps.judge(scenario.expected, &first, "");
    if scenario.disk.is_some() {
        steps.step("written", written);
        again(steps)?;
    }
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// The drive in a second guest, which does the same and resets itself.
fn again(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let expected = Expected { exit: 1, ..scenario.expected };
    let again = Scenario { end: "egm.exit=reset", expected, ..*scenario };
    let machine = runner.machine(&again, report)?;
    let boot = runner.boot(&again, &machine, report)?;
    steps.judge(again.expected, &boot, " again");
    Ok(())
}

/// The guest's signature is in the image.
fn written() -> Step {
    disk::fault(Proof::Signature, Path::new(IMAGE), None).map_or(Ok(()), |fault| Err(Fault::Untrue(fault)))
}

/// A machine refuses to start: it ends with exit code `exit`, and prints all of `words`.
pub(crate) fn refused(machine: &mut Command, exit: i32, words: &[&str]) -> Step {
    let output = output(machine)?;
    let said = String::from_utf8_lossy(&output.stderr);
    match words.iter().find(|word| !said.contains(**word)) {
        None if output.status.code() == Some(exit) => Ok(()),
        None => Err(Fault::Untrue(format!("{}, expected exit code {exit}: {said}", output.status))),
        Some(word) => Err(Fault::Untrue(format!("{}, and no \"{word}\" in: {said}", output.status))),
    }
}

/// The configuration of a machine without Linux, for the payload `elf`, with additional `keys`, for instance `devices`.
pub(crate) fn payload(
    runner: &Runner,
    scenario: &Scenario,
    name: &str,
    elf: &[u8],
    mut keys: serde_json::Value,
) -> Result<PathBuf, LabError> {
    let work = runner.work.join(scenario.name);
    fs::create_dir_all(&work).map_err(LabError::file("make", &work))?;
    let (kernel, config) = (work.join(format!("{name}.elf")), work.join(format!("{name}.json")));
    keys["name"] = name.into();
    keys["extends"] = runner.tools.configs.join(scenario.config).to_string_lossy().into();
    keys["memory"] = serde_json::json!({ "size": PAYLOAD_MEMORY });
    keys["boot"] = serde_json::json!({ "kernel": kernel, "initramfs": null });
    fs::write(&kernel, elf).map_err(LabError::file("write", &kernel))?;
    fs::write(&config, keys.to_string()).map_err(LabError::file("write", &config))?;
    Ok(config)
}

/// The key `devices` with these functions.
pub(crate) fn devices(functions: &[&str]) -> serde_json::Value {
    let device = |function| serde_json::json!({ "type": "vfio", "function": function });
    serde_json::json!({ "devices": functions.iter().map(device).collect::<Vec<_>>() })
}
