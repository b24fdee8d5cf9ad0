//! Errors of the ledger.

use std::io;
use std::path::PathBuf;

use egm_address::{InRegion, Offset, PciAddress, Span, SpanSet};
use egm_report::show::{exact, first_of};
use egm_report::{Blame, Remedy, Report};

use super::held::HeldBytes;
use super::record::GrantState;
use crate::backing::{BackingError, RetiredListError};
use crate::carve::plan::{Cause, PlacementError, Request};
use crate::free::Evidence;
use crate::scrub::{self, ScrubError};
use crate::trust::Conflict;

/// The ledger's own files fail.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum LedgerError {
    /// The record cannot be read or replaced; its earlier content still holds.
    #[error("cannot {step} the ledger's record")]
    Record {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot lock {}", path.display())]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot record region \"{region}\": its name or its address is invalid")]
    Region { region: String },
}

impl Report for LedgerError {
    fn remedy(&self) -> Remedy {
        let source = match self {
            Self::Record { source, .. } | Self::Lock { source, .. } => source,
            Self::Region { .. } => {
                return Blame::Configuration.help("name it with 32 of a-z, 0-9, '.' and '-' at most");
            }
        };
        Blame::Host.help(match source.kind() {
            io::ErrorKind::PermissionDenied => {
                "run it as root; other users get slices from the broker: egm-device carve free shows how much"
            }
            io::ErrorKind::TimedOut => {
                "\"fuser -v\" with that path names the process that has it; 30 s are long, so it may be stopped"
            }
            io::ErrorKind::StorageFull => "free some space where the ledger is: /var/lib/egm-device",
            _ => "let this user write below /run/egm-device and /var/lib/egm-device, and check their file systems",
        })
    }
}

/// Why a slice is not granted.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum GrantError {
    #[error("{short}{}", held_by(holders))]
    Short {
        short: Box<PlacementError>,
        /// Owners of the bytes in the way, if any are.
        holders: Vec<HeldBytes>,
    },
    /// Two trust domains would share a region that a GPU reaches.
    #[error(transparent)]
    Exclusive(#[from] Box<Conflict>),
    #[error("cannot claim GPU {function}: this host has no such PCI function")]
    NoFunction { function: PciAddress },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Backing(#[from] BackingError),
    #[error(transparent)]
    Retired(#[from] RetiredListError),
    /// An earlier owner's bytes could not be scrubbed; what was done stays done.
    #[error("cannot scrub a slice of region \"{region}\" for its next owner")]
    Scrub {
        region: String,
        #[source]
        source: ScrubError,
    },
    #[error("cannot grant a slice of region \"{region}\": the request was cancelled")]
    Cancelled { region: String },
    /// The slice's owner returns it, but its memory is in use.
    #[error(
        "cannot take back the slice of {owner} at {offset:#x} of region \"{region}\": in use by {}",
        Evidence::summary(evidence)
    )]
    StillUsed { region: String, offset: u64, owner: String, evidence: Vec<Evidence> },
}

impl Report for GrantError {
    fn remedy(&self) -> Remedy {
        match self {
            // A request that no host could grant is a mistake; memory that is missing or in use is the host's lack.
            Self::Short { short, .. } => match short.cause {
                Cause::Size { .. } | Cause::Align | Cause::Unaligned { .. } => Blame::Configuration.into(),
                _ => Blame::Host.into(),
            },
            Self::Ledger(error) => error.remedy(),
            Self::Exclusive(conflict) => conflict.remedy(),
            Self::Scrub { source, .. } if matches!(source.cause, scrub::Cause::NotZero { .. }) => Blame::Host
                .help(
                    "end the process that still maps the slice; if none does, the memory fails: replace it",
                ),
            Self::Backing(BackingError::OtherHost { .. }) => Blame::Configuration.help(
                "leave --root out on the host that has the region; a copy of a host is for plans and reports",
            ),
            Self::NoFunction { .. } => Blame::Host.help("lspci -D lists the functions of this host"),
            Self::Backing(BackingError::Busy { .. }) => {
                Blame::Host.help("get a slice from the broker (--broker SOCKET), or end that process")
            }
            Self::Backing(BackingError::Interrupted { .. }) => Blame::Host.help("repeat the command"),
            Self::StillUsed { .. } => Blame::Host
                .help("end that process: the slice is quarantined until then (egm-device ledger show)"),
            Self::Backing(_) | Self::Retired(_) | Self::Scrub { .. } | Self::Cancelled { .. } => {
                Blame::Host.into()
            }
        }
    }
}

/// `short` with the owners in the way: of the requested place if there is one, of the whole region otherwise.
pub(super) fn in_the_way(
    short: PlacementError,
    request: &Request,
    mut held: Vec<HeldBytes>,
    in_use: &SpanSet<InRegion>,
) -> GrantError {
    let new = in_use.minus(&held.iter().map(|held| held.span).collect());
    held.extend(new.iter().map(|span| HeldBytes::unrecorded(span, GrantState::Quarantined)));
    if let Some(wanted) = request.at.and_then(|at| Span::new(Offset::new(at), request.size).ok()) {
        held.retain(|held| held.span.overlaps(wanted));
    }
    GrantError::Short { short: Box::new(short), holders: held }
}

/// `; held by vm1 (process 12, user 0) at 0x0 (4KiB)`.
fn held_by(holders: &[HeldBytes]) -> String {
    let name = |held: &HeldBytes| {
        let owner = held.owner.as_ref().map_or_else(|| "an unknown process".to_owned(), ToString::to_string);
        let place = format!("at {} ({})", held.span.start(), exact(held.span.size()));
        if held.usage == GrantState::Quarantined {
            return format!("quarantine after {owner} {place}");
        }
        format!("{owner} {place}")
    };
    if holders.is_empty() {
        String::new()
    } else {
        format!("; held by {}", first_of(holders.iter().map(name)))
    }
}
