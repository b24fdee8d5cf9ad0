//! Failures to get or return slices.

use std::io;

use egm_device::broker::ClientError;
use egm_device::ledger::{GrantError, LedgerError};

use crate::error::{Blame, Report};
use crate::facts::FactsError;
use crate::plan::PlanError;

/// Attempts to take planned slices: another process may take one first. The error of the last attempt is final.
pub(super) const ATTEMPTS: u32 = 4;

/// Why a machine does not have its slices.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
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
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: GrantError,
    },
    /// A GPU is refused.
    #[error("cannot claim the machine's GPUs in region \"{region}\"")]
    Gpus {
        /// A region that they reach.
        region: String,
        /// The reason.
        #[source]
        source: GrantError,
    },
    /// A broker does not grant a slice, or does not take it back.
    #[error("cannot borrow slice \"{id}\" from the broker")]
    Broker {
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: ClientError,
    },
    /// Each time that the slices were taken, pages were retired meanwhile, and the slices belonged elsewhere.
    #[error("the host's regions change faster than slices can be taken: tried {ATTEMPTS} times")]
    Moved,
    /// A slice could not be scrubbed at the end.
    #[error("slice \"{id}\" is free again, but not scrubbed: its next owner waits for that")]
    GiveBack {
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: GrantError,
    },
    /// A slice is still in use at the end.
    #[error(
        "slice \"{id}\" is not given back before this process ends: storage that hangs may still write to it"
    )]
    InUse {
        /// The backing.
        id: String,
    },
}

impl Report for LeaseError {
    fn blame(&self) -> Blame {
        match self {
            Self::Facts(error) => error.blame(),
            Self::Plan(error) => error.blame(),
            Self::Ledger(error) => error.blame(),
            Self::Grant { source, .. } | Self::Gpus { source, .. } | Self::GiveBack { source, .. } => {
                source.blame()
            }
            Self::Broker { source, .. } => source.blame(),
            Self::Boot(_) | Self::Moved | Self::InUse { .. } => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Facts(error) => error.help(),
            Self::Plan(error) => error.help(),
            Self::Ledger(error) => error.help(),
            Self::Grant { source, .. } | Self::Gpus { source, .. } | Self::GiveBack { source, .. } => {
                source.help()
            }
            Self::Broker { source, .. } => source.help(),
            Self::Boot(_) | Self::Moved | Self::InUse { .. } => None,
        }
    }
}
