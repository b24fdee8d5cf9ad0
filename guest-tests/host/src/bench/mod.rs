//! `egm-lab bench`: speed and memory, compared with QEMU in the same run.
//!
//! A missed target is reported and is no failure: machines differ, and a person judges figures.

mod api;
mod assigned;
mod dma;
mod emulated;
mod exits;
mod figures;
mod guest;
mod launch;
mod monitor;
mod payload;
mod prefault;
mod restore;
mod served;
mod smaps;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use figures::Report;

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::logs;
use crate::engine::peer_program::{PeerName, PeerProgram, find};
use crate::engine::progress::Stage;
use crate::hosts::qemu::Clock;
use crate::images::tools::beside;

/// Sections that start egm-vmm on this machine.
const WITH_EGM_VMM: [Section; 5] =
    [Section::Start, Section::Restore, Section::Memory, Section::Prefault, Section::Exits];
/// Sections in which monitors that the user provides take part.
const WITH_PEERS: [Section; 4] = [Section::Start, Section::Restore, Section::Memory, Section::Prefault];
/// Figures from another day, with the same payload, of each monitor that the user can provide.
const ELSEWHERE: [(PeerName, &str); 2] = [
    (
        PeerName::CloudHypervisor,
        "cloud-hypervisor on two cores under kvm_pvm, 2026-11-21: start 5.7 ms, memory beside the guest's (Pss) 7.4 MiB; until \
         init in the x86 lab 10.4 s",
    ),
    (
        PeerName::Firecracker,
        "Firecracker on two cores under kvm_pvm, 2026-11-21: start 8.7 ms, memory beside the guest's (Pss) 2.8 MiB",
    ),
];

/// Arguments of `egm-lab bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Sections to run [default: all].
    sections: Vec<Section>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Folder for logs and the figures as JSON (bench.json).
    #[arg(long, value_name = "DIR", default_value = ".lab/bench")]
    report: PathBuf,
    /// In the emulated host: the directory with the programs.
    #[arg(long, hide = true)]
    within: Option<PathBuf>,
    /// In the emulated host: measure QEMU instead of egm-vmm.
    #[arg(long, hide = true)]
    qemu: bool,
    /// Monitor that you provide, for the sections start, restore (but for Firecracker), memory and prefault:
    /// cloud-hypervisor=PATH, firecracker=PATH, or egm-vmm=PATH for another build of egm-vmm.
    #[arg(long = "peer", value_name = "NAME=PATH")]
    peers: Vec<PeerProgram>,
}

impl BenchArguments {
    /// Whether one of `sections` is measured.
    fn has_one_of(&self, sections: &[Section]) -> bool {
        self.sections.is_empty() || sections.iter().any(|section| self.sections.contains(section))
    }
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// Time from process start, or from vm.create, to the guest's first byte.
    Start,
    /// Time to write a snapshot, and from vm.restore to the guest's next instruction.
    Restore,
    /// Memory of the monitor, without the guest's.
    Memory,
    /// Speed of making guest memory present.
    Prefault,
    /// Speed of zeroing memory for the next owner.
    Scrub,
    /// Time and VM exits of a stock kernel until init, in the emulated host.
    Guest,
    /// Speed of mapping memory for a device, in the emulated host.
    Dma,
    /// Start with an assigned function of the emulated host.
    Assigned,
    /// Slice as a PCI function: round trip of a register, and memory mapped by a client and by a guest.
    Served,
    /// Cost of a register that the monitor emulates, here and in the emulated host.
    Exits,
}

impl Section {
    /// Its name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Clock of an emulated host for this section. The kernel's work for a map or an exit is the same each time, but an
    /// emulator's speed is not.
    fn clock(self) -> Clock {
        if matches!(self, Self::Dma | Self::Exits) { Clock::Instructions } else { Clock::Real }
    }
}

/// Output of the packages' own benchmarks: an operation, and the time of each of its rounds.
type Rounds = BTreeMap<String, Vec<f64>>;

/// Figures of the benchmark `bench` of `package` on this machine.
fn measured(package: &'static str, bench: &str, words: &[&str]) -> Result<Rounds, LabError> {
    let line = Tool::new("cargo", "cargo")
        .args(["bench", "--quiet", "--package", package, "--bench", bench, "--"])
        .args(words)
        .text()?;
    LabError::json(format!("benchmark of {package}"), line.trim().as_bytes())
}

