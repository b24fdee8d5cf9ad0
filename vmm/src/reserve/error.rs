//! Failures to reserve slices, GPUs and servers, and to return slices.

use std::io;
use std::path::PathBuf;

use egm_device::broker::ClientError;
use egm_device::ledger::{GrantError, LedgerError};
use egm_vfio::backend::BackendError;
use egm_vfio::client::OpenError;

use crate::error::{Blame, Remedy, Report};
use crate::facts::FactsError;
use crate::plan::PlanError;

/// Why a machine does not have its slices, GPUs or servers.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ReserveError {
    /// The host cannot be looked at.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// This boot has no name.
    #[error("cannot read /proc/sys/kernel/random/boot_id")]
    Boot(#[source] io::Error),
    /// The host's ledger cannot be kept.
    #[error("cannot use the ledger of the host's slices")]
    Ledger(#[from] LedgerError),
    /// A slice is refused.
    #[error("cannot take slice \"{id}\"")]
    Grant {
        id: String,
        #[source]
        source: GrantError,
    },
    /// A GPU is refused.
    #[error("cannot claim the machine's GPUs in region \"{region}\"")]
    Gpus {
        /// A region that they reach.
        region: String,
        #[source]
        source: GrantError,
    },
    /// A broker does not grant a slice.
    #[error("cannot borrow slice \"{id}\" from the broker")]
    Broker {
        id: String,
        #[source]
        source: ClientError,
    },
    /// A broker does not take a slice back.
    #[error("cannot return slice \"{id}\" to the broker")]
    BrokerReturn {
        id: String,
        #[source]
        source: ClientError,
    },
    /// In each attempt, newly retired pages changed the slices of the plan.
    #[error("the host's regions change faster than slices can be taken: tried {attempts} times")]
    Moved { attempts: u32 },
    #[error("cannot provide device \"{id}\"")]
    Device {
        id: String,
        #[source]
        source: ServerError,
    },
    /// A slice could not be scrubbed at the end.
    #[error("slice \"{id}\" is free again, but not scrubbed: its next owner waits for that")]
    GiveBack {
        id: String,
        #[source]
        source: GrantError,
    },
    /// A slice left the guest, and the host has no thread for its return.
    #[error("cannot return slice \"{id}\" before the machine ends: cannot start a thread")]
    Thread {
        id: String,
        #[source]
        source: io::Error,
    },
    /// A slice is still in use.
    #[error(
        "cannot return slice \"{id}\" before this process ends: it still has the memory, which storage that hangs may write to"
    )]
    InUse { id: String },
}

impl ReserveError {
    /// Whether another process has taken a slice first.
    pub(crate) const fn is_lost_race(&self) -> bool {
        matches!(self, Self::Grant { source: GrantError::Short { .. }, .. })
    }
}

impl Report for ReserveError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Facts(error) => error.remedy(),
            Self::Plan(error) => error.remedy(),
            Self::Ledger(error) => error.remedy(),
            Self::Grant { source, .. } | Self::Gpus { source, .. } | Self::GiveBack { source, .. } => {
                source.remedy()
            }
            Self::Broker { source, .. } | Self::BrokerReturn { source, .. } => source.remedy(),
            Self::Device { source, .. } => source.remedy(),
            Self::Boot(_) | Self::Moved { .. } | Self::Thread { .. } | Self::InUse { .. } => {
                Blame::Host.into()
            }
        }
    }
}

/// Why a server's device cannot be a guest's.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ServerError {
    /// The path names no socket.
    #[error("{} is not a socket", path.display())]
    NotSocket { path: PathBuf },
    /// No server there, or one that breaks the protocol.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It no longer answers.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl Report for ServerError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::NotSocket { .. } => {
                Blame::Configuration.help("set \"socket\" to the Unix socket that the server listens on")
            }
            Self::Open(OpenError::Connect { path, source }) => Blame::Host.help(match source.kind() {
                io::ErrorKind::PermissionDenied => {
                    format!("let this user write to it (ls -l {path}), or be root")
                }
                io::ErrorKind::WouldBlock => {
                    "the server takes no more clients: end the one that it has".to_owned()
                }
                _ => "start the server first, and set \"socket\" to where it listens".to_owned(),
            }),
            Self::Open(_) | Self::Backend(_) => Blame::Host.help("read the server's log, and start it again"),
        }
    }
}
