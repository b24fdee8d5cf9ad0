//! Errors of the ledger.

use std::io;
use std::path::PathBuf;

use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_report::show::{exact, first_of};
use egm_report::{Blame, Report};

use super::held::HeldBytes;
use super::record::GrantState;
use crate::backing::{BackingError, RetiredListError};
use crate::carve::plan::{Cause, PlacementError, Request};
use crate::free::Evidence;
use crate::scrub::{self, ScrubError};
use crate::trust::Conflict;

/// The ledger's own files fail.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The record cannot be read or replaced; its earlier content still holds.
    #[error("cannot {step} the ledger's record")]
    Record {
        /// The step that failed.
        step: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A lock cannot be taken.
    #[error("cannot lock {}", path.display())]
    Lock {
        /// The lock's file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The region has an invalid name or place.
    #[error("region \"{region}\" has a name or a place that no ledger can keep")]
    Region {
        /// Its name.
        region: String,
    },
}

impl Report for LedgerError {
    fn blame(&self) -> Blame {
        match self {
            Self::Record { .. } | Self::Lock { .. } => Blame::Host,
            Self::Region { .. } => Blame::Configuration,
        }
    }

    fn help(&self) -> Option<String> {
        let source = match self {
            Self::Record { source, .. } | Self::Lock { source, .. } => source,
            Self::Region { .. } => return Some("a name has a-z, 0-9, '.' and '-', 32 at most".to_owned()),
        };
        match source.kind() {
            io::ErrorKind::PermissionDenied => Some("run as root, or ask the broker".to_owned()),
            io::ErrorKind::TimedOut => Some(
                "another process has had it for 30 s, stopped perhaps: \"fuser -v\" with that path names it"
                    .to_owned(),
            ),
            io::ErrorKind::StorageFull => {
                Some("free some space where the ledger is: /var/lib/egm-device".to_owned())
            }
            _ => Some(
                "see that this user may write below /run/egm-device and /var/lib/egm-device, and that neither is damaged"
                    .to_owned(),
            ),
        }
    }
}

/// Why a slice is not granted.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The region has no place for it.
    #[error("{short}{}", held_by(holders))]
    Short {
        /// The missing resource.
        short: Box<PlacementError>,
        /// Owners of the bytes in the way, if any are.
        holders: Vec<HeldBytes>,
    },
    /// Two trust domains would share a region that a GPU reaches.
    #[error(transparent)]
    Exclusive(#[from] Box<Conflict>),
    /// The ledger failed.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The bytes cannot be opened.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// The bad pages cannot be read.
    #[error(transparent)]
    Retired(#[from] RetiredListError),
    /// An earlier owner's bytes could not be scrubbed; what was done stays done.
    #[error("region \"{region}\": the slice was not scrubbed for its next owner")]
    Scrub {
        /// The region.
        region: String,
        /// Why.
        #[source]
        source: ScrubError,
    },
    /// The request was cancelled.
    #[error("region \"{region}\": the request for the slice was cancelled")]
    Cancelled {
        /// The region.
        region: String,
    },
    /// The slice's owner returns it, but its memory is in use.
    #[error(
        "cannot take back the slice of {owner} at {offset:#x} of region \"{region}\": in use by {}",
        list(evidence)
    )]
    StillUsed {
        /// The region.
        region: String,
        /// First byte.
        offset: u64,
        /// The owner's name.
        owner: String,
        /// Evidence that it is in use.
        evidence: Vec<Evidence>,
    },
}

impl Report for GrantError {
    fn blame(&self) -> Blame {
        match self {
            // A request that no host could grant is a mistake; memory that is missing or in use is the host's lack.
            Self::Short { short, .. } => match short.cause {
                Cause::Size { .. } | Cause::Align | Cause::Unaligned { .. } => Blame::Configuration,
                _ => Blame::Host,
            },
            Self::Ledger(error) => error.blame(),
            Self::Backing(BackingError::OtherHost { .. }) => Blame::Configuration,
            Self::Exclusive(conflict) => conflict.blame(),
            Self::Backing(_)
            | Self::Retired(_)
            | Self::Scrub { .. }
            | Self::Cancelled { .. }
            | Self::StillUsed { .. } => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Ledger(error) => error.help(),
            Self::Scrub { source, .. } if matches!(source.cause, scrub::Cause::NotZero { .. }) => Some(
                "end the process that still maps the slice; where none does, the memory fails: keep it from use".to_owned(),
            ),
            Self::Backing(BackingError::OtherHost { .. }) => Some(
                "leave --root out on the host that has the region; a copy of a host is for plans and reports"
                    .to_owned(),
            ),
            Self::Exclusive(conflict) => conflict.help(),
            Self::StillUsed { .. } => Some(
                "end that process: the slice is quarantined until then (egm-device ledger show)".to_owned(),
            ),
            _ => None,
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
    let unknown = |span| HeldBytes {
        span,
        owner: None,
        usage: GrantState::Quarantined,
        since: 0,
        evidence: Vec::new(),
    };
    held.extend(new.iter().map(unknown));
    if let Some(wanted) = request.at.and_then(|at| Span::new(Offset::new(at), request.size).ok()) {
        held.retain(|held| held.span.overlaps(wanted));
    }
    GrantError::Short { short: Box::new(short), holders: held }
}

/// The evidence as text for people.
fn list(evidence: &[Evidence]) -> String {
    first_of(evidence.iter().map(Evidence::to_string))
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
