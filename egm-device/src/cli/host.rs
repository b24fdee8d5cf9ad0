//! Which host a command is about: every command that reads one takes these arguments.

use std::path::PathBuf;

use crate::region::{HostFile, HostFileError, Survey};

/// Which host
#[derive(Debug, clap::Args)]
pub(super) struct Host {
    /// Folder of host files (*.json), which name memory that was hidden from the kernel
    #[arg(long, value_name = "FOLDER", default_value = "/etc/egm-device/host")]
    host_files: PathBuf,
    /// Read a copy of a host's /proc and /sys in this folder instead
    #[arg(long, value_name = "FOLDER", default_value = "/", hide_default_value = true)]
    root: PathBuf,
}

impl Host {
    /// The host and its regions.
    pub(super) fn survey(&self) -> Result<Survey, HostFileError> {
        Ok(Survey::of(&self.root, &HostFile::load_all(&self.host_files)?))
    }
}
