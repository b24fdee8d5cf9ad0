//! Access of this host to the functions of a machine: a machine without Linux holds them, and the lab writes and reads
//! their registers through their BARs in sysfs.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use egm_fixtures::payload::Ports;

use crate::assigned::payload::{devices, payload};
use crate::engine::error::chain;
use crate::engine::logs;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::hosts::physical::Physical;
use crate::runner::machine::Runner;
use crate::runner::steps::{Fault, Step};

/// The guest prints this when it runs.
const READY: &str = "ready";
/// Bits of the command register (PCI Local Bus 3.0 §6.2.2): it decodes memory, it may reach memory by itself.
pub(crate) const DECODE: u8 = 1 << 1;
pub(crate) const MASTER: u8 = 1 << 2;

/// The page with `offset` of a BAR of `function`. The function is awake from now on and has the bits `command`, whether
/// or not a process has it open.
pub(crate) fn page(function: &str, bar: u8, offset: u64, command: u8) -> Result<Physical, Fault> {
    const COMMAND: u64 = 4;
    let folder = Path::new("/sys/bus/pci/devices").join(function);
    let both = |name: &str| File::options().read(true).write(true).open(folder.join(name));
    let power = folder.join("power/control"); // a kernel without power management has none, and all are awake
    if power.exists() {
        fs::write(power, "on")?;
    }
    let config = both("config")?;
    let mut low = [0];
    config.read_exact_at(&mut low, COMMAND)?;
    config.write_all_at(&low.map(|low| low | command), COMMAND)?;
    Ok(Physical::map_writable(&both(&format!("resource{bar}"))?, offset & !0xfff, 0x1000)?)
}

/// Runs a machine with `functions`, calls `look` while its guest runs, and kills it. Returns the VMM's log. The logs
/// are in `report`, or below it if that has those of an earlier machine.
pub(crate) fn with(
    runner: &Runner,
    scenario: &Scenario,
    report: &Path,
    functions: &[&str],
    look: impl Fn() -> Step,
) -> Result<String, Fault> {
    let config =
        payload(runner, scenario, "held", &egm_fixtures::payload::halt(Ports::USUAL), devices(functions));
    let command = runner.tools.run(&config.map_err(|error| chain(&error))?);
    let folder = logs::of_next_boot(report).map_err(|error| chain(&error))?;
    let (console, log) = (folder.join(logs::CONSOLE), folder.join(logs::VMM_LOG));
    let mut seen = None;
    let ending = watch(command, Limit::Total(scenario.deadline), &console, &log, |line| {
        if !line.contains(READY) {
            return Reaction::Go;
        }
        seen = Some(look());
        Reaction::Kill
    });
    let ending = ending.map_err(|error| chain(&error))?;
    let said = fs::read_to_string(log)?;
    match (seen, ending) {
        (Some(looked), Ending::Signal(9)) => looked.map(|()| said),
        (seen, ending) => {
            Err(Fault::Untrue(format!("{ending:?}, and the guest ran: {}; {said}", seen.is_some())))
        }
    }
}
