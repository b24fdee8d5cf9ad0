//! Refusals that clients get for the host's errors. The whole text names owners and devices: it is for the audit log.

use super::source::GrantFailure;
use super::wire::RefusalReply;
use crate::policy::Peer;

/// Reason that a slice stays with its client after a failed return.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReturnFailure {
    /// A process still has it.
    #[error("{0}")]
    Used(String),
    /// There is no thread to take it: the kernel's reason.
    #[error(
        "cannot take the slice back: no thread to scrub it ({0}): raise the limit of tasks of the broker"
    )]
    NoThread(String),
}

impl ReturnFailure {
    /// The refusal for `peer`.
    pub(super) fn refused(&self, peer: &Peer) -> RefusalReply {
        let ordinary = match self {
            Self::Used(_) => {
                "another process still has the memory: the slice is on your account until none has"
            }
            Self::NoThread(_) => {
                "the host cannot take the slice back now: it stays on your account, return it again"
            }
        };
        refused(peer, &self.to_string(), ordinary)
    }
}

/// The refusal for `peer` of a slice that could not be made.
pub(super) fn grant_failed(peer: &Peer, why: &GrantFailure) -> RefusalReply {
    let ordinary = "the host could not make the slice: ask an operator, or for another region";
    refused(peer, &why.to_string(), ordinary)
}

fn refused(peer: &Peer, error: &str, ordinary: &str) -> RefusalReply {
    let error = error.lines().map(str::trim).collect::<Vec<_>>().join("; ");
    let error: String = error.chars().take(1024).collect();
    match peer.uid {
        0 => RefusalReply::because(error),
        _ => RefusalReply { cause: Some(error), ..RefusalReply::because(ordinary) },
    }
}
