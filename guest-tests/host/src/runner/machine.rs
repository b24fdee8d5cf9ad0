//! Boots the machines of scenarios on this machine, be it real or emulated.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use egm_guest::findings::{Check, Line, MAX_LINES};
use serde_json::json;

use crate::engine::boot::Boot;
use crate::engine::command::Tool;
use crate::engine::disk;
use crate::engine::error::LabError;
use crate::engine::judge::{Collected, case};
use crate::engine::logs::{CONSOLE, VMM_LOG};
use crate::engine::process::{Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::engine::step::millis;
use crate::hosts::parts::{GUEST, HOST, HostParts, PORT, Plan};
use crate::hosts::qemu;
use crate::images::initramfs;
use crate::images::tools::Tools;
use crate::runner::machine_file;
use crate::skips::Skips;

/// The VMM prints this at the end of a machine after a kernel panic.
pub(crate) const PANICKED: &str = "the guest's kernel panicked";

/// The kernel prints this when it starts init; where the kernel is quiet, init prints it.
pub(crate) const INIT: &str = " as init process";

/// The monitor that runs the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Vmm {
    /// egm-vmm, which needs /dev/kvm.
    Egm,
    /// QEMU without acceleration, with its own exit codes.
    Qemu,
}

/// Boots machines with the same tools.
#[derive(Debug)]
pub(crate) struct Runner {
    /// Programs and images for the runs.
    pub(crate) tools: Tools,
    /// The monitor that runs the guest.
    pub(crate) vmm: Vmm,
    /// Folder for files of a running machine, on a file system with Unix sockets.
    pub(crate) work: PathBuf,
    /// Folder for logs, with a directory for each scenario.
    pub(crate) report: PathBuf,
    /// Whether this machine is the lab's emulated host.
    pub(crate) in_lab: bool,
    /// The skips that are allowed.
    pub(crate) skips: Skips,
    /// Options of the run, which decide on skips.
    pub(crate) options: Vec<String>,
}

/// The files of one scenario's machine.
#[derive(Debug)]
pub(crate) struct Machine {
    config: PathBuf,
    initramfs: PathBuf,
    cmdline: String,
    /// Its plan, when it is ours.
    pub(crate) plan: Option<Plan>,
}

impl Machine {
    pub(crate) fn config(&self) -> &Path {
        &self.config
    }
}

impl Runner {
    /// Writes the configuration, gets its plan, and packs the guest's initial root with the plan.
    pub(crate) fn machine(&self, scenario: &Scenario, report: &Path) -> Result<Machine, LabError> {
        let work = self.work.join(scenario.name);
        fs::create_dir_all(&work).map_err(LabError::file("make", &work))?;
        let (config, initramfs) = (work.join("config.json"), work.join("initramfs.cpio"));
        let console = if scenario.grace { "ttyAMA0" } else { "ttyS0" };
        let cmdline = format!(
            "console={console} panic=-1 nokaslr egm.arg.net.peer={HOST} egm.arg.net.port={PORT} egm.arg.net.addr={GUEST}/24 \
             egm.arg.vsock.port={PORT} egm.arg.blk.signature={} {} {}",
            disk::SIGNATURE,
            scenario.words,
            scenario.end
        );
        let kernel = self.tools.kernel_for(scenario);
        let boot = json!({ "kernel": kernel.image(), "initramfs": initramfs, "cmdline": cmdline.trim_end() });
        let json = machine_file::of(scenario, &self.tools.configs, boot);
        fs::write(&config, json.to_string()).map_err(LabError::file("write", &config))?;
        let facts = self.facts(scenario, report)?;
        let mut arguments = vec!["plan".as_ref(), config.as_os_str(), "--json".as_ref()];
        arguments.extend(facts.iter().flat_map(|facts| ["--facts".as_ref(), facts.as_os_str()]));
        let planned = Tool::new(&self.tools.vmm.to_string_lossy(), "egm-vmm").args(arguments).bytes();
        let plan = match (planned, self.vmm) {
            (Ok(json), _) => Some(json),
            (Err(_), Vmm::Qemu) => None,
            (Err(error), Vmm::Egm) => return Err(error),
        };
        if let Some(json) = &plan {
            let path = report.join("plan.json");
            fs::write(&path, json).map_err(LabError::file("write", path))?;
        }
        let bytes = if scenario.debian {
            initramfs::handover(kernel)?
        } else {
            let kit = self.tools.kit(scenario);
            initramfs::guest_with(&self.tools.agent, plan.as_deref(), kernel, kit)?
        };
        fs::write(&initramfs, bytes).map_err(LabError::file("write", &initramfs))?;
        let plan = plan.as_deref().map(Plan::read).transpose()?;
        Ok(Machine { config, initramfs, cmdline, plan })
    }

