//! Rules of kernel, initial RAM disk and command line.

use std::path::{Path, PathBuf};

use super::error::{Fault, Rule, no_control};
use super::file::BootFile;
use super::rules::{BootRule, MAX_CMDLINE, MAX_PATH};
use super::spec::{Architecture, Boot, BootTables};

/// Values of a command line in place of the file's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Kernel in place of `boot.kernel`; relative to the working directory.
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk in place of `boot.initramfs`; relative to the working directory.
    pub initramfs: Option<PathBuf>,
    /// Text added to `boot.cmdline`, after a space.
    pub append: Option<String>,
    /// Trust domain of the machine; a file cannot choose it.
    pub trust_domain: Option<String>,
}

/// `path`, when a file can have it and a terminal can show it.
pub(super) fn path(path: PathBuf) -> Result<PathBuf, Rule> {
    no_control(&path.to_string_lossy())?;
    match path.as_os_str().len() {
        0 => Err(BootRule::Path.into()),
        1..=MAX_PATH => Ok(path),
        length => Err(BootRule::LongPath { length }.into()),
    }
}

/// `join` makes a path of a key relative to the file that wrote it.
pub(super) fn resolve(
    file: BootFile,
    overrides: &Overrides,
    arch: Architecture,
    join: impl Fn(&str, &Path) -> Result<PathBuf, Rule>,
) -> Result<Boot, Fault> {
    let chosen = |over: &Option<PathBuf>, written: Option<PathBuf>, key: &str| {
        let chosen = match (over, written) {
            (Some(over), _) => Some(path(over.clone())),
            (None, written) => written.map(|written| join(key, &written)),
        };
        chosen.transpose().map_err(|rule| rule.at(key))
    };
    let kernel = chosen(&overrides.kernel, file.kernel, "boot.kernel")?;
    let kernel = kernel.ok_or_else(|| Rule::from(BootRule::NoKernel).at("boot"))?;
    let initramfs = chosen(&overrides.initramfs, file.initramfs, "boot.initramfs")?;
    let parts = [file.cmdline.as_deref(), overrides.append.as_deref()];
    let cmdline = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
    if cmdline.len() > MAX_CMDLINE {
        return Err(Rule::from(BootRule::Long { length: cmdline.len() }).at("boot.cmdline"));
    }
    no_control(&cmdline).map_err(|rule| rule.at("boot.cmdline"))?;
    let tables = file.tables.unwrap_or_default();
    if (arch, tables) == (Architecture::X86_64, BootTables::DeviceTree) {
        return Err(Rule::from(BootRule::Tree).at("boot.tables"));
    }
    Ok(Boot { kernel, initramfs, cmdline, tables })
}
