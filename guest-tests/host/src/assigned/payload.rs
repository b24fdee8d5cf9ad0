//! Machines without Linux, which get functions.

use std::fs;
use std::path::PathBuf;

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::runner::machine::Runner;

/// Memory of a machine without Linux.
pub(crate) const PAYLOAD_MEMORY: &str = "64MiB";

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
