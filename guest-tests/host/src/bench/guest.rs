//! A stock kernel in the emulated host: time and VM exits until its init, under egm-vmm and under QEMU with KVM. Each time
//! in a host that was just booted, because later guests of one emulated host take longer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Section;
use super::emulated::{self, EmulatedHost};
use super::figures::{Report, Row, Summary, Target};
use super::launch::Launched;
use crate::engine::error::LabError;
use crate::images::initramfs;
use crate::images::kernel;
use crate::images::tools::Tools;

const MIB: u64 = 512;
const ROUNDS: usize = 3;
/// Time for one boot, under emulation.
const DEADLINE: Duration = Duration::from_secs(120);
/// First line of the guest's init.
const MARK: &str = "egm-bench: init";
/// Kernel words for a console that is quiet until then.
const QUIET: &str = "console=ttyS0 quiet panic=-1";
/// Kernel words for a console with all 19 KB of the kernel's messages.
const VERBOSE: &str = "console=ttyS0 panic=-1";
const PEER: &str = "QEMU q35, KVM";
/// KVM's counters that are shown.
const EXITS: [Counter; 6] = [
    Counter { file: "exits", name: "VM exits until init, in the lab" },
    Counter { file: "io_exits", name: "of them for a port" },
    Counter { file: "mmio_exits", name: "of them for a device's memory" },
    Counter { file: "irq_exits", name: "of them for the host's interrupts" },
    Counter { file: "halt_exits", name: "of them because the guest waits" },
    Counter { file: "pf_taken", name: "of them for memory that is not mapped yet" },
];

/// A counter of KVM's.
struct Counter {
    /// Its file in the machine's folder.
    file: &'static str,
    /// Its name in the table.
    name: &'static str,
}

/// The guest's initial root among the tools.
const INITRAMFS: &str = "init.cpio";

/// Boots the emulated host, lets it measure, and takes its figures.
pub(super) fn run(directory: &Path) -> Result<Report, LabError> {
    let host = EmulatedHost::new(directory)?;
    let stock = kernel::l1(&host.cache, false)?;
    let init = format!("#!/bin/sh\necho '{MARK}'\nwhile :; do sleep 1000; done\n");
    let path = host.tools().join(INITRAMFS);
    fs::write(&path, initramfs::script(&init)?).map_err(LabError::file("write", path))?;
    let mut report = Report::default();
    let (mut ours, mut theirs) = (Boots::default(), Boots::default());
    for _ in 0..ROUNDS {
        ours.add(host.measure(&stock, Section::Guest, &[])?);
        if host.has_qemu() && report.skipped.is_empty() {
            match host.measure(&stock, Section::Guest, &["--qemu"]) {
                Ok(boots) => theirs.add(boots),
                Err(error) => {
                    report
                        .skipped
                        .push(format!("QEMU in the emulated host: {}", crate::engine::error::chain(&error)));
                }
            }
        }
    }
    report.rows = rows(&ours, &theirs);
    Ok(report)
}

fn rows(ours: &Boots, theirs: &Boots) -> Vec<Row> {
    let row = |name, unit, ours: &[f64], theirs: &[f64]| {
        Some(Row::new(name, unit, Summary::of(ours)?).beside(PEER, Summary::of(theirs)))
    };
    let quiet = row("stock kernel until init, in the lab", "s", &ours.quiet, &theirs.quiet);
    let exits = EXITS.iter().zip(ours.exits.iter().zip(&theirs.exits));
    let exits = exits.filter_map(|(counter, (ours, theirs))| row(counter.name, "", ours, theirs));
    let verbose = row("the same with all its messages, next", "s", &ours.verbose, &theirs.verbose);
    quiet.map(|row| row.should(Target::AtMost(10.0))).into_iter().chain(exits).chain(verbose).collect()
}

/// In the emulated host: boots with the files that [`run`] put into `tools`, under QEMU when `peer`, a quiet kernel and
/// then a verbose one.
pub(super) fn within(tools: &Path, logs: &Path, peer: bool) -> Result<Boots, LabError> {
    let config = tools.join("bench.json");
    let programs = Tools::copied(tools);
    let (kernel, initramfs) = (programs.kernel.image(), tools.join(INITRAMFS));
    let command = |words: &str| {
        if peer {
            return Ok(qemu(tools, &kernel, &initramfs, words));
        }
        let json = serde_json::json!({
            "memory": { "size": format!("{MIB}MiB") },
            "boot": { "kernel": kernel, "initramfs": initramfs, "cmdline": words },
            "console": "stdio",
        });
        fs::write(&config, json.to_string()).map_err(LabError::file("write", &config))?;
        let mut command = Command::new(&programs.vmm);
        command.arg("run").arg(&config);
        Ok(command)
    };
    let start = |words| Launched::start(command(words)?, MARK, DEADLINE, &logs.join("stderr.log"));
    let mut boots = Boots::default();
    let quiet = start(QUIET)?;
    boots.quiet.push(quiet.elapsed.as_secs_f64());
    if let Some(machine) = machine(quiet.id()) {
        for (counter, samples) in EXITS.iter().zip(&mut boots.exits) {
            samples.extend(count(&machine.join(counter.file)));
        }
    }
    drop(quiet);
    boots.verbose.push(start(VERBOSE)?.elapsed.as_secs_f64());
    Ok(boots)
}

fn qemu(tools: &Path, kernel: &Path, initramfs: &Path, cmdline: &str) -> Command {
    let mut command = emulated::qemu(tools);
    let words = format!(
        "-accel kvm -machine q35 -cpu max -smp 1 -m {MIB} -display none -nodefaults -no-reboot -serial stdio"
    );
    command.args(words.split_whitespace());
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs).args(["-append", cmdline]);
    command
}

/// Results of the boots of one VMM.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Boots {
    /// Seconds of a quiet kernel.
    quiet: Vec<f64>,
    /// Of a verbose one.
    verbose: Vec<f64>,
    /// Of the quiet one, in the order of [`EXITS`].
    exits: [Vec<f64>; EXITS.len()],
}

impl Boots {
    fn add(&mut self, more: Self) {
        self.quiet.extend(more.quiet);
        self.verbose.extend(more.verbose);
        self.exits.iter_mut().zip(more.exits).for_each(|(all, more)| all.extend(more));
    }
}

/// KVM's own counts for the machine of process `id`.
fn machine(id: u32) -> Option<PathBuf> {
    let prefix = format!("{id}-");
    let machines = fs::read_dir("/sys/kernel/debug/kvm").ok()?;
    let mut paths = machines.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)))
}

fn count(path: &Path) -> Option<f64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
