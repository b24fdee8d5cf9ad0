//! The story of a group of two functions: while the host uses one of them, the other is refused with its name; afterwards a
//! guest gets both.

use std::path::Path;
use std::time::Instant;

use crate::error::LabError;
use crate::judge::judge;
use crate::passed::{bind, dmar_faults, free, group, no_faults_since, refused};
use crate::results::ScenarioResult;
use crate::run::Runner;
use crate::scenarios::Scenario;
use crate::slices::timed;

/// A driver of the host that takes whatever it is told to.
const DRIVER: &str = "uio_pci_generic";
const VFIO: &str = "vfio-pci";
/// The exit code of a VMM whose host forbids something.
const HOST_FORBIDS: i32 = 3;

/// Tells the story of the two functions of `scenario`.
pub(crate) fn run(runner: &Runner, scenario: &Scenario, report: &Path) -> Result<ScenarioResult, LabError> {
    let [first, second] = scenario.passed else {
        return Err(LabError::Usage(format!("{} needs two functions", scenario.name)));
    };
    if group(first).is_none() || group(first) != group(second) {
        let why = format!("this host has no {first} and {second} in one IOMMU group");
        return Ok(ScenarioResult::skipped(scenario.name, &why));
    }
    let begun = Instant::now();
    let faults = dmar_faults()?;
    let alone = Scenario { passed: std::slice::from_ref(first), ..*scenario };
    let machine = runner.machine(&alone, report)?;
    bind(second, DRIVER)?;
    let holder = format!("{second} by {DRIVER}");
    let refusal = timed("refused", || refused(&mut runner.command(&machine), HOST_FORBIDS, &[&holder]));
    bind(second, VFIO)?;
    let machine = runner.machine(scenario, report)?;
    let boot = runner.boot(scenario, &machine, report)?;
    let mut cases = vec![refusal];
    cases.extend(judge(scenario.expected, &boot.collected));
    cases.push(timed("free", || free(first)));
    cases.push(timed("no-dma-faults", || no_faults_since(faults)));
    let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ScenarioResult { scenario: scenario.name.into(), cases, init_millis: boot.init, millis })
}
