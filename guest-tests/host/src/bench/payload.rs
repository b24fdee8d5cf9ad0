//! Start and memory, with a guest of a few bytes: whatever the KVM is, it runs that one.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use egm_payload::{Entry, Ports, halt, hello};

use super::figures::{Report, Row, Summary, Target};
use super::launch::Launched;
use super::smaps::beside_guest;
use crate::error::LabError;

/// Guest memory of every VMM.
const MIB: u64 = 256;
/// Starts of each VMM that is quick, alternating.
const STARTS: usize = 25;
/// Starts of QEMU's large machine, whose firmware KVM may have to emulate: seconds each.
const SLOW_STARTS: usize = 3;
/// Looks at each VMM's memory.
const LOOKS: usize = 3;
/// Time for one start.
const DEADLINE: Duration = Duration::from_secs(300);
/// The first byte of the payload that ends, and a word of the one that does not.
const FIRST: &str = "!";
const READY: &str = "ready";

/// QEMU's processor. Without architectural capabilities, which not every KVM lets QEMU set.
const QEMU_CPU: &str = "max,-arch-capabilities";

/// Who runs the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vmm {
    Egm,
    /// The machine that people mean by QEMU.
    Q35,
    /// QEMU's smallest, with its smallest firmware.
    Microvm,
}

impl Vmm {
    const fn name(self) -> &'static str {
        match self {
            Self::Egm => "egm-vmm",
            Self::Q35 => "QEMU q35",
            Self::Microvm => "QEMU microvm, qboot",
        }
    }

    /// Part of the name of the file that guest memory is.
    const fn guest_memory(self) -> &'static str {
        match self {
            Self::Egm => "egm-vmm (deleted)",
            Self::Q35 | Self::Microvm => "memfd:memory-backend-memfd",
        }
    }

    fn command(self, egm_vmm: &Path, payload: &Payload) -> Command {
        let machine = match self {
            Self::Egm => {
                let mut command = Command::new(egm_vmm);
                command.arg("run").arg(&payload.config);
                return command;
            }
            Self::Q35 => "-machine q35,memory-backend=ram",
            Self::Microvm => "-machine microvm,memory-backend=ram -bios qboot.rom",
        };
        let mut command = Command::new("qemu-system-x86_64");
        command.args(
            format!(
                "-accel kvm {machine} -cpu {QEMU_CPU} -smp 1 -m {MIB} -display none -nodefaults -serial stdio \
                 -object memory-backend-memfd,id=ram,size={MIB}M -kernel"
            )
            .split_whitespace(),
        );
        command.arg(&payload.kernel);
        command
    }
}

/// A payload as files.
#[derive(Debug)]
struct Payload {
    kernel: PathBuf,
    config: PathBuf,
}

impl Payload {
    fn write(work: &Path, name: &str, elf: &[u8]) -> Result<Self, LabError> {
        let payload =
            Self { kernel: work.join(format!("{name}.elf")), config: work.join(format!("{name}.json")) };
        fs::write(&payload.kernel, elf).map_err(LabError::file("write", &payload.kernel))?;
        write_config(&payload.config, &payload.kernel, MIB, false)?;
        Ok(payload)
    }
}

/// Writes the configuration of a payload with `mib` of memory.
pub(super) fn write_config(path: &Path, kernel: &Path, mib: u64, prefault: bool) -> Result<(), LabError> {
    let config = serde_json::json!({
        "memory": { "size": format!("{mib}MiB"), "prefault": prefault },
        "boot": { "kernel": kernel },
        "console": "stdio",
    });
    fs::write(path, config.to_string()).map_err(LabError::file("write", path))
}

/// The payload that says one byte and ends.
pub(super) fn write_hello(path: &Path) -> Result<(), LabError> {
    fs::write(path, hello(Ports::USUAL, Entry::Pvh)).map_err(LabError::file("write", path))
}

/// Starts `command`, takes the seconds until its guest's first byte, and ends it.
pub(super) fn seconds_to_first_byte(command: Command, work: &Path) -> Result<f64, LabError> {
    let launched = Launched::start(command, FIRST, DEADLINE, &work.join("stderr.log"))?;
    Ok(launched.elapsed.as_secs_f64())
}

