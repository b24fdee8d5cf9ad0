//! From the written form of a configuration to the checked one.

use std::path::{Path, PathBuf};

use egm_address::ByteSize;

use super::boot::{self, Overrides};
use super::error::{ConfigErrors, Rule, in_range, name, no_control};
use super::faults::Faults;
use super::file::{EgmFile, File, PcieFile, SpareFile};
use super::rules::MemoryRule;
use super::slot::Slot;
use super::source::{self, Document};
use super::spec::{Architecture, Pcie, SparePorts, Spec};
use super::{cpus, devices, memory, numa, shape};

/// Window sizes are multiples of this: the granularity of a PCI bridge's memory window.
const WINDOW_UNIT: u64 = 1 << 20;
/// Most spare ports of a machine: bus 0 has 32 device numbers, of which the host bridge has one and some device another.
pub const MAX_SPARE: u64 = 30;
/// Room for the BARs of any NIC. A GPU needs more, which its owner has to configure.
const SPARE_WINDOW64: u64 = 1 << 30;
/// Room for a GPU's registers; thirty such windows take half of the 32-bit window.
const SPARE_WINDOW32: u64 = 16 << 20;

/// What `document` means.
///
/// # Errors
/// All rules that it breaks.
pub(super) fn resolve(document: Document, overrides: &Overrides) -> Result<Spec, ConfigErrors> {
    let mut faults = Faults::default();
    let file = shape::shape(document.root(), shape::WITH_GAPS, &mut faults);
    let join = |key: &str, path: &Path| document.join(key, path);
    let spec = file.and_then(|file| spec(file, document.path(), &join, overrides, &mut faults));
    document.refuse(faults)?;
    // Without a fault there is a machine; should there be none, it is not for want of a readable file.
    spec.ok_or_else(|| source::unplaced(Rule::NotText).into())
}

/// The machine of `file`, which was read from `path`; `None` when it breaks a rule, which is noted. `joined` makes a path
/// of a key relative to the file that wrote it.
pub(super) fn spec(
    file: File,
    path: &Path,
    joined: &dyn Fn(&str, &Path) -> PathBuf,
    overrides: &Overrides,
    faults: &mut Faults,
) -> Option<Spec> {
    let join = |key: &str, path: &Path| boot::path(path.to_owned()).map(|path| joined(key, &path));
    let name = faults.value("name", machine_name(file.name, path));
    let arch = faults.value("arch", architecture(file.arch));
    let description = file.description.unwrap_or_default();
    faults.value("description", no_control(&description));
    let cpus = cpus::resolve(file.cpus.unwrap_or_default(), faults);
    let vcpus = cpus.as_ref().map(|cpus| cpus.count);
    if file.memory.is_none() {
        faults.note(Rule::MissingKey { key: "memory" }.here());
    }
    let mut memory = file.memory.as_ref().and_then(|file| memory::resolve(file, vcpus, faults));
    let egm_files = file.egm.unwrap_or_default();
    let mut egm = memory::resolve_egm(&egm_files, memory.as_ref(), faults);
    match (&file.memory, &mut memory, &mut egm) {
        (Some(memory_file), Some(memory), Some(egm)) => {
            let egm_files: Vec<&EgmFile> = egm_files.iter().filter_map(Slot::get).collect();
            numa::link(memory_file, memory, &egm_files, egm, faults);
        }
        _ => numa::check_ranges(file.memory.as_ref(), &egm_files, faults),
    }
    let devices = devices::resolve(file.devices.unwrap_or_default(), name.as_deref(), join, faults);
    let console = devices::console(file.console, devices.as_deref(), join, faults);
    let devices =
        devices.zip(egm.as_deref()).and_then(|(devices, egm)| devices::slices(egm, devices, faults));
    let boot = boot::resolve(file.boot.unwrap_or_default(), overrides, arch, join, faults);
    let pcie = pcie(file.pcie.unwrap_or_default(), faults);
    Some(Spec {
        description,
        arch: arch?,
        boot: boot?,
        console: console?,
        devices: devices?,
        pcie: pcie?,
        name: name?,
        cpus: cpus?,
        memory: memory?,
        egm: egm?,
        on_reset: file.on_reset.unwrap_or(overrides.default_on_reset),
        trust_domain: overrides.trust_domain.clone(),
    })
}

/// The name written, or the file's without its extension; standard input's is `stdin`.
fn machine_name(written: Option<String>, path: &Path) -> Result<String, Rule> {
    let stem = || path.file_stem().unwrap_or_default().display().to_string();
    name(&written.unwrap_or_else(|| stem().trim_matches(['<', '>']).to_owned()))
}

fn architecture(written: Option<Architecture>) -> Result<Architecture, Rule> {
    match (written, std::env::consts::ARCH) {
        (Some(arch), _) => Ok(arch),
        (None, "x86_64") => Ok(Architecture::X86_64),
        (None, "aarch64") => Ok(Architecture::Aarch64),
        (None, other) => Err(Rule::Architecture(other.to_owned())),
    }
}

fn pcie(file: PcieFile, faults: &mut Faults) -> Option<Pcie> {
    let window64 = file.window64.map(|size| faults.value("pcie.window64", memory::sized(size, WINDOW_UNIT)));
    let spare = file.spare.map(|file| spare(file, faults));
    let window64 = match window64 {
        Some(size) => Some(size?),
        None => None,
    };
    let spare = match spare {
        Some(spare) => Some(spare?),
        None => None,
    };
    Some(Pcie { window64, topology: file.topology.unwrap_or_default(), spare })
}

fn spare(file: SpareFile, faults: &mut Faults) -> Option<SparePorts> {
    let ports = match file.ports {
        Some(ports) => faults.value("pcie.spare.ports", in_range(ports, 1, MAX_SPARE)),
        None => faults.keep(Err(Rule::MissingKey { key: "ports" }.at("pcie.spare"))),
    };
    let mut window = |key: &str, size: Option<ByteSize>, default: u64| {
        let size = memory::sized(size.unwrap_or_else(|| ByteSize::new(default)), WINDOW_UNIT);
        let size = size.and_then(|size| match size.get().is_power_of_two() {
            true => Ok(size),
            false => Err(MemoryRule::PowerOfTwo { size }.into()),
        });
        faults.value(format!("pcie.spare.{key}"), size)
    };
    let window64 = window("window64", file.window64, SPARE_WINDOW64);
    let window32 = window("window32", file.window32, SPARE_WINDOW32);
    Some(SparePorts {
        ports: u8::try_from(ports?).unwrap_or(u8::MAX),
        window64: window64?,
        window32: window32?,
    })
}
