//! Scenario: a DMA engine writes to memory, to a slice of each kind that the host has, and to a peer's BAR.

use egm_guest::findings::{Check, Outcome};

use crate::engine::error::LabError;
use crate::engine::judge::case;
use crate::engine::progress::Stage;
use crate::engine::scenario::Scenario;
use crate::runner::regions;
use crate::runner::steps::Steps;

/// Kinds of slices that iommufd maps: files, pages of a pool, pages of persistent memory.
const WITH_PAGES: [&str; 3] = ["local", "hugetlb", "dax0.0"];
/// A kind without struct pages in the host's kernel, which type 1 maps by address.
const WITHOUT: &str = "memmap";

/// Runs the scenario with its engine and its memory function.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let scenario = steps.scenario;
    let _pool = regions::pool()?;
    for region in WITH_PAGES.iter().chain((!scenario.iommufd).then_some(&WITHOUT)) {
        Stage::note(&format!("{}: a slice of {region}", scenario.name));
        reaches(steps, region)?;
    }
    steps.no_faults("no-dma-faults");
    steps.free();
    Ok(())
}

/// The engine reaches all memory of a guest with a slice of `region`.
fn reaches(steps: &mut Steps<'_>, region: &'static str) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    if let Some(why) = regions::missing(runner, region)? {
        steps.cases.push(Check { outcome: Outcome::Skipped, reason: why, ..case(region, None, 0) });
        return Ok(());
    }
    let one = Scenario { region: Some(region), ..*scenario };
    let folder = steps.folder(region)?;
    let machine = runner.machine(&one, &folder)?;
    let boot = runner.boot(&one, &machine, &folder)?;
    steps.judge(one.expected, &boot, &format!(" of {region}"));
    Ok(())
}
