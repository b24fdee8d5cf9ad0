//! Cost of a register that the monitor emulates: a guest reads it again and again, under egm-vmm, under QEMU, and under
//! a monitor that does nothing, which is the lower bound.
//!
//! On this machine the registers are an entropy device's, in the emulated host those of an assigned NVMe drive.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use egm_fixtures::payload::{OVER, Ports, Register, RegisterAddress, TURN, exits};
use serde::{Deserialize, Serialize};

use super::Section;
use super::emulated::{self, EmulatedHost, FUNCTION};
use super::figures::{Report, Row, Summary};
use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::process::{Limit, Reaction, watch};
use crate::images::kernel;
use crate::images::tools::Tools;

/// The monitor that does nothing, among the tools.
const FLOOR: &str = "bench-exit";
/// Reads of each register in a round.
const READS: u32 = 10_000;
const ROUNDS: usize = 5;
const DEADLINE: Duration = Duration::from_secs(120);
const MIB: u64 = 256;
/// Address at which the guest puts the BAR that it reads: free in both machines.
const BAR: u32 = 0xd000_0000;
/// The slot of the device on the first bus of both.
const SLOT: u32 = 1;

/// A device with the registers to read.
struct Subject {
    /// Its name in a table.
    name: &'static str,
    /// Its key in a configuration.
    ours: serde_json::Value,
    /// QEMU's option, without its slot.
    qemu: String,
    /// Vendor id in bits 15..0, device id in bits 31..16.
    ids: u32,
    /// Its MSI-X table in our machine.
    table: Table,
    /// Its MSI-X table in QEMU's machine.
    qemu_table: Table,
    /// Offset of a register of the device itself that must be trapped too, because the table is in the same page.
    neighbour: Option<u32>,
}

/// Position of an MSI-X table.
#[derive(Clone, Copy)]
struct Table {
    /// The register of its BAR.
    bar: u32,
    /// Its offset in the BAR.
    offset: u32,
}

/// A register to read, with its name.
struct Named {
    name: &'static str,
    register: Register,
}

impl Subject {
    fn entropy() -> Self {
        Self {
            name: "an entropy device",
            ours: serde_json::json!({ "type": "virtio-rng", "root_port": false }),
            qemu: "virtio-rng-pci,disable-legacy=on".into(),
            ids: 0x1044_1af4,
            table: Table { bar: 0x10, offset: 0x4000 },
            qemu_table: Table { bar: 0x14, offset: 0 },
            neighbour: None,
        }
    }

    /// QEMU's NVMe drive: 65 vectors.
    fn drive() -> Self {
        Self {
            name: "an assigned NVMe drive, in the lab, 1 ns an instruction",
            ours: serde_json::json!({ "type": "vfio", "function": FUNCTION, "root_port": false }),
            qemu: format!("vfio-pci,host={FUNCTION},rombar=0"),
            ids: 0x0010_1b36,
            table: Table { bar: 0x10, offset: 0x2000 },
            qemu_table: Table { bar: 0x10, offset: 0x2000 },
            neighbour: Some(0x2800),
        }
    }

    /// The registers to read; the MSI-X table is at `table` in the BAR.
    fn registers(&self, table: u32) -> Vec<Named> {
        let memory = |offset, value| Register { place: RegisterAddress::Memory(BAR + offset), value };
        let ids = Register { place: RegisterAddress::Config(config(0)), value: Some(self.ids) };
        // Each vector's control begins masked (PCI 3.0 §6.8.2.9).
        let entry = Named { name: "MSI-X table", register: memory(table + 12, Some(1)) };
        let ids = Named { name: "configuration space", register: ids };
        let neighbour = |offset| Named { name: "register beside it", register: memory(offset, None) };
        [entry, ids].into_iter().chain(self.neighbour.map(neighbour)).collect()
    }

    /// The guest for our machine or for QEMU's.
    fn payload(&self, qemu: bool) -> Vec<u8> {
        let Table { bar, offset } = if qemu { self.qemu_table } else { self.table };
        let high = if qemu && bar == 0x14 { Vec::new() } else { vec![(config(bar + 4), 0)] };
        let setup: Vec<_> = [(config(bar), BAR)].into_iter().chain(high).chain([(config(4), 2)]).collect();
        let registers: Vec<_> = self.registers(offset).into_iter().map(|named| named.register).collect();
        exits(Ports::USUAL, &setup, &registers, READS)
    }
}

/// Value for port 0xcf8 that selects a register of the device.
const fn config(register: u32) -> u32 {
    1 << 31 | SLOT << 11 | register
}

/// Seconds of all reads of a round.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Samples {
    /// egm-vmm's rounds, a list for each register.
    ours: Vec<Vec<f64>>,
    /// QEMU's rounds, empty without QEMU.
    qemu: Vec<Vec<f64>>,
    /// The monitor that does nothing.
    floor: Vec<f64>,
}

/// The monitors of a host.
struct Monitors<'a> {
    egm_vmm: PathBuf,
    qemu: Option<&'a dyn Fn() -> Command>,
    floor: PathBuf,
    work: &'a Path,
}

