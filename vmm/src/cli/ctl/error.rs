//! Failures of a client, and the paths that it names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Blame, Remedy, Report};

/// Time that a machine has to stop its vCPUs and to flush its disks (30 s) after a request to stop.
pub(super) const STOP: Duration = Duration::from_secs(45);

/// Why a request, or one of its steps, is not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum CtlError {
    /// A machine ends before it has returned a function.
    #[error("cannot wait for device \"{id}\": the machine ends")]
    Unreturned { id: String },
    /// A disk left that could not be flushed.
    #[error("{text}")]
    Unflushed { text: String },
    /// A slice left the guest, and could not be returned.
    #[error("{text}")]
    NotReturned { text: String },
    /// A path that no request can name.
    #[error("cannot name {}: it is not UTF-8, or the working directory is gone", path.display())]
    Unnamed { path: PathBuf },
    /// A plugged device that no text describes, so that no restored machine could plug it in.
    #[error(
        "cannot unplug device \"{id}\": it cannot be plugged in again: it has a tap by descriptor, or it is a slice and its bytes \
         would be lost"
    )]
    Undescribed { id: String },
    /// An upgrade failed after it had begun.
    #[error("cannot upgrade the machine: {reason}")]
    NotUpgraded { reason: String },
    /// A machine goes on although it was to stop.
    #[error("cannot end the machine within {} s", STOP.as_secs())]
    Unstopped,
}

impl Report for CtlError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Unreturned { .. } => {
                Blame::Host.help("the host has the device once the machine's program has ended")
            }
            Self::Unflushed { .. } => {
                Blame::Host.help("check the disk's file system, and look at dmesg on the host")
            }
            Self::NotReturned { .. } => {
                Blame::Host.help("look at the state of its bytes: egm-device ledger show")
            }
            Self::Unnamed { .. } => Blame::Configuration.help("name it by an absolute path of UTF-8"),
            Self::Undescribed { id } => Blame::Configuration.help(format!(
                "unplug it, if the guest can do without it: egm-vmm ctl --api SOCKET unplug {id}"
            )),
            Self::NotUpgraded { .. } => {
                Blame::Host.help("look at the machine: egm-vmm ctl --api SOCKET machine")
            }
            Self::Unstopped => {
                Blame::Host.help("look at its messages; SIGTERM to its process ends the wait for its disks")
            }
        }
    }
}

/// The absolute form of `path`.
pub(super) fn absolute(path: &Path) -> Result<String, CtlError> {
    let absolute = std::path::absolute(path).ok();
    let text = absolute.as_deref().and_then(Path::to_str);
    text.map(str::to_owned).ok_or_else(|| CtlError::Unnamed { path: path.to_owned() })
}