/// Measures, shows, and writes bench.json.
pub(crate) fn run(arguments: &BenchArguments) -> Result<ExitCode, LabError> {
    let directory = &arguments.report;
    fs::create_dir_all(directory).map_err(LabError::file("make", directory))?;
    let directory = directory.canonicalize().map_err(LabError::file("find", directory))?;
    if let (Some(tools), Some(section)) = (&arguments.within, arguments.sections.first()) {
        within(*section, tools, &directory, arguments.qemu)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut report = Report { host: host(), ..Report::default() };
    let Programs { egm_vmm, peers } = &Programs::of(arguments, &directory.join("programs"))?;
    if arguments.has_one_of(&WITH_PEERS) {
        without(&arguments.peers, &mut report);
    }
    for section in Section::value_variants().iter().filter(|section| arguments.has_one_of(&[**section])) {
        let stage = Stage::begin(&format!("measuring: {}", section.name()));
        let outcome = match section {
            Section::Start => payload::start(egm_vmm, &directory, peers),
            Section::Restore => restore::run(egm_vmm, &directory, peers),
            Section::Memory => payload::memory(egm_vmm, &directory, peers),
            Section::Prefault => prefault::run(egm_vmm, &directory, peers),
            Section::Scrub => prefault::scrub(),
            Section::Guest => guest::run(&directory),
            Section::Dma => dma::run(&directory),
            Section::Assigned => assigned::run(&directory),
            Section::Served => served::run(&directory),
            Section::Exits => exits::run(egm_vmm, &directory),
        };
        report.extend(&section.name(), outcome);
        stage.end();
    }
    let path = directory.join("bench.json");
    write(&path, &report)?;
    if arguments.json {
        println!("{}", text(&report)?);
    } else {
        println!("{}\nas JSON: {}", report.table(), path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Fresh copies of the programs that the chosen sections start.
struct Programs {
    egm_vmm: PathBuf,
    peers: Vec<PeerProgram>,
}

impl Programs {
    /// Makes the copies in `folder`; programs that no section starts stay where they are.
    fn of(arguments: &BenchArguments, folder: &Path) -> Result<Self, LabError> {
        let egm_vmm = beside("egm-vmm")?;
        let peers = arguments.peers.iter();
        Ok(Self {
            egm_vmm: match arguments.has_one_of(&WITH_EGM_VMM) {
                true => copied(&egm_vmm, &folder.join("tested"))?,
                false => egm_vmm,
            },
            peers: match arguments.has_one_of(&WITH_PEERS) {
                true => peers.map(|peer| Self::peer(peer, folder)).collect::<Result<_, _>>()?,
                false => peers.cloned().collect(),
            },
        })
    }

    fn peer(peer: &PeerProgram, folder: &Path) -> Result<PeerProgram, LabError> {
        peer.copied(|path| copied(path, &folder.join(peer.name().name())))
    }
}

/// Copies `program` into `folder`: how a file's pages lie in the page cache depends on its writer, and changes a start
/// by up to a tenth.
fn copied(program: &Path, folder: &Path) -> Result<PathBuf, LabError> {
    let copy = folder.join(program.file_name().unwrap_or(program.as_os_str()));
    fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
    // A file that is written anew may keep pages of the last one.
    logs::remove(&copy)?;
    fs::copy(program, &copy).map(|_| copy).map_err(LabError::file("copy", program))
}

/// Notes the monitors that are not among `peers`, with their figures from elsewhere.
fn without(peers: &[PeerProgram], report: &mut Report) {
    for (name, figures) in ELSEWHERE.iter().filter(|(name, _)| find(peers, *name).is_none()) {
        report.skipped.push(name.absent());
        report.elsewhere.push((*figures).to_owned());
    }
}

/// In the emulated host: measures its part of `section`, and writes the figures.
fn within(section: Section, tools: &Path, directory: &Path, qemu: bool) -> Result<(), LabError> {
    let path = directory.join(emulated::results(section));
    match section {
        Section::Guest => write(&path, &guest::within(tools, directory, qemu)?),
        Section::Dma => write(&path, &dma::within(tools)?),
        Section::Assigned => write(&path, &assigned::within(tools, directory)?),
        Section::Served => write(&path, &served::within(tools, directory)?),
        Section::Exits => write(&path, &exits::within(tools, directory)?),
        other => Err(LabError::Usage(format!("{} is not measured in the emulated host", other.name()))),
    }
}

fn write(path: &Path, report: &impl serde::Serialize) -> Result<(), LabError> {
    fs::write(path, text(report)?).map_err(LabError::file("write", path))
}

fn text(report: &impl serde::Serialize) -> Result<String, LabError> {
    serde_json::to_string_pretty(report)
        .map_err(|error| LabError::Content { what: "figures".into(), problem: error.to_string() })
}

fn qemu_is_here() -> bool {
    Path::new("/usr/bin/qemu-system-x86_64").exists()
}

/// Description of the machine in a line: figures mean nothing without it.
fn host() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kvm = ["kvm_pvm", "kvm_amd", "kvm_intel"].into_iter();
    let kvm = kvm.filter(|name| Path::new("/sys/module").join(name).exists()).collect::<Vec<_>>().join(" ");
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!(
        "{processors} × {}, Linux {}, {}, load {}",
        model.map_or("unknown processor", |(_, name)| name),
        read("/proc/sys/kernel/osrelease").trim(),
        if kvm.is_empty() { "no KVM module seen" } else { &kvm },
        read("/proc/loadavg").split_whitespace().next().unwrap_or("unknown"),
    )
}
