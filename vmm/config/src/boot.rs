//! Rules of kernel, initial RAM disk and command line.

use std::path::{Path, PathBuf};

use super::error::{Rule, no_control};
use super::faults::Faults;
use super::file::BootFile;
use super::on_reset::OnReset;
use super::rules::{BootRule, MAX_CMDLINE, MAX_PATH};
use super::spec::{Architecture, Boot, BootTables};

/// Values of a command line in place of the file's, and a program's defaults.
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
    /// `on_reset` of a file that has none.
    pub default_on_reset: OnReset,
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

/// What is booted; `None` when it breaks a rule, which is noted. `join` makes a path of a key relative to the file that
/// wrote it.
pub(super) fn resolve(
    file: BootFile,
    overrides: &Overrides,
    arch: Option<Architecture>,
    join: impl Fn(&str, &Path) -> Result<PathBuf, Rule>,
    faults: &mut Faults,
) -> Option<Boot> {
    let mut chosen = |over: &Option<PathBuf>, written: Option<PathBuf>, key: &str| {
        let chosen = match (over, written) {
            (Some(over), _) => Some(path(over.clone())),
            (None, written) => written.map(|written| join(key, &written)),
        };
        chosen.map(|path| faults.value(key, path))
    };
    let kernel = chosen(&overrides.kernel, file.kernel, "boot.kernel");
    let initramfs = chosen(&overrides.initramfs, file.initramfs, "boot.initramfs");
    if kernel.is_none() {
        faults.note(Rule::from(BootRule::NoKernel).at("boot"));
    }
    let parts = [file.cmdline.as_deref(), overrides.append.as_deref()];
    let cmdline = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
    let cmdline = faults.value("boot.cmdline", words(cmdline));
    let tables = file.tables.unwrap_or_default();
    if (arch, tables) == (Some(Architecture::X86_64), BootTables::DeviceTree) {
        faults.note(Rule::from(BootRule::Tree).at("boot.tables"));
    }
    let initramfs = match initramfs {
        Some(path) => Some(path?),
        None => None,
    };
    Some(Boot { kernel: kernel??, initramfs, cmdline: cmdline?, tables })
}

/// `cmdline`, when a kernel reads all of it.
fn words(cmdline: String) -> Result<String, Rule> {
    if cmdline.len() > MAX_CMDLINE {
        return Err(BootRule::Long { length: cmdline.len() }.into());
    }
    no_control(&cmdline)?;
    Ok(cmdline)
}
