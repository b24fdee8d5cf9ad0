//! A slice in an unmodified peer, with the machine that `egm-vmm export` writes: Debian's newest QEMU on this
//! machine, and cloud-hypervisor, if the user provides it, on a host with a KVM that runs stock kernels.
//!
//! ```text
//!  server 1 ── first    a guest checks the slice, is reset, checks it again; a second slice is plugged in and out
//!           └─ wanted   finds the bytes of the first; the owner requests it, the guest returns it, the server ends well
//!  server 2 ── lost     finds zeros; the server is killed, the guest goes on
//!  server 3 ── taken    QEMU: finds zeros; the guest does not return it, the owner takes it: QEMU stops the guest
//!  server 4 ── back     finds zeros, at the socket that the dead one left; then `egm-guest list` and `test`
//! ```
//! The guest keeps the count of its checks in the slice itself, and the host reads it there. cloud-hypervisor connects
//! no error interrupt, so it does not stop a guest when the owner takes the slice.

use std::process::Command;

use serde_json::json;

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::peer_program::PeerName;
use crate::peers::guest::{CHECK, Machine, boot, ended, holds_checks, nothing_granted, seen_before, words};
use crate::peers::monitor::{CloudHypervisor, Monitor, Qemu};
use crate::peers::parts::{Parts, SIZE};
use crate::runner::steps::{Steps, timed};

const FIRST: Machine = Machine::whole("first", &[CHECK, "egm_plugged"], 1);
const WANTED: Machine = Machine::whole("wanted", &[CHECK, "egm_wanted"], 2);
const LOST: Machine = Machine::whole("lost", &[CHECK, "egm_lost"], 0);
const TAKEN: Machine = Machine {
    expected: Expected { exit: 0, summary: false, checks: &[CHECK] },
    ..Machine::whole("taken", LOST.checks, 0)
};
const BACK: Machine = Machine::whole("back", &[CHECK, "egm_commands"], 0);

/// Runs the scenario with QEMU.
pub(crate) fn run_qemu(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let runner = steps.runner;
    let Some(emulator) = &runner.tools.emulator else {
        steps.skip("Debian's QEMU is unavailable here");
        return Ok(());
    };
    let parts = Parts::make(runner, "qemu", runner.work.join(steps.scenario.name))?;
    let qemu = Qemu { parts: &parts, emulator };
    kept(steps, &parts, &qemu)?;
    killed(steps, &parts, &qemu)?;
    taken(steps, &parts, &qemu)?;
    served_again(steps, &parts, &qemu)
}

/// Runs the scenario with cloud-hypervisor.
pub(crate) fn run_cloud_hypervisor(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let runner = steps.runner;
    let Some(program) = &runner.tools.cloud_hypervisor else {
        steps.skip(&PeerName::CloudHypervisor.absent());
        return Ok(());
    };
    let name = PeerName::CloudHypervisor.name();
    let parts = Parts::make(runner, name, runner.work.join(steps.scenario.name))?;
    let monitor = CloudHypervisor { parts: &parts, program };
    kept(steps, &parts, &monitor)?;
    killed(steps, &parts, &monitor)?;
    served_again(steps, &parts, &monitor)
}

/// The command that starts `machine`.
fn start<M: Monitor>(monitor: &M, machine: &Machine) -> Result<Command, LabError> {
    monitor.command(&format!("{} {}", words(machine), M::WORDS))
}

/// One server keeps the bytes through a reset and for a second machine, and that machine's guest returns the slice.
fn kept(steps: &mut Steps<'_>, parts: &Parts<'_>, monitor: &impl Monitor) -> Result<(), LabError> {
    let mut server = parts.serve()?;
    let spare = parts.serve_spare()?;
    first(steps, monitor)?;
    steps.step("the host sees the guest's bytes", || holds_checks(&server.memory(SIZE)?, 2));
    drop(spare);
    boot(steps, &WANTED, start(monitor, &WANTED)?, |event, _| {
        (event == "want")
            .then(|| timed("the owner requests it", || Ok(server.request_slice()?)))
            .into_iter()
            .collect()
    })?;
    steps.step("the server ends well", || ended(server.wait()?));
    steps.step("the slice is returned", || nothing_granted(parts));
    Ok(())
}

/// The first machine: it is reset after its first check, and gets another slice after the second.
fn first(steps: &mut Steps<'_>, monitor: &impl Monitor) -> Result<(), LabError> {
    let mut reset = false;
    boot(steps, &FIRST, start(monitor, &FIRST)?, |event, lines| match event {
        "plug" if !std::mem::replace(&mut reset, true) => {
            let before = std::mem::take(lines);
            vec![
                timed("zeros from the server", || seen_before(&before, 0)),
                timed("reset", || Ok(monitor.reset()?)),
            ]
        }
        "plug" => vec![timed("plugged in", || Ok(monitor.plug()?))],
        "unplug" => vec![timed("unplugged", || Ok(monitor.unplug()?))],
        _ => Vec::new(),
    })
}

/// The server is killed, and the guest goes on.
fn killed(steps: &mut Steps<'_>, parts: &Parts<'_>, monitor: &impl Monitor) -> Result<(), LabError> {
    let mut server = Some(parts.serve()?);
    boot(steps, &LOST, start(monitor, &LOST)?, |event, _| {
        if event != "lost" {
            return Vec::new();
        }
        drop(server.take());
        // The guest does not use the function meanwhile; the arrival of another device signals the kill.
        vec![timed("the server is killed", || Ok(monitor.plug_another()?))]
    })
}

/// A guest that does not return its slice when the owner requests it loses it: the server signals the function's error
/// interrupt before it closes the connection, and QEMU stops the guest. (QEMU has a request interrupt, on which it
/// unplugs the function, for host functions only.)
fn taken(steps: &mut Steps<'_>, parts: &Parts<'_>, qemu: &Qemu<'_>) -> Result<(), LabError> {
    let mut server = parts.serve_for(1)?;
    boot(steps, &TAKEN, start(qemu, &TAKEN)?, |event, _| {
        if event != "lost" {
            return Vec::new();
        }
        let stopped = timed("QEMU stops a guest when its slice is taken", || {
            let mut monitor = qemu.monitor()?;
            server.request_slice()?;
            monitor.wait("STOP")?;
            Ok(monitor.execute("quit", json!({}))?)
        });
        vec![stopped, timed("the server that took it ends well", || ended(server.wait()?))]
    })
}

/// The next server is at the socket that the dead one left.
fn served_again(steps: &mut Steps<'_>, parts: &Parts<'_>, monitor: &impl Monitor) -> Result<(), LabError> {
    let mut server = parts.serve()?;
    boot(steps, &BACK, start(monitor, &BACK)?, |_, _| Vec::new())?;
    steps.step("the last server ends well", || {
        server.request_slice()?;
        ended(server.wait()?)
    });
    Ok(())
}
