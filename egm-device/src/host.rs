//! The host of a command: the arguments of all commands that read one.

use std::io;
use std::path::{Path, PathBuf};

use egm_report::json::{self, JsonError};
use egm_report::{Blame, Remedy, Report};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::bounded;
use crate::ledger::{Ledger, Paths};
use crate::region::{HostFacts, HostFile, Region, Survey};

/// The host to read, or a record of another one
#[derive(Debug, clap::Args)]
pub struct Host {
    #[command(flatten)]
    local: LocalHost,
    /// Host that "egm-device regions --json" recorded, instead of this one
    #[arg(long, value_name = "FILE", conflicts_with_all = ["root", "host_files"])]
    recorded: Option<PathBuf>,
}

/// The host to read, with its ledger
#[derive(Debug, clap::Args)]
pub(crate) struct LocalHost {
    /// Folder of host files (*.json), which name memory hidden from the kernel [default: /etc/egm-device/host]
    #[arg(long, value_name = "FOLDER")]
    host_files: Option<PathBuf>,
    /// Folder with a copy of a host's /proc and /sys, to read instead of this host; no device is opened
    #[arg(long, value_name = "FOLDER", default_value = "/", hide_default_value = true)]
    root: PathBuf,
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
    /// This host; `None` for a record of another one, which has neither memory nor a ledger here.
    pub(crate) fn local(&self) -> Option<&LocalHost> {
        self.recorded.is_none().then_some(&self.local)
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
            None => self.local.survey(),
        }
    }
}

impl LocalHost {
    /// The folder that this host's files are below.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Facts and regions of this host.
    ///
    /// # Errors
    /// A root or host files that cannot be read or are of something else.
    pub(crate) fn survey(&self) -> Result<Survey, Box<dyn Report>> {
        self.check_root()?;
        Ok(Survey::of(&self.root, &self.host_files()?))
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

    /// Reason that this host's KVM cannot be opened, if it has KVM.
    pub(crate) fn no_kvm(&self) -> Option<io::Error> {
        let kvm = self.root.join("dev/kvm");
        kvm.exists().then(|| std::fs::File::open(kvm).err()).flatten()
    }

    /// The host's ledger, if it has one since it booted: showing a host makes none.
    pub(crate) fn ledger(&self) -> Result<Option<Ledger>, Box<dyn Report>> {
        if !Paths::below(&self.root).run.is_dir() {
            return Ok(None);
        }
        Ok(Some(Ledger::of_host(&self.root)?))
    }
}

/// A folder that was named holds no host.
#[derive(Debug, thiserror::Error)]
enum NoHost {
    #[error("cannot read a host below {}: it has neither proc/meminfo nor sys/devices/system/node", .0.display())]
    Root(PathBuf),
    #[error("cannot read host files in {}: it is no folder", .0.display())]
    HostFiles(PathBuf),
}

impl Report for NoHost {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(match self {
            Self::Root(_) => "name with --root a folder with a host's proc and sys in it",
            Self::HostFiles(_) => "name a folder that exists, or leave --host-files out",
        })
    }
}

/// A file of this program that cannot be read back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, made_by: &'static str, source: io::Error },
    #[error("{}:{}:{}: not {what} as this program writes it", path.display(), source.line, source.column)]
    Json { path: PathBuf, what: &'static str, made_by: &'static str, source: Box<JsonError> },
    /// A record of the other program.
    #[error("{} was recorded by \"egm-vmm facts\", which is for \"egm-vmm plan --facts\"", path.display())]
    Facts { path: PathBuf, made_by: &'static str },
}

impl Report for RecordError {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help(match self {
            Self::Read { made_by, .. } => format!("make it: {made_by}"),
            Self::Json { made_by, .. } => format!("make it again: {made_by}"),
            Self::Facts { made_by, .. } => format!("record the host for this program too: {made_by}"),
        })
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
