//! A stock kernel in the emulated host: time and VM exits until its init, under egm-vmm and under QEMU with KVM. Each time
//! in a host that was just booted, because later guests of one emulated host take longer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::figures::{Report, Row, Summary, Target};
use super::launch::Launched;
use crate::cache::Cache;
use crate::command::Tool;
use crate::error::LabError;
use crate::initramfs;
use crate::l1;
use crate::progress::Stage;
use crate::tools::Tools;

/// What the emulated host leaves in the shared directory.
pub(super) const RESULTS: &str = "guest.json";

const MIB: u64 = 512;
const ROUNDS: usize = 3;
/// How often an emulated host may end without figures.
const ATTEMPTS: usize = 3;
/// Time for one boot, under emulation.
const DEADLINE: Duration = Duration::from_secs(120);
/// The emulated host says nothing while it measures.
const L1_SILENCE: Duration = Duration::from_secs(900);
/// What the guest's init says first.
const MARK: &str = "egm-bench: init";
/// A console that is quiet until then.
const QUIET: &str = "console=ttyS0 quiet panic=-1";
/// One with all 19 KB of the kernel's messages.
const VERBOSE: &str = "console=ttyS0 panic=-1";
const PEER: &str = "QEMU q35, KVM";
/// KVM's counters that are shown, by file name.
const EXITS: [(&str, &str); 6] = [
    ("exits", "VM exits until init, in the lab"),
    ("io_exits", "of them for a port"),
    ("mmio_exits", "of them for a device's memory"),
    ("irq_exits", "of them for the host's interrupts"),
    ("halt_exits", "of them because the guest waits"),
    ("pf_taken", "of them for memory that is not mapped yet"),
];
/// The guest's initial root among the tools.
const INITRAMFS: &str = "init.cpio";
/// Where QEMU is among the tools, with the libraries and the firmware that it needs.
const QEMU: &str = "qemu";
const QEMU_PROGRAM: &str = "/usr/bin/qemu-system-x86_64";
const LOADER: &str = "ld-linux-x86-64.so.2";
const FIRMWARE: [&str; 3] =
    ["/usr/share/seabios/bios-256k.bin", "/usr/share/qemu/linuxboot_dma.bin", "/usr/share/qemu/kvmvapic.bin"];

/// Boots the emulated host, lets it measure, and takes its figures.
pub(super) fn run(directory: &Path) -> Result<Report, LabError> {
    let cache = Cache::open()?;
    let share = directory.join("lab");
    let tools = share.join("tools");
    Tools::of_checkout(&cache)?.copy_to(&tools)?;
    let init = format!("#!/bin/sh\necho '{MARK}'\nwhile :; do sleep 1000; done\n");
    let path = tools.join(INITRAMFS);
    fs::write(&path, initramfs::script(&init)?).map_err(LabError::file("write", path))?;
    if super::qemu_is_here() {
        copy_qemu(&tools.join(QEMU))?;
    }
    let mut report = Report::default();
    let (mut ours, mut theirs) = (Boots::default(), Boots::default());
    for _ in 0..ROUNDS {
        ours.add(boot_l1(&cache, &share, &[])?);
        if tools.join(QEMU).exists() && report.skipped.is_empty() {
            match boot_l1(&cache, &share, &["--peer"]) {
                Ok(boots) => theirs.add(boots),
                Err(error) => {
                    report.skipped.push(format!("QEMU in the emulated host: {}", crate::run::chain(&error)));
                }
            }
        }
    }
    report.rows = rows(&ours, &theirs);
    Ok(report)
}

/// Boots the emulated host, lets it measure one VMM, and takes what it found. One that stumbles is booted again.
fn boot_l1(cache: &Cache, share: &Path, words: &[&str]) -> Result<Boots, LabError> {
    let results = share.join(RESULTS);
    let arguments = [&["bench", "--within", "/run/tools", "--report", "/share"], words].concat();
    for attempt in 1..=ATTEMPTS {
        l1::remove(&results)?;
        l1::boot(cache, share, &arguments, L1_SILENCE)?;
        if let Ok(json) = fs::read(&results) {
            return serde_json::from_slice(&json)
                .map_err(|error| LabError::Content { what: RESULTS.into(), problem: error.to_string() });
        }
        Stage::note(&format!("the emulated host left no figures: attempt {attempt} of {ATTEMPTS}"));
    }
    let problem = format!("it left no figures: see {}", share.join(l1::LOG).display());
    Err(LabError::Content { what: "the emulated host".into(), problem })
}

fn rows(ours: &Boots, theirs: &Boots) -> Vec<Row> {
    let row = |name, unit, ours: &[f64], theirs: &[f64]| {
        Some(Row::new(name, unit, Summary::of(ours)?).beside(PEER, Summary::of(theirs)))
    };
    let quiet = row("stock kernel until init, in the lab", "s", &ours.quiet, &theirs.quiet);
    let exits = EXITS.iter().zip(ours.exits.iter().zip(&theirs.exits));
    let exits = exits.filter_map(|((_, name), (ours, theirs))| row(name, "", ours, theirs));
    let verbose = row("the same with all its messages, next", "s", &ours.verbose, &theirs.verbose);
    quiet.map(|row| row.should(Target::AtMost(10.0))).into_iter().chain(exits).chain(verbose).collect()
}

/// QEMU, its libraries, and the firmware of a q35 machine.
fn copy_qemu(to: &Path) -> Result<(), LabError> {
    let libraries = Tool::new("ldd", "libc-bin").args([QEMU_PROGRAM]).text()?;
    let libraries = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    fs::create_dir_all(to).map_err(LabError::file("make", to))?;
    for file in libraries.chain(FIRMWARE).chain([QEMU_PROGRAM]) {
        let target = to.join(Path::new(file).file_name().unwrap_or_default());
        fs::copy(file, &target).map_err(LabError::file("copy", file))?;
    }
    Ok(())
}

/// In the emulated host: boots with what [`run`] put into `tools`, under QEMU when `peer`, a quiet kernel and then a
/// verbose one.
pub(super) fn within(tools: &Path, logs: &Path, peer: bool) -> Result<Boots, LabError> {
    let config = tools.join("bench.json");
    let programs = Tools::copied(tools);
    let (kernel, initramfs) = (programs.kernel.image(), tools.join(INITRAMFS));
    let command = |words: &str| {
        if peer {
            return Ok(qemu(&tools.join(QEMU), &kernel, &initramfs, words));
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
        for ((file, _), samples) in EXITS.iter().zip(&mut boots.exits) {
            samples.extend(count(&machine.join(file)));
        }
    }
    drop(quiet);
    boots.verbose.push(start(VERBOSE)?.elapsed.as_secs_f64());
    Ok(boots)
}

fn qemu(directory: &Path, kernel: &Path, initramfs: &Path, cmdline: &str) -> Command {
    let mut command = Command::new(directory.join(LOADER));
    command.arg("--library-path").arg(directory).arg(directory.join("qemu-system-x86_64"));
    let words = format!(
        "-accel kvm -machine q35 -cpu max -smp 1 -m {MIB} -display none -nodefaults -no-reboot -serial stdio"
    );
    command.args(words.split_whitespace()).arg("-L").arg(directory);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs).args(["-append", cmdline]);
    command
}

/// What the boots of one VMM came to.
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
