//! From what was written to what was meant.

use std::path::{Path, PathBuf};

use super::boot::{self, Overrides};
use super::error::{ConfigError, Fault, Rule, name, no_control};
use super::file::{File, PcieFile};
use super::source::Document;
use super::spec::{Architecture, Pcie, Spec};
use super::{cpus, decode, devices, memory, numa};

/// Window sizes are multiples of this: the granularity of a PCI bridge's memory window.
const WINDOW_UNIT: u64 = 1 << 20;

pub(super) fn resolve(document: &Document, overrides: &Overrides) -> Result<Spec, ConfigError> {
    decode::decode(document.root())
        .and_then(|file| spec(file, document, overrides))
        .map_err(|fault| document.error(fault))
}

fn spec(file: File, document: &Document, overrides: &Overrides) -> Result<Spec, Fault> {
    let join = |key: &str, path: &Path| boot::path(path.to_owned()).map(|path| document.join(key, &path));
    let name = machine_name(file.name, document.path())?;
    let cpus = cpus::resolve(file.cpus.unwrap_or_default()).map_err(|fault| fault.inside("cpus"))?;
    let memory_file = file.memory.ok_or_else(|| Rule::MissingKey { key: "memory" }.here())?;
    let mut memory = memory::resolve(&memory_file, cpus.count).map_err(|fault| fault.inside("memory"))?;
    let egm_files = file.egm.unwrap_or_default();
    let mut egm = memory::resolve_egm(&egm_files, &memory)?;
    numa::link((&memory_file, &mut memory), (&egm_files, &mut egm))?;
    let devices = devices::resolve(file.devices.unwrap_or_default(), &name, join)?;
    let description = file.description.unwrap_or_default();
    no_control(&description).map_err(|rule| rule.at("description"))?;
    Ok(Spec {
        description,
        arch: architecture(file.arch)?,
        boot: boot::resolve(file.boot.unwrap_or_default(), overrides, join)?,
        console: devices::console(file.console, &devices, join)?,
        devices,
        pcie: pcie(file.pcie.unwrap_or_default())?,
        name,
        cpus,
        memory,
        egm,
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
    Ok(Pcie { window64, topology: file.topology.unwrap_or_default() })
}
