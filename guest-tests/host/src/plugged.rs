//! Stories of functions that come and go while their guest runs: plugged in and out by the library, or taken back by the host.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egm_report::Check;

use crate::error::LabError;
use crate::frame::{Fault, Frame, Step, timed};
use crate::passed::free;
use crate::run::Machine;
use crate::scenarios::Scenario;

/// What the guest says when it waits for a drive, and when it waits for it to go.
const PLUG: &str = "egm-hotplug plug ";
const UNPLUG: &str = "egm-hotplug unplug ";
/// Longer than the VMM waits for its guest.
const PATIENCE: Duration = Duration::from_secs(150);
/// The function's name in the machine.
const ID: &str = "drive";

/// Tells the story of a function that is plugged into a machine with spare ports, unplugged, and plugged in again.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report: _, .. } = *frame;
    let socket = runner.work.join(scenario.name).join("plug.sock");
    let without = Scenario { passed: &[], ..*scenario };
    tell(
        frame,
        |machine| runner.plugging(machine, &socket),
        &without,
        |line, function| {
            if let Some(round) = line.split(PLUG).nth(1) {
                let plug = || ask(&socket, &format!("plug {ID} {function}"), "ok 1");
                return Some(timed(&format!("plugged {round}"), plug));
            }
            let round = line.split(UNPLUG).nth(1)?;
            let unplug = || {
                ask(&socket, &format!("unplug {ID}"), "ok Orderly")?;
                free(function)
            };
            Some(timed(&format!("given back {round}"), unplug))
        },
    )
}

/// Tells the story of a function whose driver the host unbinds while a guest has it.
pub(crate) fn requested(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    tell(
        frame,
        |machine| runner.command(machine),
        scenario,
        |line, function| line.contains(UNPLUG).then(|| timed("unbound", || unbind(function))),
    )?;
    let said = fs::read_to_string(report.join("vmm.log")).unwrap_or_default();
    frame.step("told", || told(&said));
    Ok(())
}

fn tell(
    frame: &mut Frame<'_>,
    command: impl Fn(&Machine) -> Command,
    configured: &Scenario,
    mut react: impl FnMut(&str, &str) -> Option<Check>,
) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    let [function, ..] = scenario.passed else {
        return Err(LabError::Usage(format!("{} needs a function", scenario.name)));
    };
    let machine = runner.machine(configured, report)?;
    let mut done = Vec::new();
    let boot = runner.boot_by(command(&machine), scenario, &machine, report, |line| {
        done.extend(react(line, function));
    })?;
    frame.judge(scenario.expected, &boot, "");
    frame.cases.extend(done);
    bind(function)?;
    frame.free();
    frame.no_faults("no-dma-faults");
    Ok(())
}

/// Asks the machine, and expects this answer.
fn ask(socket: &Path, question: &str, expected: &str) -> Step {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    writeln!(stream, "{question}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    if answer.trim() == expected {
        return Ok(());
    }
    Err(Fault::Untrue(format!("{question}: {}", answer.trim())))
}

/// Takes `function` from its driver; the kernel returns when its user has closed it.
fn unbind(function: &str) -> Step {
    let driver = Path::new("/sys/bus/pci/devices").join(function).join("driver");
    fs::write(driver.join("unbind"), function)?;
    if driver.exists() {
        return Err(Fault::Untrue(format!("{function} still has a driver")));
    }
    Ok(())
}

/// Gives it back to the driver that it is meant for, for those who come after.
fn bind(function: &str) -> Result<(), LabError> {
    let path = Path::new("/sys/bus/pci/drivers_probe");
    fs::write(path, function).map_err(LabError::file("write", path))
}

/// The operator reads what happened.
fn told(said: &str) -> Step {
    let missing = ["the host wants", "the host has it back"].into_iter().find(|words| !said.contains(words));
    match missing {
        None => Ok(()),
        Some(words) => Err(Fault::Untrue(format!("the VMM did not say \"{words}\": {said}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_halves_of_the_story_have_to_be_told() {
        assert!(told("the host wants 0000:01:00.0 back\nthe guest let it go: the host has it back").is_ok());
        assert!(told("the host wants 0000:01:00.0 back").is_err());
    }
}
