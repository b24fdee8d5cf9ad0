//! Scenarios of functions that come and go while their guest runs: plugged in and out by the control API, or removed by the
//! host.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use egm_guest::findings::Check;

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::functions::free;
use crate::runner::control::Control;
use crate::runner::machine::Machine;
use crate::runner::steps::{Fault, Step, Steps, timed};

/// The guest prints these when it waits for a drive to arrive, and to go.
const PLUG: &str = "egm-hotplug plug ";
const UNPLUG: &str = "egm-hotplug unplug ";
/// Slot Control: power off, both indicators off (PCI Express base specification 6.0, 7.5.3.10).
const POWER_OFF: u16 = 1 << 10 | 3 << 8 | 3 << 6;
/// Offset of the capabilities pointer in configuration space, and the ID of the PCI Express capability.
const CAPABILITIES: u8 = 0x34;
const EXPRESS: u8 = 0x10;
/// The function's name in the machine.
const ID: &str = "drive";

/// Runs the scenario of a function that is plugged into a machine with spare ports, unplugged, and plugged in again.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let control = Control::of(runner, scenario);
    let without = Scenario { assigned: &[], ..*scenario };
    let start = |machine: &Machine| control.start(runner, machine);
    watch(steps, start, &without, |line, function| {
        if let Some(round) = line.split(PLUG).nth(1) {
            let plug = || control.plug(function, ID).map(drop);
            return Some(timed(&format!("plugged {round}"), plug));
        }
        let round = line.split(UNPLUG).nth(1)?;
        let unplug = || {
            control.unplug(ID)?;
            free(function)
        };
        Some(timed(&format!("given back {round}"), unplug))
    })?;
    steps.step("reset by its bus", || logged(report, &["resets of its bus"]));
    Ok(())
}

/// Runs the scenario of a function that the host unbinds from its driver while a guest has it.
pub(crate) fn requested(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    watch(
        steps,
        |machine| runner.command(machine),
        scenario,
        |line, function| line.contains(UNPLUG).then(|| timed("unbound", || unbind(function))),
    )?;
    steps.step("noted", || logged(report, &["the host requests", "the host has it back"]));
    Ok(())
}

/// Runs the scenario of a function that is pulled out of the host while a guest has it. The lab turns its slot's power
/// off without the kernel, which the emulator treats as removal, and then removes the function from the kernel, as its
/// hot-plug driver would. The function stays away.
pub(crate) fn pulled(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [function] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs one function", scenario.name)));
    };
    let machine = runner.machine(scenario, report)?;
    let mut done = None;
    let boot = runner.boot_by(runner.command(&machine), scenario, &machine, report, |line| {
        if line.contains(UNPLUG) {
            done = Some(timed("pulled", || pull(function)));
        }
    })?;
    steps.judge(scenario.expected, &boot, "");
    steps.cases.extend(done);
    steps.step("noted", || logged(report, &["is gone: it is taken from the guest"]));
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// Turns off the slot of `function` and removes it from the kernel, which returns once its user has closed it.
fn pull(function: &str) -> Step {
    let device = Path::new("/sys/bus/pci/devices").join(function).canonicalize()?;
    let port = device.parent().ok_or("behind no port")?.join("config");
    let port = fs::OpenOptions::new().read(true).write(true).open(port)?;
    let mut config = [0; 256];
    port.read_exact_at(&mut config, 0)?;
    let control = slot_control(&config).ok_or("its port has no PCI Express capability")?;
    port.write_all_at(&POWER_OFF.to_le_bytes(), control)?;
    Ok(fs::write(device.join("remove"), "1")?)
}

/// Offset of Slot Control in this port's configuration space (PCI Express base specification 6.0, 7.5.3.10).
fn slot_control(config: &[u8; 256]) -> Option<u64> {
    let byte = |at: u8| config.get(usize::from(at)).copied();
    let mut at = byte(CAPABILITIES)? & !3;
    // As many capabilities as fit after the header.
    for _ in 0..48 {
        if byte(at)? == EXPRESS {
            return Some(u64::from(at) + 0x18);
        }
        at = byte(at.checked_add(1)?)? & !3;
    }
    None
}

/// Boots `configured` and adds the results of `react`, which gets each line of the console and the function.
fn watch(
    steps: &mut Steps<'_>,
    command: impl Fn(&Machine) -> Command,
    configured: &Scenario,
    mut react: impl FnMut(&str, &str) -> Option<Check>,
) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [function, ..] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs a function", scenario.name)));
    };
    let machine = runner.machine(configured, report)?;
    let mut done = Vec::new();
    let boot = runner.boot_by(command(&machine), scenario, &machine, report, |line| {
        done.extend(react(line, function));
    })?;
    steps.judge(scenario.expected, &boot, "");
    steps.cases.extend(done);
    bind(function)?;
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// Unbinds `function` from its driver; the kernel returns once its user has closed it.
fn unbind(function: &str) -> Step {
    let driver = Path::new("/sys/bus/pci/devices").join(function).join("driver");
    fs::write(driver.join("unbind"), function)?;
    if driver.exists() {
        return Err(Fault::Untrue(format!("{function} still has a driver")));
    }
    Ok(())
}

/// Binds the function to its driver again, for later scenarios.
fn bind(function: &str) -> Result<(), LabError> {
    let path = Path::new("/sys/bus/pci/drivers_probe");
    fs::write(path, function).map_err(LabError::file("write", path))
}

/// The VMM's log contains each of `wanted`.
fn logged(report: &Path, wanted: &[&str]) -> Step {
    let log = fs::read_to_string(report.join("vmm.log"))?;
    match wanted.iter().find(|words| !log.contains(**words)) {
        None => Ok(()),
        Some(words) => Err(Fault::Untrue(format!("the VMM did not log \"{words}\": {log}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_note_is_required() {
        let report = tempfile::tempdir().unwrap();
        let noted = || logged(report.path(), &["the host requests", "the host has it back"]);
        fs::write(report.path().join("vmm.log"), "the host requests 0000:01:00.0 back\n").unwrap();
        assert!(noted().is_err());
        fs::write(report.path().join("vmm.log"), "the host requests it back\ngone: the host has it back")
            .unwrap();
        assert!(noted().is_ok());
    }

    #[test]
    fn a_slot_is_found_behind_other_capabilities_and_not_in_a_ring() {
        let mut config = [0; 256];
        (config[0x34], config[0x40], config[0x41]) = (0x40, 5, 0x80);
        (config[0x80], config[0x81]) = (EXPRESS, 0x40);
        assert_eq!(slot_control(&config), Some(0x98));
        config[0x80] = 9;
        assert_eq!(slot_control(&config), None);
    }
}
