//! The story of a group of two functions: while the host uses one of them, the other is refused with its name; afterwards a
//! guest gets both.

use crate::error::LabError;
use crate::frame::Frame;
use crate::passed::{bind, group, refused};
use crate::scenarios::Scenario;

/// A driver of the host that takes whatever it is told to.
const DRIVER: &str = "uio_pci_generic";
const VFIO: &str = "vfio-pci";
/// The exit code of a VMM whose host forbids something.
const HOST_FORBIDS: i32 = 3;

/// Tells the story of the two functions of `scenario`.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    let [first, second] = scenario.passed else {
        return Err(LabError::Usage(format!("{} needs two functions", scenario.name)));
    };
    if group(first).is_none() || group(first) != group(second) {
        frame.skip(&format!("this host has no {first} and {second} in one IOMMU group"));
        return Ok(());
    }
    let alone = Scenario { passed: std::slice::from_ref(first), ..*scenario };
    let machine = runner.machine(&alone, report)?;
    bind(second, DRIVER)?;
    let holder = format!("{second} by {DRIVER}");
    frame.step("refused", || refused(&mut runner.command(&machine), HOST_FORBIDS, &[&holder]));
    bind(second, VFIO)?;
    let machine = runner.machine(scenario, report)?;
    let boot = runner.boot(scenario, &machine, report)?;
    frame.judge(scenario.expected, &boot, "");
    frame.free();
    frame.no_faults("no-dma-faults");
    Ok(())
}
