//! The host of a command: the arguments of all commands that read one.

use std::io;
use std::path::{Path, PathBuf};

use egm_report::json::{self, JsonError};
use egm_report::{Blame, Report};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::bounded;
use crate::ledger::{Identity, Ledger, Paths};
use crate::region::{HostFacts, HostFile, Region, Survey};

/// Which host
#[derive(Debug, clap::Args)]
pub struct Host {
    /// Folder of host files (*.json), which name memory that was hidden from the kernel; the default is
    /// /etc/egm-device/host
    #[arg(long, value_name = "FOLDER")]
    host_files: Option<PathBuf>,
    /// Read a copy of a host's /proc and /sys in this folder instead; devices of such a host are never opened
    #[arg(long, value_name = "FOLDER", default_value = "/", hide_default_value = true)]
    root: PathBuf,
    /// Take another host, as "egm-device regions --json" recorded it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["root", "host_files"])]
    recorded: Option<PathBuf>,
}

/// Largest file of a recorded host.
const MAX_RECORD: u64 = 64 << 20;

/// Command that records a host. The other program's facts are of the same host, but for other questions.
const RECORD: &str = "egm-device regions --json > host.json";

/// The part of a recorded host that a plan needs.
#[derive(Debug, Deserialize)]
pub(crate) struct Recorded {
    /// Facts of the host.
    pub(crate) host: HostFacts,
    pub(crate) regions: Vec<Region>,
}

impl Host {
    /// The folder that this host's files are below.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Whether it is another host, of which only the facts are known.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorded.is_some()
    }

    /// Facts and regions of the recorded host, or of this one.
    ///
    /// # Errors
    /// A record, a root or host files that cannot be read or are of something else.
    pub fn survey(&self) -> Result<Survey, Box<dyn Report>> {
        match &self.recorded {
            Some(path) => {
                let Recorded { host, regions } = load(path, "a host", RECORD)?;
                Ok(Survey { host, regions, refused: Vec::new() })
            }
            None => {
                self.check_root()?;
                Ok(Survey::of(&self.root, &self.host_files()?))
            }
        }
    }

    /// Below another folder than `/` may be anything.
    fn check_root(&self) -> Result<(), NoHost> {
        let parts = ["proc/meminfo", "sys/devices/system/node"];
        if parts.iter().any(|part| self.root.join(part).exists()) {
            return Ok(());
        }
        Err(NoHost::Root(self.root.clone()))
    }

    /// A host may have no host files, but a folder that was named is meant.
    fn host_files(&self) -> Result<Vec<HostFile>, Box<dyn Report>> {
        match &self.host_files {
            Some(folder) if !folder.is_dir() => Err(NoHost::HostFiles(folder.clone()).into()),
            folder => Ok(HostFile::load_all(&self.root, folder.as_deref())?),
        }
    }

    /// Why this host's KVM cannot be opened, where there is one.
    pub(crate) fn no_kvm(&self) -> Option<io::Error> {
        let kvm = self.root.join("dev/kvm");
        let asked = self.recorded.is_none() && kvm.exists();
        asked.then(|| std::fs::File::open(kvm).err()).flatten()
    }

    /// The host's ledger, if it has one since it booted: showing a host makes none.
    pub(crate) fn ledger(&self) -> Result<Option<Ledger>, Box<dyn Report>> {
        let paths = Paths::below(&self.root);
        if self.recorded.is_some() || !paths.run.is_dir() {
            return Ok(None);
        }
        let identity = Identity::read(&self.root).map_err(BootError)?;
        Ok(Some(Ledger::open(paths, identity)?))
    }
}

/// A folder that was named holds no host.
#[derive(Debug, thiserror::Error)]
enum NoHost {
    #[error("{} holds no copy of a host: it has neither proc/meminfo nor sys/devices/system/node", .0.display())]
    Root(PathBuf),
    #[error("{} is no folder of host files", .0.display())]
    HostFiles(PathBuf),
}

impl Report for NoHost {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Root(_) => "name with --root a folder with a host's proc and sys in it",
            Self::HostFiles(_) => "name a folder that exists, or leave --host-files out",
        };
        Some(help.to_owned())
    }
}

/// A ledger needs to know the boot.
#[derive(Debug, thiserror::Error)]
#[error("cannot tell which boot this is")]
pub(crate) struct BootError(#[from] io::Error);

impl Report for BootError {
    fn blame(&self) -> Blame {
        Blame::Host
    }
}

/// Why a file that this program wrote cannot be read back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        /// The command that writes one.
        made_by: &'static str,
        source: io::Error,
    },
    /// It has other contents.
    #[error("{}:{}:{}: not {what} as this program writes it", path.display(), source.line, source.column)]
    Json {
        path: PathBuf,
        what: &'static str,
        /// The command that writes one.
        made_by: &'static str,
        source: Box<JsonError>,
    },
    /// It is the other program's record of a host.
    #[error("{} was recorded by \"egm-vmm facts\", which is for \"egm-vmm plan --facts\"", path.display())]
    Facts {
        path: PathBuf,
        /// The command that writes one for this program.
        made_by: &'static str,
    },
}

impl Report for RecordError {
    fn blame(&self) -> Blame {
        Blame::Configuration
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Read { made_by, .. } => Some(format!("make it: {made_by}")),
            Self::Json { made_by, .. } => Some(format!("make it again: {made_by}")),
            Self::Facts { made_by, .. } => Some(format!("record the host for this program too: {made_by}")),
        }
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Json { source, .. } => Some(source.excerpt.clone()),
            _ => None,
        }
    }
}

/// What only facts of `egm-vmm` have.
#[derive(Deserialize)]
struct OfFacts {
    #[serde(rename = "kvm")]
    _kvm: IgnoredAny,
    #[serde(rename = "functions")]
    _functions: IgnoredAny,
}

/// Reads back what `made_by` wrote.
pub(crate) fn load<T: DeserializeOwned>(
    path: &Path,
    what: &'static str,
    made_by: &'static str,
) -> Result<T, RecordError> {
    let read = |source| RecordError::Read { path: path.to_owned(), made_by, source };
    let bytes = std::fs::File::open(path).and_then(|file| bounded::read(file, MAX_RECORD)).map_err(read)?;
    json::from_slice(&bytes).map_err(|source| match json::from_slice::<OfFacts>(&bytes) {
        Ok(_) => RecordError::Facts { path: path.to_owned(), made_by },
        Err(_) => RecordError::Json { path: path.to_owned(), what, made_by, source },
    })
}