    /// This host's facts with those of the scenario's servers, which a plan does not query.
    fn facts(&self, scenario: &Scenario, report: &Path) -> Result<Option<PathBuf>, LabError> {
        if scenario.servers.is_empty() {
            return Ok(None);
        }
        let path = report.join("facts.json");
        let servers = scenario.servers.iter().flat_map(|socket| ["--server", socket]);
        let facts = Tool::new(&self.tools.vmm.to_string_lossy(), "egm-vmm")
            .args(std::iter::once("facts").chain(servers))
            .bytes()?;
        fs::write(&path, facts).map_err(LabError::file("write", &path))?;
        Ok(Some(path))
    }

    /// Boots `machine` and watches it to its end.
    pub(crate) fn boot(
        &self,
        scenario: &Scenario,
        machine: &Machine,
        report: &Path,
    ) -> Result<Boot, LabError> {
        self.boot_watched(scenario, machine, report, &mut |_| {})
    }

    /// Like [`Self::boot`]; `on_line` receives every line of the guest's console.
    pub(crate) fn boot_watched(
        &self,
        scenario: &Scenario,
        machine: &Machine,
        report: &Path,
        on_line: &mut dyn FnMut(&str),
    ) -> Result<Boot, LabError> {
        self.boot_by(self.command(machine), scenario, machine, report, on_line)
    }

    /// The same by `command`; `on_line` gets every line of the guest's console.
    pub(crate) fn boot_by(
        &self,
        command: Command,
        scenario: &Scenario,
        machine: &Machine,
        report: &Path,
        mut on_line: impl FnMut(&str),
    ) -> Result<Boot, LabError> {
        let image = self.tools.root.as_deref().filter(|_| scenario.debian);
        let _parts = HostParts::make(machine.plan.iter().flat_map(Plan::parts), image)?;
        let begun = Instant::now();
        let (mut lines, mut init, mut signalled, mut flushed) = (Vec::new(), None, false, None);
        let (console, log) = (report.join(CONSOLE), report.join(VMM_LOG));
        let ending = watch(command, Limit::Total(scenario.deadline), &console, &log, |text| {
            if init.is_none() && text.contains(INIT) {
                init = Some(millis(begun));
            }
            flushed = disk::announced(text).or(flushed);
            on_line(text);
            lines.extend(Line::parse(text).filter(|_| lines.len() < MAX_LINES));
            if scenario.terminate_on.is_some_and(|mark| text.contains(mark)) {
                signalled = true;
                return Reaction::Terminate;
            }
            if scenario.press_on.is_some_and(|mark| text.contains(mark)) {
                return Reaction::Press;
            }
            Reaction::Go
        })?;
        let collected = Collected { lines, ending, millis: millis(begun) };
        let disk = scenario.disk.map(|proof| match machine.plan.as_ref().and_then(Plan::disk) {
            Some(path) => disk::fault(proof, path, flushed),
            None => Some("the plan has no disk".into()),
        });
        Ok(Boot { signalled, disk, ..Boot::of(collected, init) })
    }

    /// The command that starts `machine`.
    pub(crate) fn command(&self, machine: &Machine) -> Command {
        match self.vmm {
            Vmm::Egm => self.tools.run(&machine.config),
            Vmm::Qemu => {
                let mut command = Command::new("qemu-system-x86_64");
                let kernel = self.tools.kernel.image();
                let plan = machine.plan.as_ref();
                command.args(qemu::reference(plan, &kernel, &machine.initramfs, &machine.cmdline));
                command
            }
        }
    }
}

/// A figure, not a claim: how long the guest's kernel took.
pub(crate) fn init_case(millis: u64) -> Check {
    #[expect(clippy::cast_precision_loss, reason = "a deadline of hours in milliseconds is far below 2^52")]
    let seconds = millis as f64 / 1000.0;
    Check { value: Some(seconds), unit: Some("s until init".into()), ..case("start", None, millis) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn every_init_prints_the_line_that_a_quiet_kernel_does_not() {
        let prints = |text: &str, print: &str| text.lines().any(|l| l.contains(print) && l.contains(INIT));
        assert!(prints(include_str!("../images/root-init.sh"), "echo "));
        assert!(prints(include_str!("../../../agent/src/init.rs"), "println!("));
    }

    /// A runner that has nothing.
    pub(crate) fn nowhere() -> Runner {
        let path = || PathBuf::from("/nonexistent");
        let kernel = crate::images::kernel::StockKernel { directory: path() };
        let tools = Tools::within(&path(), path(), kernel);
        Runner {
            tools,
            vmm: Vmm::Egm,
            work: path(),
            report: path(),
            in_lab: false,
            skips: Skips::read().unwrap(),
            options: Vec::new(),
        }
    }
}