/// Measures here, and in the emulated host.
pub(super) fn run(egm_vmm: &Path, directory: &Path) -> Result<Report, LabError> {
    let host = EmulatedHost::new(directory)?;
    let floor = host.add_bench("egm-fixtures", "exit", FLOOR)?;
    let qemu = || Command::new("qemu-system-x86_64");
    let qemu = super::qemu_is_here().then_some(&qemu as &dyn Fn() -> Command);
    let here = Monitors { egm_vmm: egm_vmm.into(), qemu, floor, work: directory };
    let (entropy, drive) = (Subject::entropy(), Subject::drive());
    let mut report = Report::default();
    let outcome = measure(&entropy, &here).map(|samples| rows(&entropy, &samples));
    report.extend("exits on this machine", outcome);
    let stock = kernel::l1(&host.cache, false)?;
    let outcome = host.measure(&stock, Section::Exits, &[]).map(|samples| rows(&drive, &samples));
    report.extend("exits in the lab", outcome);
    Ok(report)
}

fn rows(subject: &Subject, samples: &Samples) -> Report {
    let micros = |seconds: &Vec<f64>| Summary::of(seconds).map(|s| s.map(|s| 1e6 * s / f64::from(READS)));
    let floor = micros(&samples.floor);
    let named = subject.registers(0).into_iter().zip(&samples.ours).enumerate();
    let rows = named.flat_map(|(index, (Named { name, .. }, ours))| {
        let row = micros(ours).map(|ours| Row::new(format!("read, {name} of {}", subject.name), "µs", ours));
        let qemu = row.clone().map(|row| row.beside("QEMU q35", samples.qemu.get(index).and_then(micros)));
        [qemu, row.map(|row| row.beside("a monitor that does nothing", floor))]
    });
    Report { rows: rows.flatten().collect(), ..Report::default() }
}

/// In the emulated host.
pub(super) fn within(tools: &Path, logs: &Path) -> Result<Samples, LabError> {
    let qemu = || emulated::qemu(tools);
    let qemu = emulated::has_qemu(tools).then_some(&qemu as &dyn Fn() -> Command);
    let here = Monitors { egm_vmm: Tools::copied(tools).vmm, qemu, floor: tools.join(FLOOR), work: logs };
    measure(&Subject::drive(), &here)
}

fn measure(subject: &Subject, here: &Monitors<'_>) -> Result<Samples, LabError> {
    let [ours, theirs, config] =
        ["exits.elf", "exits-qemu.elf", "machine.json"].map(|name| here.work.join(name));
    for (path, qemu) in [(&ours, false), (&theirs, true)] {
        fs::write(path, subject.payload(qemu)).map_err(LabError::file("write", path))?;
    }
    let json = serde_json::json!({
        "memory": { "size": format!("{MIB}MiB") },
        "boot": { "kernel": ours },
        "console": "stdio",
        "devices": [subject.ours],
    });
    fs::write(&config, json.to_string()).map_err(LabError::file("write", &config))?;
    let mut samples = Samples::default();
    for _ in 0..ROUNDS {
        let mut command = Command::new(&here.egm_vmm);
        command.arg("run").arg(&config);
        add(&mut samples.ours, turns(command, here.work)?);
        if let Some(qemu) = here.qemu {
            let words = format!(
                "-accel kvm -machine q35 -cpu max,-arch-capabilities -smp 1 -m {MIB} -display none -nodefaults \
                 -no-reboot -serial stdio -device {},addr={SLOT:02x}.0 -kernel",
                subject.qemu
            );
            let mut command = qemu();
            command.args(words.split_whitespace()).arg(&theirs);
            add(&mut samples.qemu, turns(command, here.work)?);
        }
        samples.floor.extend(floor(&here.floor)?);
    }
    Ok(samples)
}

fn add(all: &mut Vec<Vec<f64>>, round: Vec<f64>) {
    all.resize(round.len(), Vec::new());
    all.iter_mut().zip(round).for_each(|(all, sample)| all.push(sample));
}

fn floor(program: &Path) -> Result<Vec<f64>, LabError> {
    let reads = READS.to_string();
    let tool =
        Tool::new(&program.to_string_lossy(), "egm-fixtures").args(["--reads", &reads, "--rounds", "1"]);
    LabError::json(FLOOR, tool.text()?.trim().as_bytes())
}

/// Seconds between the guest's turns.
fn turns(command: Command, work: &Path) -> Result<Vec<f64>, LabError> {
    let what = command.get_program().to_string_lossy().into_owned();
    let (mut turns, mut failed) = (Vec::new(), None);
    let (console, errors) = (work.join("console.log"), work.join("stderr.log"));
    let ending = watch(command, Limit::Total(DEADLINE), &console, &errors, |line| {
        if line.contains(TURN) {
            turns.push(Instant::now());
        }
        if line.contains("failed") {
            failed = Some(line.to_owned());
        }
        // QEMU's machine has no such power switch.
        if line.contains(OVER) || failed.is_some() { Reaction::Kill } else { Reaction::Go }
    })?;
    let between: Vec<_> =
        turns.iter().zip(turns.iter().skip(1)).map(|(from, to)| (*to - *from).as_secs_f64()).collect();
    if failed.is_some() || between.is_empty() {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        let problem = failed.unwrap_or_else(|| format!("{ending:?} without a turn: {}", said.trim()));
        return Err(LabError::Content { what, problem });
    }
    Ok(between)
}
