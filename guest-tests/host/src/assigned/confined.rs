//! Scenario of a machine that root starts for an unprivileged user: while its guest uses a slice and a host function, the process
//! has no privilege and no descriptor of the region. Afterwards its keeper scrubs the slice, and the next owner gets zeros.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use egm_guest::findings::Check;

use crate::engine::command::output;
use crate::engine::error::LabError;
use crate::hosts::extent::Extent;
use crate::hosts::functions;
use crate::hosts::parts::Plan;
use crate::runner::steps::{Fault, Step, Steps, timed};
use crate::slices::grant;
use crate::slices::host_words;

/// The user that the machine becomes.
pub(crate) const NAME: &str = "tenant";
pub(crate) const UID: u32 = 1000;

/// Printed by the agent's check `hotplug` when it waits for its drive to go.
const UNPLUG: &str = "egm-hotplug unplug ";
/// Begins the line that the agent prints when it runs as init.
const STARTED: &str = "egm-guest runs";

pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    add_user()?;
    let Steps { runner, scenario, region, report, .. } = *steps;
    let machine = runner.machine(scenario, report)?;
    let plan = machine.plan.as_ref();
    let slice = plan.and_then(Plan::slice_in_region);
    let mut command = runner.command(&machine);
    command.args(["--user", NAME]);
    let mut seen: Vec<Check> = Vec::new();
    let boot = runner.boot_by(command, scenario, &machine, report, |line| {
        if seen.is_empty() && line.contains(STARTED) {
            seen.push(timed("confined", is_confined));
        }
        if line.contains(UNPLUG) {
            seen.extend(scenario.assigned.first().map(|drive| timed("taken back", || take_back(drive))));
        }
    })?;
    let is_checked = !seen.is_empty();
    steps.judge(scenario.expected, &boot, "");
    steps.cases.append(&mut seen);
    steps.step("looked at", || match is_checked {
        true => Ok(()),
        false => Err("the guest did not print that it started".into()),
    });
    steps.step("clean", || is_clean(&runner.tools.device, region, slice));
    steps.step("returned", || host_words::zeros(plan.and_then(Plan::slice)));
    steps.step("next owner", || grant::next_finds_zeros(runner, region, scenario.slice_test.slice()));
    for function in scenario.assigned {
        functions::bind(function, "vfio-pci")?;
    }
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// Adds [`NAME`] to the users of the emulated host, which has none.
pub(crate) fn add_user() -> Result<(), LabError> {
    for (file, line) in [
        ("/etc/passwd", format!("{NAME}:x:{UID}:{UID}::/:/bin/sh\n")),
        ("/etc/group", format!("{NAME}:x:{UID}:\n")),
    ] {
        let mut text = fs::read_to_string(file).unwrap_or_default(); // an emulated host has no such file
        if !text.contains(&line) {
            text.push_str(&line);
            fs::write(file, text).map_err(LabError::file("write", file))?;
        }
    }
    Ok(())
}

/// Processes of the VMM.
pub(crate) fn machines() -> Result<Vec<i32>, Fault> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let program = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if program.file_name().is_some_and(|name| name == "egm-vmm") {
            found.push(entry.file_name().to_string_lossy().parse()?);
        }
    }
    Ok(found)
}

/// Folder of a process below `/proc`.
pub(crate) fn folder(process: i32) -> PathBuf {
    format!("/proc/{process}").into()
}

/// One process runs the guest: every thread is the user's, without capabilities, and no descriptor is of a region.
fn is_confined() -> Step {
    let mut confined = 0;
    for process in machines()?.into_iter().map(folder) {
        // Root's process, which has the locks, has no memory of the guest.
        if !has_guest(&process)? {
            continue;
        }
        confined += 1;
        for thread in fs::read_dir(process.join("task"))? {
            no_privilege(&fs::read_to_string(thread?.path().join("status"))?)?;
        }
        for descriptor in fs::read_dir(process.join("fd"))?.flatten() {
            let target = fs::read_link(descriptor.path()).unwrap_or_default();
            let is_region = ["/dev/mem", "/dev/egm", "/dev/dax", "/run/egm-device", "/var/lib/egm-device"];
            if is_region.iter().any(|path| target.to_string_lossy().starts_with(path)) {
                return Err(Fault::Untrue(format!("the machine has a descriptor of {}", target.display())));
            }
        }
    }
    match confined {
        1 => Ok(()),
        count => Err(Fault::Untrue(format!("{count} processes have a guest, expected 1"))),
    }
}

/// Whether a process has a vCPU.
fn has_guest(process: &Path) -> Result<bool, Fault> {
    let links =
        fs::read_dir(process.join("fd"))?.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    Ok(links.into_iter().any(|target| target.to_string_lossy().starts_with("anon_inode:kvm-vcpu")))
}

fn no_privilege(status: &str) -> Step {
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let ids = [UID; 4].map(|id| id.to_string()).join(" ");
    let none = "0".repeat(16);
    let expected = [("Uid", &ids), ("Gid", &ids), ("CapPrm", &none), ("CapEff", &none), ("CapAmb", &none)];
    for (name, expected) in expected {
        if value(name) != **expected {
            return Err(Fault::Untrue(format!("{name} is {}, expected {expected}", value(name))));
        }
    }
    match value("Groups").split(' ').all(|group| group != "0") && value("NoNewPrivs") == "1" {
        true => Ok(()),
        false => Err(Fault::Untrue(format!("a thread keeps root's group or may gain privileges: {status}"))),
    }
}

/// Takes `function` from the running machine for the host; the kernel returns once the machine has closed it.
fn take_back(function: &str) -> Step {
    functions::unbind(function)?;
    let driver = Path::new("/sys/bus/pci/devices").join(function).join("driver");
    if driver.exists() { Err(Fault::Untrue(format!("{function} still has a driver"))) } else { Ok(()) }
}

/// The ledger records `slice` of `region` clean and of no owner.
fn is_clean(device: &Path, region: &str, slice: Option<Extent>) -> Step {
    let states = states(device, region)?;
    let slice = slice.ok_or("the plan has no slice")?;
    let overlaps = |span| Extent::of_span(span).is_none_or(|extent| extent.overlaps(slice));
    let dirty = states["dirty"].as_array().into_iter().flatten();
    let held = states["held"].as_array().into_iter().flatten().map(|held| &held["span"]);
    match dirty.chain(held).any(overlaps) {
        false => Ok(()),
        true => Err(Fault::Untrue(format!("the slice, {slice}, is not clean: {states}"))),
    }
}

/// The ledger's record of `region`.
pub(crate) fn states(device: &Path, region: &str) -> Result<serde_json::Value, Fault> {
    let output = output(Command::new(device).args(["ledger", "show", "--json"]))?;
    let all: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
    let here = all.into_iter().find(|states| states["region"] == region);
    Ok(here.ok_or_else(|| format!("the ledger does not show region {region}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_with_a_privilege_is_found() {
        let status = "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t1000 \n\
            CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\n";
        assert!(no_privilege(status).is_ok());
        for (from, to) in [
            ("Uid:\t1000", "Uid:\t0"),
            ("Groups:\t", "Groups:\t0 "),
            ("Eff:\t0", "Eff:\t1"),
            ("Privs:\t1", "Privs:\t0"),
        ] {
            assert!(no_privilege(&status.replace(from, to)).is_err(), "{to}");
        }
    }
}
