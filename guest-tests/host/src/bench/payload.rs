//! Start and memory, with a guest of a few bytes, which every KVM runs.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use egm_fixtures::payload::{Entry, Ports, halt, hello};

use super::figures::{Report, Row, Summary, Target};
use super::launch::Launched;
use super::monitor::{Monitor, Payload, peers};
use super::smaps::beside_guest;
use crate::engine::error::LabError;
use crate::engine::peer_program::PeerProgram;

/// Guest memory of every VMM.
const MIB: u64 = 256;
/// Starts of each fast VMM, alternating.
const STARTS: usize = 25;
/// Starts of QEMU's large machine: KVM may have to emulate its firmware, which takes seconds for each.
const SLOW_STARTS: usize = 3;
/// Measurements of each VMM's memory.
const LOOKS: usize = 3;
/// Time for one start.
const DEADLINE: Duration = Duration::from_secs(300);
/// The first byte of the payload that ends, and a word of the one that does not.
const FIRST: &str = "!";
const READY: &str = "ready";

/// Writes the payload that prints one byte first and ends.
pub(super) fn write_hello(work: &Path, name: &str, mib: u64) -> Result<Payload, LabError> {
    Payload::write(work, name, &hello(Ports::USUAL, Entry::Pvh), mib)
}

/// Starts `command`, takes the seconds until its guest's first byte, and ends it.
pub(super) fn seconds_to_first_byte(command: Command, work: &Path) -> Result<f64, LabError> {
    let launched = Launched::start(command, FIRST, DEADLINE, &work.join("stderr.log"))?;
    Ok(launched.elapsed.as_secs_f64())
}

/// From process start to the first byte that the guest writes to its serial port, on a pipe.
pub(super) fn start(egm_vmm: &Path, work: &Path, provided: &[PeerProgram]) -> Result<Report, LabError> {
    let payload = write_hello(work, "hello", MIB)?;
    let mut report = Report::default();
    let (ours, peers) = (Monitor::Egm(egm_vmm.into()), peers(&mut report, provided));
    let (mut samples, mut requested) = (vec![Vec::new(); peers.len() + 1], Vec::new());
    for round in 0..STARTS {
        if let Some(server) = ours.server() {
            requested.push(1000.0 * server.seconds_from_create(&payload, work, FIRST, DEADLINE)?);
        }
        for (monitor, samples) in [&ours].into_iter().chain(&peers).zip(&mut samples) {
            if *monitor == Monitor::Q35 && round >= SLOW_STARTS {
                continue;
            }
            if let Some(command) = monitor.command(&payload)? {
                samples.push(1000.0 * seconds_to_first_byte(command, work)?);
            }
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
    let requested = Summary::of(&requested).map(|requested| {
        let row = Row::new("vm.create and vm.boot to first instruction", "ms", requested);
        row.beside("egm-vmm run", Some(ours)).should(Target::AtMost(ours.median + 1.0))
    });
    report.rows.extend(requested);
    Ok(report)
}

/// MiB of a VMM without its guest's memory, for each measurement.
#[derive(Debug, Clone, Default)]
struct Looks {
    pss: Vec<f64>,
    anonymous: Vec<f64>,
}

impl Looks {
    fn look(&mut self, monitor: &Monitor, payload: &Payload, work: &Path) -> Result<(), LabError> {
        let Some(command) = monitor.command(payload)? else { return Ok(()) };
        let launched = Launched::start(command, READY, DEADLINE, &work.join("stderr.log"))?;
        let path = PathBuf::from(format!("/proc/{}/smaps", launched.id()));
        let smaps = fs::read_to_string(&path).map_err(LabError::file("read", path))?;
        let cost = beside_guest(&smaps, monitor.guest_memory(payload.mib));
        self.pss.push(mebibytes(cost.pss));
        self.anonymous.push(mebibytes(cost.anonymous));
        Ok(())
    }

    fn summaries(&self) -> [Option<Summary>; 2] {
        [Summary::of(&self.pss), Summary::of(&self.anonymous)]
    }
}

/// Memory of a VMM with a halted guest, without the guest's memory; the VMMs take turns.
pub(super) fn memory(egm_vmm: &Path, work: &Path, provided: &[PeerProgram]) -> Result<Report, LabError> {
    let payload = Payload::write(work, "halt", &halt(Ports::USUAL), MIB)?;
    let mut report = Report::default();
    let (ours, peers) = (Monitor::Egm(egm_vmm.into()), peers(&mut report, provided));
    let mut looks = vec![Looks::default(); peers.len() + 1];
    for _ in 0..LOOKS {
        for (monitor, looks) in [&ours].into_iter().chain(&peers).zip(&mut looks) {
            looks.look(monitor, &payload, work)?;
        }
    }
    let mut summaries = looks.iter().map(Looks::summaries);
    let ours = summaries.next().unwrap_or_default();
    let theirs: Vec<_> = summaries.collect();
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
