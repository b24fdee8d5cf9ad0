//! Scenario: a function reports an uncorrectable error. The lab injects one into the host's kernel (`aer_inject`); the
//! guest loses the function and goes on, the VMM reports it once, and the next machine gets the function.

use std::fs;
use std::path::Path;

use crate::assigned::held;
use crate::engine::error::LabError;
use crate::runner::steps::{Fault, Step, Steps};

/// The kernel's file for injected errors (`drivers/pci/pcie/aer_inject.c`).
const INJECT: &str = "/dev/aer_inject";
/// A completion that did not come, among uncorrectable errors (PCI Express base specification 6.0, 7.8.4.2).
const COMPLETION_TIMEOUT: u32 = 1 << 14;
/// The VMM prints this about the error.
const WORDS: &str = "reported an error that it cannot correct";
/// The guest prints this when it waits for its function to go.
pub(crate) const MARK: &str = "egm-lost waits";

/// Runs the scenario for its one function.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [function] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs one function", scenario.name)));
    };
    if !Path::new(INJECT).exists() {
        steps.skip("this host's kernel has no aer_inject");
        return Ok(());
    }
    let machine = runner.machine(scenario, report)?;
    let mut reported = Err(Fault::Undecided("the guest did not come to wait for it"));
    let boot = runner.boot_by(runner.command(&machine), scenario, &machine, report, |line| {
        if line.contains(MARK) {
            reported = inject(function);
        }
    })?;
    steps.judge(scenario.expected, &boot, "");
    steps.step("reported", || reported);
    steps.step("noted", || times(&fs::read_to_string(report.join("vmm.log"))?, 1));
    let folder = steps.folder("next")?;
    steps.step("next", || times(&held::with(runner, scenario, &folder, &[function], || Ok(()))?, 0));
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// The function reports the error.
pub(crate) fn inject(function: &str) -> Step {
    let report = report(function, COMPLETION_TIMEOUT).ok_or("not the address of a function")?;
    Ok(fs::write(INJECT, report)?)
}

/// The kernel's `struct aer_error_inj`: the function, its uncorrectable errors, correctable ones, four words of a header, and
/// its domain.
fn report(function: &str, errors: u32) -> Option<Vec<u8>> {
    let hex = |text| u32::from_str_radix(text, 16).ok();
    let (domain, rest) = function.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, number) = rest.split_once('.')?;
    let place = [bus, device, number].map(|text| hex(text).and_then(|number| u8::try_from(number).ok()));
    let mut bytes = place.into_iter().collect::<Option<Vec<u8>>>()?;
    bytes.push(0);
    [errors, 0, 0, 0, 0, 0, hex(domain)?].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    Some(bytes)
}

/// The VMM reported the error `wanted` times.
pub(crate) fn times(said: &str, wanted: usize) -> Step {
    match said.matches(WORDS).count() {
        count if count == wanted => Ok(()),
        count => Err(Fault::Untrue(format!(
            "the VMM reports {count} times, not {wanted}, that a function {WORDS}: {said}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_the_kernels_structure() {
        let bytes = report("0001:a2:1f.3", COMPLETION_TIMEOUT).unwrap();
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[..4], [0xa2, 0x1f, 3, 0]);
        assert_eq!(
            (bytes[4..8].to_vec(), bytes[28..].to_vec()),
            (0x4000_u32.to_ne_bytes().into(), 1_u32.to_ne_bytes().into())
        );
        assert!(report("a2:1f.3", 0).is_none() && report("0000:100:00.0", 0).is_none());
    }
}
