//! Start with an assigned function, in the emulated host: process start until the guest's first byte, with all memory
//! mapped for the function and the function reset, compared with QEMU with the same payload.

use std::fs;
use std::path::Path;
use std::process::Command;

use egm_fixtures::payload::{Entry, Ports, hello};
use serde::{Deserialize, Serialize};

use super::Section;
use super::emulated::{self, EmulatedHost, FUNCTION};
use super::figures::{Report, Row, Summary, Target};
use super::payload::seconds_to_first_byte;
use crate::engine::error::LabError;
use crate::engine::progress::Stage;
use crate::images::kernel;
use crate::images::tools::Tools;

/// Memory of each guest, in MiB.
const MIB: u64 = 1024;
const ROUNDS: usize = 5;
/// The payload among the tools.
const PAYLOAD: &str = "hello.elf";

/// The monitor that starts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Vmm {
    Egm,
    /// QEMU's q35 with its default firmware.
    Q35,
    /// QEMU's smallest that has PCI.
    Microvm,
}

const ALL: [Vmm; 3] = [Vmm::Egm, Vmm::Q35, Vmm::Microvm];

/// Start times of one of them, in milliseconds.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Starts {
    vmm: Vmm,
    with_function: Vec<f64>,
    without: Vec<f64>,
}

/// Boots the emulated host, and compares.
pub(super) fn run(directory: &Path) -> Result<Report, LabError> {
    let host = EmulatedHost::new(directory)?;
    let path = host.tools().join(PAYLOAD);
    fs::write(&path, hello(Ports::USUAL, Entry::Pvh)).map_err(LabError::file("write", path))?;
    let stock = kernel::l1(&host.cache, false)?;
    let found: Vec<Starts> = host.measure(&stock, Section::Assigned, &[])?;
    Ok(Report { rows: rows(&found), ..Report::default() })
}

fn rows(found: &[Starts]) -> Vec<Row> {
    let (ours, theirs): (Vec<_>, Vec<_>) = found.iter().partition(|starts| starts.vmm == Vmm::Egm);
    let pairs = || ours.iter().flat_map(|ours| theirs.iter().map(|theirs| (*ours, *theirs)));
    let row = |name, ours: &[f64], vmm: Vmm, theirs: &[f64]| {
        Some(Row::new(name, "ms", Summary::of(ours)?).beside(vmm.name(), Summary::of(theirs)))
    };
    let with_function = pairs().filter_map(|(ours, theirs)| {
        let name = "start with an assigned NVMe drive, 1 GiB, in the lab";
        Some(
            row(name, &ours.with_function, theirs.vmm, &theirs.with_function)?
                .should(Target::RatioAtMost(1.0)),
        )
    });
    let without = pairs().filter_map(|(ours, theirs)| {
        row("the same without the drive", &ours.without, theirs.vmm, &theirs.without)
    });
    with_function.chain(without).collect()
}

/// In the emulated host: all of them in turn.
pub(super) fn within(tools: &Path, logs: &Path) -> Result<Vec<Starts>, LabError> {
    let egm_vmm = Tools::copied(tools).vmm;
    let mut found: Vec<_> =
        ALL.map(|vmm| Starts { vmm, with_function: Vec::new(), without: Vec::new() }).into_iter().collect();
    for round in 1..=ROUNDS {
        Stage::note(&format!("round {round} of {ROUNDS}"));
        for starts in &mut found {
            for (has_function, samples) in [(true, &mut starts.with_function), (false, &mut starts.without)] {
                let command = starts.vmm.command(tools, &egm_vmm, has_function)?;
                samples.push(1000.0 * seconds_to_first_byte(command, logs)?);
            }
        }
    }
    Ok(found)
}

impl Vmm {
    const fn name(self) -> &'static str {
        match self {
            Self::Egm => "egm-vmm",
            Self::Q35 => "QEMU q35",
            Self::Microvm => "QEMU microvm, qboot",
        }
    }

    fn command(self, tools: &Path, egm_vmm: &Path, has_function: bool) -> Result<Command, LabError> {
        let kernel = tools.join(PAYLOAD);
        let machine = match self {
            Self::Egm => return egm(&tools.join("assigned.json"), egm_vmm, &kernel, has_function),
            Self::Q35 => "-machine q35,memory-backend=ram",
            Self::Microvm => "-machine microvm,pcie=on,memory-backend=ram -bios qboot.rom",
        };
        let mut command = emulated::qemu(tools);
        let words = format!(
            "-accel kvm {machine} -cpu max -smp 1 -m {MIB} -display none -nodefaults -no-reboot -serial stdio \
             -object memory-backend-memfd,id=ram,size={MIB}M"
        );
        command.args(words.split_whitespace()).arg("-kernel").arg(kernel);
        if has_function {
            command.args(["-device", &format!("vfio-pci,host={FUNCTION},rombar=0")]);
        }
        Ok(command)
    }
}

fn egm(config: &Path, egm_vmm: &Path, kernel: &Path, has_function: bool) -> Result<Command, LabError> {
    let device = serde_json::json!({ "type": "vfio", "function": FUNCTION });
    let json = serde_json::json!({
        "memory": { "size": format!("{MIB}MiB") },
        "boot": { "kernel": kernel },
        "console": "stdio",
        "devices": if has_function { vec![device] } else { Vec::new() },
    });
    fs::write(config, json.to_string()).map_err(LabError::file("write", config))?;
    let mut command = Command::new(egm_vmm);
    command.arg("run").arg(config);
    Ok(command)
}
