//! A configuration with paths that another monitor can use: absolute, and of Unicode.

use std::io;
use std::path::{Path, PathBuf, absolute};

use egm_config::{ConfigErrors, Console, DeviceKind, Spec};

use egm_report::{Blame, Remedy, Report};

/// Why a file is no machine that another monitor can run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// It is not a configuration.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// It has a path that is relative to nowhere.
    #[error("cannot find the folder of {}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    /// It has a path that no argument can hold.
    #[error("{path:?} has a control character, or is no Unicode")]
    Path { path: PathBuf },
}

impl Report for LoadError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Config(error) => error.remedy(),
            Self::Folder { .. } => Blame::Configuration.help("name it by its whole path"),
            Self::Path { .. } => Blame::Configuration.help("rename the file, or its folder"),
        }
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Config(errors) => errors.excerpt(),
            _ => None,
        }
    }

    fn others(&self) -> Vec<&dyn Report> {
        match self {
            Self::Config(errors) => errors.others(),
            _ => Vec::new(),
        }
    }
}

/// The machine in the configuration file `path`, with paths that are absolute and of Unicode.
///
/// # Errors
/// [`LoadError`].
pub(crate) fn load(path: &Path) -> Result<Spec, LoadError> {
    let mut spec = egm_config::load(path)?;
    plain(&mut spec.boot.kernel)?;
    spec.boot.initramfs.as_mut().map(plain).transpose()?;
    if let Console::File { path } | Console::Socket { path } = &mut spec.console {
        plain(path)?;
    }
    for device in &mut spec.devices {
        match &mut device.kind {
            DeviceKind::VirtioBlk { path, .. }
            | DeviceKind::VirtioVsock { socket: Some(path), .. }
            | DeviceKind::VfioUser { socket: path } => plain(path)?,
            _ => {}
        }
    }
    Ok(spec)
}

/// Makes `path` one that does not depend on where the monitor is started.
pub(super) fn plain(path: &mut PathBuf) -> Result<(), LoadError> {
    *path = absolute(&*path).map_err(|source| LoadError::Folder { path: path.clone(), source })?;
    let good = path.to_str().is_some_and(|text| !text.contains(char::is_control));
    if good { Ok(()) } else { Err(LoadError::Path { path: path.clone() }) }
}