/// From process start to the first byte that the guest writes to its serial port, on a pipe.
pub(super) fn start(egm_vmm: &Path, work: &Path) -> Result<Report, LabError> {
    let payload = Payload::write(work, "hello", &hello(Ports::USUAL, Entry::Pvh))?;
    let mut report = Report::default();
    let peers = peers(&mut report);
    let mut samples = vec![Vec::new(); peers.len() + 1];
    for round in 0..STARTS {
        for (vmm, samples) in [Vmm::Egm].iter().chain(&peers).zip(&mut samples) {
            if *vmm == Vmm::Q35 && round >= SLOW_STARTS {
                continue;
            }
            samples.push(1000.0 * seconds_to_first_byte(vmm.command(egm_vmm, &payload), work)?);
        }
    }
    let mut summaries = samples.iter().map(|samples| Summary::of(samples));
    let Some(ours) = summaries.next().flatten() else { return Ok(report) };
    let row = || Row::new("start to first instruction", "ms", ours);
    report.rows = peers.iter().zip(summaries).map(|(peer, s)| row().beside(peer.name(), s)).collect();
    if report.rows.is_empty() {
        report.rows.push(row());
    }
    if let Some(first) = report.rows.first_mut() {
        *first = first.clone().should(Target::AtMost(4.0));
    }
    Ok(report)
}

/// What a VMM with a sleeping guest costs beside the guest's memory.
pub(super) fn memory(egm_vmm: &Path, work: &Path) -> Result<Report, LabError> {
    let payload = Payload::write(work, "halt", &halt(Ports::USUAL))?;
    let mut report = Report::default();
    let peers = peers(&mut report);
    let look = |vmm: Vmm| -> Result<[Option<Summary>; 2], LabError> {
        let (mut pss, mut anonymous) = (Vec::new(), Vec::new());
        for _ in 0..LOOKS {
            let command = vmm.command(egm_vmm, &payload);
            let launched = Launched::start(command, READY, DEADLINE, &work.join("stderr.log"))?;
            let path = PathBuf::from(format!("/proc/{}/smaps", launched.id()));
            let smaps = fs::read_to_string(&path).map_err(LabError::file("read", path))?;
            let cost = beside_guest(&smaps, vmm.guest_memory());
            pss.push(mebibytes(cost.pss));
            anonymous.push(mebibytes(cost.anonymous));
        }
        Ok([Summary::of(&pss), Summary::of(&anonymous)])
    };
    let ours = look(Vmm::Egm)?;
    let theirs = peers.iter().map(|peer| look(*peer)).collect::<Result<Vec<_>, _>>()?;
    let names = ["memory beside the guest's (Pss)", "of it anonymous"];
    for (index, (name, ours)) in names.iter().zip(ours).enumerate() {
        let Some(ours) = ours else { continue };
        let beside = peers.iter().zip(&theirs).map(|(peer, figures)| {
            let figures = figures.get(index).copied().flatten();
            Row::new(*name, "MiB", ours).beside(peer.name(), figures)
        });
        let mut rows: Vec<_> = beside.collect();
        if rows.is_empty() {
            rows.push(Row::new(*name, "MiB", ours));
        }
        if let (0, Some(first)) = (index, rows.first_mut()) {
            *first = first.clone().should(Target::AtMost(2.8));
        }
        report.rows.extend(rows);
    }
    Ok(report)
}

/// The VMMs that are here beside ours.
fn peers(report: &mut Report) -> Vec<Vmm> {
    if super::qemu_is_here() {
        return vec![Vmm::Q35, Vmm::Microvm];
    }
    report.skipped.push("QEMU: install the Debian package qemu-system-x86".into());
    Vec::new()
}

#[expect(clippy::cast_precision_loss, reason = "KiB of a process are far below 2^52")]
fn mebibytes(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

/// QEMU with nothing but memory, its monitor on standard output: for the time that the memory takes.
pub(super) fn qemu_memory(mib: u64, threads: usize, prealloc: bool) -> Command {
    let prealloc =
        if prealloc { format!("prealloc=on,prealloc-threads={threads}") } else { "prealloc=off".into() };
    let mut command = Command::new("qemu-system-x86_64");
    let words = format!(
        "-machine none -nodefaults -display none -object memory-backend-memfd,id=ram,size={mib}M,{prealloc} -monitor stdio"
    );
    command.args(words.split_whitespace().map(OsString::from));
    command
}
