//! Time to map memory for a device, compared with one ioctl of the kernel over the same memory: `egm-vfio`'s benchmark,
//! in an emulated host with the kernel's own IOMMU and VFIO.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Section;
use super::emulated::{EmulatedHost, FUNCTION};
use super::figures::{Report, Row, Summary, Target};
use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::images::kernel;

/// The benchmark among the tools.
const PROGRAM: &str = "bench-dma";
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// The rows. A GiB of large pages takes a few milliseconds or one, so there is more of them: the fixed time of a call
/// must not show.
const MAPS: [Map; 4] = [
    Map { interface: "legacy", page: "4K", mib: 1024, rounds: 5 },
    Map { interface: "legacy", page: "2M", mib: 3072, rounds: 11 },
    Map { interface: "iommufd", page: "4K", mib: 1024, rounds: 5 },
    Map { interface: "iommufd", page: "2M", mib: 3072, rounds: 11 },
];

/// Memory that is mapped in each of some rounds.
struct Map {
    interface: &'static str,
    /// Size of its pages.
    page: &'static str,
    mib: u64,
    rounds: usize,
}

impl Map {
    fn name(&self) -> String {
        format!("{}, {} pages", self.interface, self.page)
    }

    /// Runs the benchmark among `tools`.
    fn measure(&self, tools: &Path) -> Result<Seconds, LabError> {
        let pages = if self.page == "2M" { self.mib / 2 } else { 0 };
        fs::write(POOL, pages.to_string()).map_err(LabError::file("write", POOL))?;
        let (size, rounds) = (self.mib.to_string(), self.rounds.to_string());
        let line = Tool::new(&tools.join(PROGRAM).to_string_lossy(), "egm-vfio")
            .args(["--function", FUNCTION, "--interface", self.interface])
            .args(["--mib", &size, "--page", self.page, "--rounds", &rounds])
            .text()?;
        let seconds: Seconds = LabError::json(PROGRAM, line.trim().as_bytes())?;
        Ok(seconds.of_a_gib(self.mib))
    }
}

/// Output of the benchmark.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Seconds {
    before: Vec<f64>,
    ours: Vec<f64>,
    raw: Vec<f64>,
}

impl Seconds {
    /// The same for each GiB of `mib`.
    fn of_a_gib(self, mib: u64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "some GiB are far below 2^52 MiB")]
        let gib = mib as f64 / 1024.0;
        let [ours, raw] = [self.ours, self.raw].map(|seconds| seconds.into_iter().map(|s| s / gib).collect());
        Self { ours, raw, ..self }
    }
}

/// Measures under a kernel that has both interfaces.
pub(super) fn run(directory: &Path) -> Result<Report, LabError> {
    let host = EmulatedHost::new(directory)?;
    host.add_bench("egm-vfio", "dma", PROGRAM)?;
    let built = kernel::built(&host.cache, false)?;
    let found: BTreeMap<String, Seconds> = host.measure(&built, Section::Dma, &[])?;
    let millis = |seconds: &[f64]| Summary::of(seconds).map(|s| s.map(|s| 1000.0 * s));
    let row = |(name, seconds): (&String, &Seconds)| {
        let [ours, raw] =
            [&seconds.ours, &seconds.raw].map(|seconds| seconds.iter().map(|s| 1e3 * s).collect::<Vec<_>>());
        let name = format!("a GiB mapped for DMA, {name}, in the lab, 1 ns an instruction");
        Some(Row::in_turns(name, "ms", &ours, "one ioctl", &raw)?.should(Target::RatioAtMost(1.05)))
    };
    let before = found.values().flat_map(|seconds| seconds.before.iter().copied()).collect::<Vec<_>>();
    let before = millis(&before).map(|s| Row::new("asked before, whatever the size", "ms", s));
    Ok(Report { rows: found.iter().filter_map(row).chain(before).collect(), ..Report::default() })
}

/// In the emulated host.
pub(super) fn within(tools: &Path) -> Result<BTreeMap<String, Seconds>, LabError> {
    let mut found = BTreeMap::new();
    for map in MAPS {
        Stage::note(&map.name());
        found.insert(map.name(), map.measure(tools)?);
    }
    Ok(found)
}
