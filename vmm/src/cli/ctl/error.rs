//! Failures of a client, and the folders that it names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Blame, Remedy, Report};

/// Time that a machine has to stop its vCPUs and to flush its disks (30 s) after a request to stop.
pub(super) const STOP: Duration = Duration::from_secs(45);

/// A machine ends before it has returned a function.
#[derive(Debug, thiserror::Error)]
#[error("cannot wait for device \"{id}\": the machine ends")]
pub(super) struct Unreturned {
    pub(super) id: String,
}

impl Report for Unreturned {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("the host has the device once the machine's program has ended")
    }
}

/// A disk left that could not be flushed.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Unflushed {
    pub(super) text: String,
}

impl Report for Unflushed {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("check the disk's file system, and look at dmesg on the host")
    }
}

/// A path that no request can name.
#[derive(Debug, thiserror::Error)]
#[error("cannot name the folder {}: it is not UTF-8, or the working directory is gone", folder.display())]
pub(super) struct Unnamed {
    folder: PathBuf,
}

impl Report for Unnamed {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help("name it by an absolute path of UTF-8")
    }
}

/// The absolute path of `folder`.
pub(super) fn absolute(folder: &Path) -> Result<String, Unnamed> {
    let absolute = std::path::absolute(folder).ok();
    let path = absolute.as_deref().and_then(Path::to_str);
    path.map(str::to_owned).ok_or_else(|| Unnamed { folder: folder.to_owned() })
}

/// A plugged device that no text describes, so that no restored machine could plug it in.
#[derive(Debug, thiserror::Error)]
#[error("cannot unplug device \"{id}\": it has a tap by descriptor, and could not be plugged in again")]
pub(super) struct Undescribed {
    pub(super) id: String,
}

impl Report for Undescribed {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(format!(
            "unplug it, if the guest can do without it: egm-vmm ctl --api SOCKET unplug {}",
            self.id
        ))
    }
}

/// An upgrade failed after it had begun.
#[derive(Debug, thiserror::Error)]
#[error("cannot upgrade the machine: {reason}")]
pub(super) struct NotUpgraded {
    pub(super) reason: String,
}

impl Report for NotUpgraded {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("look at the machine: egm-vmm ctl --api SOCKET machine")
    }
}

/// A machine goes on although it was to stop.
#[derive(Debug, thiserror::Error)]
#[error("cannot end the machine within {} s", STOP.as_secs())]
pub(super) struct Unstopped;

impl Report for Unstopped {
    fn remedy(&self) -> Remedy {
        Blame::Host.help("look at its messages; SIGTERM to its process ends the wait for its disks")
    }
}
