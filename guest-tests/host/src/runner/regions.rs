//! EGM regions of this host.

use std::process::Command;

use crate::engine::command::output;
use crate::engine::error::LabError;
use crate::engine::step::Fault;
use crate::hosts::pool::Pool;
use crate::runner::machine::Runner;

/// Pages of 2 MiB that a hugetlb slice needs.
pub(crate) const HUGE_PAGES: u64 = 264;

/// The reason why `region` is unavailable on this host, if it is.
pub(crate) fn missing(runner: &Runner, region: &str) -> Result<Option<String>, LabError> {
    let regions = regions(runner)?;
    let names: Vec<_> = regions.iter().filter_map(|one| one.get("name")?.as_str()).collect();
    let known = names.iter().any(|name| *name == region || name.starts_with(&format!("{region}-")));
    Ok((!known).then(|| format!("this host has no region {region}: it has {}", names.join(", "))))
}

/// The regions of this host, as `egm-device regions --json` gives them.
pub(crate) fn regions(runner: &Runner) -> Result<Vec<serde_json::Value>, LabError> {
    let output = output(Command::new(&runner.tools.device).args(["regions", "--json"]))?;
    let json: serde_json::Value = LabError::json("egm-device regions", &output.stdout)?;
    Ok(json.get("regions").and_then(|all| all.as_array()).cloned().unwrap_or_default())
}

/// Host physical address of `region`.
pub(crate) fn base(runner: &Runner, region: &str) -> Result<u64, Fault> {
    let all = regions(runner)?;
    let one = all.iter().find(|one| one["name"] == region).ok_or("the region is gone")?;
    let base = one["base"].as_str().and_then(|text| u64::from_str_radix(text.get(2..)?, 16).ok());
    Ok(base.ok_or("the region has no address")?)
}

/// A pool that has room for a hugetlb slice.
pub(crate) fn pool() -> Result<Pool, LabError> {
    Pool::resize(2 << 10, HUGE_PAGES)
}
