//! Scenario: under a guest that uses disk and network, a machine is upgraded three times, saved and resumed.
//!
//! ```text
//!  create, boot ─► guest: ready ─► upgrade, three times ─► pause, snapshot, resume ─► the disk gets a text
//!    ─► guest: reads the text, further checks
//! ```

use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::io::{FdFlags, fcntl_setfd};

use super::snapshot::{READY, TEXT};
use crate::engine::disk;
use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::parts::Plan;
use crate::runner::control::Control;
use crate::runner::machine::{Machine, Runner};
use crate::runner::steps::{Fault, Step, Steps};

const UPGRADES: usize = 3;

/// Runs the scenario: one boot, in four executions of the program.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let machine = runner.machine(scenario, report)?;
    let image = machine.plan.as_ref().and_then(Plan::disk);
    let image = image.ok_or_else(|| LabError::Usage(format!("{} has no disk", scenario.name)))?;
    let control = Control::of(runner, scenario);
    let (command, listener) = command(runner, scenario, &control)?;
    let folder = runner.work.join(scenario.name).join("saved");
    let _ = std::fs::remove_dir_all(&folder); // of an earlier run
    let (mut upgraded, mut saved): (Option<Step>, Option<Step>) = (None, None);
    let (boot, booted) = thread::scope(|scope| {
        // The requests wait in the socket until the program accepts them.
        let booting = scope.spawn(|| control.boot(&machine));
        let boot = runner.boot_by(command, scenario, &machine, report, |line| {
            if line.contains(READY) && upgraded.is_none() {
                upgraded = Some((0..UPGRADES).try_for_each(|_| control.upgrade()));
                let signed = control.save_and_resume(&folder).and_then(|()| Ok(disk::sign(image, TEXT)?));
                saved = Some(signed);
            }
        });
        drop(listener); // a request that waits there fails
        (boot, booting.join())
    });
    steps.step("booted", || booted.unwrap_or_else(|_| Err(Fault::Untrue("a request panicked".to_owned()))));
    for (name, step) in [("upgraded", upgraded), ("saved", saved)] {
        steps.step(name, || {
            step.unwrap_or_else(|| Err(Fault::Untrue(format!("the guest did not print \"{READY}\""))))
        });
    }
    steps.judge(scenario.expected, &boot?, "");
    Ok(())
}

/// A command that serves one machine and ends with its guest, and its listening socket.
fn command(
    runner: &Runner,
    scenario: &Scenario,
    control: &Control,
) -> Result<(Command, UnixListener), LabError> {
    let program = runner.work.join(scenario.name).join("cloud-hypervisor");
    let _ = std::fs::remove_file(&program);
    symlink(&runner.tools.vmm, &program).map_err(LabError::file("make", &program))?;
    let socket = control.socket();
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).map_err(LabError::file("listen on", socket))?;
    fcntl_setfd(&listener, FdFlags::empty()).map_err(|e| LabError::file("pass", socket)(e.into()))?;
    let mut command = Command::new(program);
    command.arg("--api-socket").arg(format!("fd={}", listener.as_raw_fd()));
    Ok((command, listener))
}

impl Control {
    fn boot(&self, machine: &Machine) -> Step {
        self.ask(&["create", &machine.config().to_string_lossy()])?;
        self.ask(&["boot"])?;
        Ok(())
    }

    fn save_and_resume(&self, folder: &Path) -> Step {
        self.ask(&["pause"])?;
        self.ask(&["snapshot", &folder.to_string_lossy()])?;
        self.ask(&["resume"])?;
        Ok(())
    }

    fn upgrade(&self) -> Step {
        self.ask(&["upgrade"])?;
        Ok(())
    }
}
