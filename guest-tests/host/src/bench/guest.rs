//! A stock kernel in the emulated host: time and VM exits until its init, under egm-vmm and under QEMU with KVM.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::figures::{Report, Row, Summary, Target};
use super::launch::Launched;
use crate::cache::Cache;
use crate::command::Tool;
use crate::error::LabError;
use crate::initramfs;
use crate::l1;
use crate::tools::Tools;

/// What the emulated host leaves in the shared directory.
pub(super) const RESULTS: &str = "guest.json";

const MIB: u64 = 512;
const ROUNDS: usize = 3;
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
    let results = share.join(RESULTS);
    l1::remove(&results)?;
    l1::boot(&cache, &share, &["bench", "--within", "/run/tools", "--report", "/share"], L1_SILENCE)?;
    let json = fs::read(&results).map_err(|_| LabError::Content {
        what: "the emulated host".into(),
        problem: format!("it left no figures: see {}", share.join(l1::LOG).display()),
    })?;
    serde_json::from_slice(&json)
        .map_err(|error| LabError::Content { what: RESULTS.into(), problem: error.to_string() })
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

/// In the emulated host: measures with what [`run`] put into `tools`.
pub(super) fn within(tools: &Path, logs: &Path) -> Result<Report, LabError> {
    let mut report = Report::default();
    let (ours, theirs) = boot_both(tools, logs, QUIET, &mut report)?;
    let time = |name, ours: &Boots, theirs: &Boots| {
        let row = Row::new(name, "s", Summary::of(&ours.seconds)?);
        Some(row.beside(PEER, Summary::of(&theirs.seconds)))
    };
    let quiet = time("stock kernel until init, in the lab", &ours, &theirs);
    report.rows.extend(quiet.map(|row| row.should(Target::AtMost(10.0))));
    for ((_, name), (ours, theirs)) in EXITS.iter().zip(ours.exits.iter().zip(&theirs.exits)) {
        let exits = Summary::of(ours).map(|exits| Row::new(*name, "", exits));
        report.rows.extend(exits.map(|row| row.beside(PEER, Summary::of(theirs))));
    }
    let (ours, theirs) = boot_both(tools, logs, VERBOSE, &mut report)?;
    report.rows.extend(time("the same with all its messages", &ours, &theirs));
    Ok(report)
}

/// Boots a kernel with `words` on its command line under both VMMs, in turn; without QEMU under ours, and says so once.
fn boot_both(
    tools: &Path,
    logs: &Path,
    words: &str,
    report: &mut Report,
) -> Result<(Boots, Boots), LabError> {
    let config = tools.join("bench.json");
    let programs = Tools::copied(tools);
    let (kernel, initramfs) = (programs.kernel.image(), tools.join(INITRAMFS));
    let json = serde_json::json!({
        "memory": { "size": format!("{MIB}MiB") },
        "boot": { "kernel": kernel, "initramfs": initramfs, "cmdline": words },
        "console": "stdio",
    });
    fs::write(&config, json.to_string()).map_err(LabError::file("write", &config))?;
    let (mut ours, mut theirs) = (Boots::default(), Boots::default());
    for _ in 0..ROUNDS {
        let mut egm = Command::new(&programs.vmm);
        egm.arg("run").arg(&config);
        ours.boot(egm, logs)?;
        if tools.join(QEMU).exists()
            && report.skipped.is_empty()
            && let Err(error) = theirs.boot(qemu(&tools.join(QEMU), &kernel, &initramfs, words), logs)
        {
            report.skipped.push(format!("QEMU in the emulated host: {}", crate::run::chain(&error)));
        }
    }
    Ok((ours, theirs))
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
#[derive(Debug, Default)]
struct Boots {
    seconds: Vec<f64>,
    /// In the order of [`EXITS`].
    exits: [Vec<f64>; EXITS.len()],
}

impl Boots {
    fn boot(&mut self, command: Command, logs: &Path) -> Result<(), LabError> {
        let launched = Launched::start(command, MARK, DEADLINE, &logs.join("stderr.log"))?;
        self.seconds.push(launched.elapsed.as_secs_f64());
        if let Some(machine) = machine(launched.id()) {
            for ((file, _), samples) in EXITS.iter().zip(&mut self.exits) {
                samples.extend(count(&machine.join(file)));
            }
        }
        Ok(())
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
