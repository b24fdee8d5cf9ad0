//! Memory mapped for a device, beside one ioctl of the kernel over the same memory: `egm-vfio`'s benchmark, in an emulated
//! host, whose IOMMU and VFIO are the kernel's own.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Section;
use super::emulated::{EmulatedHost, FUNCTION};
use super::figures::{Report, Row, Summary, Target};
use crate::command::Tool;
use crate::error::LabError;
use crate::kernel;
use crate::progress::Stage;

/// The benchmark among the tools.
const PROGRAM: &str = "bench-dma";
/// Memory that is mapped: its time is the time of a GiB.
const MIB: u64 = 1024;
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// Interface, pages and rounds of each row: what takes milliseconds is measured more often.
const ROWS: [(&str, &str, usize); 4] =
    [("legacy", "4K", 15), ("legacy", "2M", 101), ("iommufd", "4K", 21), ("iommufd", "2M", 201)];

/// What the benchmark prints.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Seconds {
    before: Vec<f64>,
    ours: Vec<f64>,
    raw: Vec<f64>,
}

/// Under a kernel that has both interfaces.
pub(super) fn run(directory: &Path) -> Result<Report, LabError> {
    let host = EmulatedHost::new(directory)?;
    host.add_bench("egm-vfio", "dma", PROGRAM)?;
    let built = kernel::built(&host.cache, false)?;
    let found: BTreeMap<String, Seconds> = host.measure(&built, Section::Dma, &[])?;
    let millis = |seconds: &[f64]| Summary::of(seconds).map(|s| s.map(|s| 1000.0 * s));
    let row = |(name, seconds): (&String, &Seconds)| {
        let row = Row::new(format!("a GiB mapped for DMA, {name}, in the lab"), "ms", millis(&seconds.ours)?);
        Some(row.beside("one ioctl", millis(&seconds.raw)).should(Target::RatioAtMost(1.05)))
    };
    let before = found.values().flat_map(|seconds| seconds.before.iter().copied()).collect::<Vec<_>>();
    let before = millis(&before).map(|s| Row::new("asked before, whatever the size", "ms", s));
    Ok(Report { rows: found.iter().filter_map(row).chain(before).collect(), ..Report::default() })
}

/// In the emulated host.
pub(super) fn within(tools: &Path) -> Result<BTreeMap<String, Seconds>, LabError> {
    let mut found = BTreeMap::new();
    for (interface, page, rounds) in ROWS {
        Stage::note(&format!("{interface}, {page} pages"));
        let pages = if page == "2M" { MIB / 2 } else { 0 };
        fs::write(POOL, pages.to_string()).map_err(LabError::file("write", POOL))?;
        let (size, rounds) = (MIB.to_string(), rounds.to_string());
        let line = Tool::new(&tools.join(PROGRAM).to_string_lossy(), "egm-vfio")
            .args(["--function", FUNCTION, "--interface", interface])
            .args(["--mib", &size, "--page", page, "--rounds", &rounds])
            .text()?;
        let seconds = serde_json::from_str(line.trim())
            .map_err(|error| LabError::Content { what: PROGRAM.into(), problem: error.to_string() })?;
        found.insert(format!("{interface}, {page} pages"), seconds);
    }
    Ok(found)
}
