//! Which host a command is about: every command that reads one takes these arguments.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::ledger::{Identity, Ledger, Paths};
use crate::region::{HostFacts, HostFile, Region, Survey};
use crate::report::{Blame, Report};

/// Which host
#[derive(Debug, clap::Args)]
pub(super) struct Host {
    /// Folder of host files (*.json), which name memory that was hidden from the kernel
    #[arg(long, value_name = "FOLDER", default_value = "/etc/egm-device/host")]
    host_files: PathBuf,
    /// Read a copy of a host's /proc and /sys in this folder instead
    #[arg(long, value_name = "FOLDER", default_value = "/", hide_default_value = true)]
    root: PathBuf,
    /// Take another host, as "egm-device regions --json" recorded it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["root", "host_files"])]
    facts: Option<PathBuf>,
}

/// What of a recorded host is needed to plan for it.
#[derive(Debug, Deserialize)]
pub(super) struct Recorded {
    /// What is known of the host.
    pub(super) host: HostFacts,
    /// Its regions.
    pub(super) regions: Vec<Region>,
}

impl Host {
    /// The folder that this host's files are below.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Whether it is another host, of which only the facts are known.
    pub(super) fn is_recorded(&self) -> bool {
        self.facts.is_some()
    }

    /// The host that was recorded, or this one.
    pub(super) fn survey(&self) -> Result<Survey, Box<dyn Report>> {
        match &self.facts {
            Some(path) => {
                let Recorded { host, regions } =
                    load(path, "a host", "egm-device regions --json > host.json")?;
                Ok(Survey { host, regions, refused: Vec::new() })
            }
            None => Ok(Survey::of(&self.root, &HostFile::load_all(&self.host_files)?)),
        }
    }

    /// The host's ledger, if it has one since it booted: showing a host makes none.
    pub(super) fn ledger(&self) -> Result<Option<Ledger>, Box<dyn Report>> {
        let paths = Paths::below(&self.root);
        if self.facts.is_some() || !paths.run.is_dir() {
            return Ok(None);
        }
        let identity = Identity::read(&self.root).map_err(BootError)?;
        Ok(Some(Ledger::open(paths, identity)?))
    }
}

/// A ledger needs to know the boot.
#[derive(Debug, thiserror::Error)]
#[error("cannot tell which boot this is")]
pub(super) struct BootError(#[from] io::Error);

impl Report for BootError {
    fn blame(&self) -> Blame {
        Blame::Host
    }
}

/// Why a file that this program wrote cannot be read back.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// It is something else.
    #[error("{}:{}:{}: not {what} as this program writes it", path.display(), source.line(), source.column())]
    Json {
        path: PathBuf,
        what: &'static str,
        /// The command that writes one.
        made_by: &'static str,
        source: serde_json::Error,
    },
}

impl Report for RecordError {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Read { .. } => None,
            Self::Json { made_by, .. } => Some(format!("make it again: {made_by}")),
        }
    }
}

/// Reads back what `made_by` wrote.
pub(super) fn load<T: DeserializeOwned>(
    path: &Path,
    what: &'static str,
    made_by: &'static str,
) -> Result<T, RecordError> {
    let bytes = std::fs::read(path).map_err(|source| RecordError::Read { path: path.to_owned(), source })?;
    let json = |source| RecordError::Json { path: path.to_owned(), what, made_by, source };
    serde_json::from_slice(&bytes).map_err(json)
}
