//! Why a snapshot cannot be written or restored.

use std::io;
use std::path::{Path, PathBuf};

use egm_report::show;

use super::format::MACHINE;
use super::mismatch::Mismatch;
use crate::error::{Blame, Remedy, Report};

/// Why no snapshot was written. The machine is as before, and the folder as well.
#[derive(Debug, thiserror::Error)]
#[error("cannot write a snapshot to {}: {reason}", folder.display())]
pub struct SnapshotError {
    pub(crate) folder: PathBuf,
    pub(crate) reason: SaveReason,
}

/// The cause of a [`SnapshotError`].
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum SaveReason {
    /// A file of a complete or interrupted snapshot is there.
    #[error("the folder has {name} already")]
    Present { name: String },
    #[error("{step} {name}: {source}")]
    File { step: &'static str, name: String, source: io::Error },
    /// A signal would end the process.
    #[error("the memory file has {}, and this process may write {}", show::size(*size), show::size(*limit))]
    FileLimit { size: u64, limit: u64 },
    /// Something that no snapshot has.
    #[error("{what}")]
    Refused { what: String, remedy: String },
    #[error("the machine was resumed meanwhile, or it ends")]
    NotPaused,
    #[error("{name} does not answer")]
    Silent { name: String },
    #[error("{0}")]
    Kernel(String),
}

impl Report for SnapshotError {
    fn remedy(&self) -> Remedy {
        match &self.reason {
            SaveReason::File { source, .. } if source.kind() == io::ErrorKind::StorageFull => Blame::Host
                .help(format!("free space there, or name another folder: df -h {}", self.folder.display())),
            reason => reason.remedy(),
        }
    }
}

impl SaveReason {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Present { .. } => Blame::Configuration.help(
                "name another folder, or remove what is left of a snapshot:\nrm FOLDER/{snapshot,machine,state}.json* FOLDER/memory*",
            ),
            Self::File { .. } => Blame::Host.help("name a folder that this process may write"),
            Self::FileLimit { .. } => Blame::Host.help("raise the limit of file sizes: ulimit -f unlimited"),
            Self::Refused { remedy, .. } => Blame::Configuration.help(remedy.clone()),
            Self::NotPaused => Blame::Configuration.help("use vm.pause first"),
            Self::Silent { .. } => {
                Blame::Host.help("look for what is wrong with the storage below it: dmesg")
            }
            Self::Kernel(_) => Blame::Host.help("use vm.resume; the kernel's log may have the reason: dmesg"),
        }
    }
}

/// Why a snapshot cannot be restored. No vCPU has run.
#[derive(Debug, thiserror::Error)]
#[error("cannot restore {}: {reason}", folder.display())]
pub struct RestoreError {
    pub(crate) folder: PathBuf,
    pub(crate) reason: RestoreReason,
}

/// The cause of a [`RestoreError`].
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum RestoreReason {
    #[error("cannot read {name}: {source}")]
    File { name: &'static str, source: io::Error },
    /// No JSON of ours.
    #[error("{name} is damaged, or of another version: {source}")]
    Json { name: &'static str, source: serde_json::Error },
    #[error("it has format {found}, and this program reads format {known}")]
    Format { found: u32, known: u32 },
    #[error("it is of a machine of {found}, and this host is {host}")]
    Architecture { found: String, host: &'static str },
    /// Its digest differs from that of `snapshot.json`.
    #[error("{name} was changed after the snapshot")]
    Changed { name: &'static str },
    /// Cut short, or that of another snapshot.
    #[error("the file \"memory\" is that of another snapshot, or cut short")]
    Memory,
    #[error("its configuration cannot be used: {0}")]
    Configuration(String),
    /// A part of the state.
    #[error("its state does not fit the machine: {0}")]
    Mismatch(#[from] Mismatch),
    #[error("{0}")]
    Kvm(String),
}

impl RestoreReason {
    /// The error of `folder`.
    pub(crate) fn of(self, folder: &Path) -> RestoreError {
        RestoreError { folder: folder.to_owned(), reason: self }
    }
}

impl Report for RestoreError {
    fn remedy(&self) -> Remedy {
        match &self.reason {
            RestoreReason::File { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Blame::Configuration.help("name the folder of a complete snapshot: egm-vmm ctl snapshot DIR")
            }
            RestoreReason::File { .. } => Blame::Configuration.help("name a folder that you may read"),
            RestoreReason::Format { .. } => Blame::Configuration
                .help("restore it with the version of egm-vmm that wrote it, which its snapshot.json names"),
            RestoreReason::Architecture { .. } => Blame::Configuration.help("restore it on a host like its own"),
            RestoreReason::Json { .. }
            | RestoreReason::Changed { .. }
            | RestoreReason::Memory => {
                Blame::Configuration.help("copy the snapshot again with all its files, or write a new one")
            }
            RestoreReason::Configuration(_) => {
                let machine = self.folder.join(MACHINE);
                Blame::Configuration.help(format!("look at it: egm-vmm plan {}", machine.display()))
            }
            RestoreReason::Mismatch(_) | RestoreReason::Kvm(_) => Blame::Host.help(
                "restore it on the host where it was written, with the same disks, devices and version of egm-vmm",
            ),
        }
    }
}
