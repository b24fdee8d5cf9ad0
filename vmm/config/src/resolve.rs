//! From the written form of a configuration to the checked one.

use std::path::{Path, PathBuf};

use egm_address::ByteSize;

use super::boot::{self, Overrides};
use super::error::{ConfigError, Fault, Rule, in_range, name, no_control};
use super::file::{File, PcieFile, SpareFile};
use super::rules::MemoryRule;
use super::source::Document;
use super::spec::{Architecture, Pcie, SparePorts, Spec};
use super::{cpus, decode, devices, memory, numa};

/// Window sizes are multiples of this: the granularity of a PCI bridge's memory window.
const WINDOW_UNIT: u64 = 1 << 20;
/// Bus 0 has 32 device numbers, of which the host bridge has one and some device another.
const MAX_SPARE: u64 = 30;
/// Room for the BARs of any NIC. A GPU needs more, which its owner has to configure.
const SPARE_WINDOW64: u64 = 1 << 30;
/// Room for a GPU's registers; thirty such windows take half of the 32-bit window.
const SPARE_WINDOW32: u64 = 16 << 20;

pub(super) fn resolve(document: &Document, overrides: &Overrides) -> Result<Spec, ConfigError> {
    decode::decode(document.root())
        .and_then(|file| spec(file, document, overrides))
        .map_err(|fault| document.error(fault))
}

fn spec(file: File, document: &Document, overrides: &Overrides) -> Result<Spec, Fault> {
    let join = |key: &str, path: &Path| boot::path(path.to_owned()).map(|path| document.join(key, &path));
    let name = machine_name(file.name, document.path())?;
    let arch = architecture(file.arch)?;
    let cpus = cpus::resolve(file.cpus.unwrap_or_default()).map_err(|fault| fault.inside("cpus"))?;
    let memory_file = file.memory.ok_or_else(|| Rule::MissingKey { key: "memory" }.here())?;
    let mut memory = memory::resolve(&memory_file, cpus.count).map_err(|fault| fault.inside("memory"))?;
    let egm_files = file.egm.unwrap_or_default();
    let mut egm = memory::resolve_egm(&egm_files, &memory)?;
    numa::link((&memory_file, &mut memory), (&egm_files, &mut egm))?;
    let devices = devices::resolve(file.devices.unwrap_or_default(), &name, join)?;
    let devices = devices::slices(&egm, devices)?;
    let description = file.description.unwrap_or_default();
    no_control(&description).map_err(|rule| rule.at("description"))?;
    Ok(Spec {
        description,
        arch,
        boot: boot::resolve(file.boot.unwrap_or_default(), overrides, arch, join)?,
        console: devices::console(file.console, &devices, join)?,
        devices,
        pcie: pcie(file.pcie.unwrap_or_default())?,
        name,
        cpus,
        memory,
        egm,
        trust_domain: overrides.trust_domain.clone(),
    })
}

/// The name written, or the file's without its extension.
fn machine_name(written: Option<String>, path: &Path) -> Result<String, Fault> {
    let stem = || path.file_stem().map(PathBuf::from).unwrap_or_default().display().to_string();
    name(&written.unwrap_or_else(stem)).map_err(|rule| rule.at("name"))
}

fn architecture(written: Option<Architecture>) -> Result<Architecture, Fault> {
    match (written, std::env::consts::ARCH) {
        (Some(arch), _) => Ok(arch),
        (None, "x86_64") => Ok(Architecture::X86_64),
        (None, "aarch64") => Ok(Architecture::Aarch64),
        (None, other) => Err(Rule::Architecture(other.to_owned()).at("arch")),
    }
}

fn pcie(file: PcieFile) -> Result<Pcie, Fault> {
    let window64 = file.window64.map(|size| memory::sized(size, WINDOW_UNIT)).transpose();
    let window64 = window64.map_err(|rule| rule.at("pcie.window64"))?;
    let spare = file.spare.map(spare).transpose().map_err(|fault| fault.inside("pcie.spare"))?;
    Ok(Pcie { window64, topology: file.topology.unwrap_or_default(), spare })
}

fn spare(file: SpareFile) -> Result<SparePorts, Fault> {
    let ports = file.ports.ok_or_else(|| Rule::MissingKey { key: "ports" }.here())?;
    let ports = in_range(ports, 1, MAX_SPARE).map_err(|rule| rule.at("ports"))?;
    let window = |key: &str, size: Option<ByteSize>, default: u64| {
        let size = memory::sized(size.unwrap_or_else(|| ByteSize::new(default)), WINDOW_UNIT);
        let size = size.and_then(|size| match size.get().is_power_of_two() {
            true => Ok(size),
            false => Err(MemoryRule::PowerOfTwo { size }.into()),
        });
        size.map_err(|rule| rule.at(key.to_owned()))
    };
    Ok(SparePorts {
        ports: u8::try_from(ports).unwrap_or(u8::MAX),
        window64: window("window64", file.window64, SPARE_WINDOW64)?,
        window32: window("window32", file.window32, SPARE_WINDOW32)?,
    })
}
