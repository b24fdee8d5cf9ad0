//! What a configuration holds, as words of a command line or of XML; and a configuration whose paths are such words.

use std::io;
use std::path::{Path, PathBuf, absolute};

use egm_config::{Clique, ConfigError, Console, DeviceKind, PageSize, Spec};

use crate::report::{Blame, Report};

/// Why a file is no machine that another monitor can be told of.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It is not a configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It has a path that is relative to nowhere.
    #[error("cannot find the folder of {}", path.display())]
    Folder {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It has a path that no argument can hold.
    #[error("{path:?} has a control character, or is no Unicode")]
    Path {
        /// The path.
        path: PathBuf,
    },
}

impl Report for LoadError {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.help(),
            Self::Folder { .. } => Some("name the configuration by its whole path".to_owned()),
            Self::Path { .. } => Some("rename the file, or its folder".to_owned()),
        }
    }
}

/// The machine in the configuration file `path`, with paths that are absolute and of Unicode.
///
/// # Errors
/// [`LoadError`].
pub fn load(path: &Path) -> Result<Spec, LoadError> {
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

fn plain(path: &mut PathBuf) -> Result<(), LoadError> {
    *path = absolute(&*path).map_err(|source| LoadError::Folder { path: path.clone(), source })?;
    let good = path.to_str().is_some_and(|text| !text.contains(char::is_control));
    if good { Ok(()) } else { Err(LoadError::Path { path: path.clone() }) }
}

/// A path that [`load`] has looked at.
pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// `52:54:00:12:34:56`
pub(super) fn mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The size of hugetlb pages, as all monitors and the kernel write it; `None` for others.
pub(super) const fn hugetlb(page: PageSize) -> Option<&'static str> {
    match page {
        PageSize::Auto | PageSize::Size4K => None,
        PageSize::Size2M => Some("2M"),
        PageSize::Size1G => Some("1G"),
    }
}

/// The page size of a pool with pages of `bytes`.
pub(super) const fn pool_page(bytes: u64) -> PageSize {
    if bytes == 1 << 30 { PageSize::Size1G } else { PageSize::Size2M }
}

/// The number that a GPU's driver is told; other monitors choose none by themselves.
pub(super) const fn clique(clique: Clique) -> Option<u8> {
    match clique {
        Clique::Number(number) => Some(number),
        Clique::Auto | Clique::Off => None,
    }
}
