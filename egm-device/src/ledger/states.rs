//! The state of every byte of a region: retired, held, clean or dirty.
#![forbid(unsafe_code)]

use std::fs::File;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use serde::{Serialize, Serializer};

use super::gpus::HeldGpu;
use super::record::{Doubt, Entry, Use};
use super::{Ledger, LedgerError, Line, claim, inode};
use crate::free::Evidence;
use crate::owner::Owner;
use crate::region::Region;
use crate::region::usage::{self, Usage};
use crate::retired::Retired;
use crate::trust::Party;

/// Bytes that an owner holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Their place in the region.
    pub span: Span<InRegion>,
    /// The owner; `None` when the record has none.
    pub owner: Option<Owner>,
    /// State of the grant.
    pub usage: Use,
    /// Start of the grant, in seconds of 1970 by the wall clock; 0 when the record has none.
    pub since: u64,
    /// Evidence that quarantined bytes are in use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
}

impl Held {
    /// Whether no owner has them, and they may be in use.
    #[must_use]
    pub fn is_quarantined(&self) -> bool {
        self.usage == Use::Quarantined
    }
}

/// The bytes of one region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct States {
    /// Held bytes, by offset.
    pub held: Vec<Held>,
    /// GPUs that reach all of the region and have a live owner.
    pub gpus: Vec<HeldGpu>,
    /// Free bytes that need no scrub.
    #[serde(serialize_with = "spans")]
    pub clean: SpanSet<InRegion>,
    /// Free bytes that are scrubbed before they are granted. A pool has none.
    #[serde(serialize_with = "spans")]
    pub dirty: SpanSet<InRegion>,
    /// Bytes that must not be used: the kernel's list and pages found since, held or not.
    pub retired: Retired,
    /// Why the record was not trusted, if it was not.
    pub doubt: Option<Doubt>,
}

fn spans<S: Serializer>(set: &SpanSet<InRegion>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(set.iter())
}

impl States {
    pub(super) fn new(
        region: &Region,
        held: Vec<Held>,
        gpus: Vec<HeldGpu>,
        clean: &SpanSet<InRegion>,
        doubt: Option<Doubt>,
    ) -> Self {
        let retired = region.retired.clone();
        let whole = Span::new(Offset::new(0), region.size.get()).into_iter().collect::<SpanSet<_>>();
        let busy = held.iter().map(|held| held.span).collect();
        let free = whole.minus(&busy).minus(retired.spans());
        let unclean = if region.kind.keeps_bytes() { free.minus(clean) } else { SpanSet::default() };
        Self { held, gpus, clean: free.minus(&unclean), dirty: unclean, retired, doubt }
    }

    /// One sentence per GPU that makes the region, called `region`, exclusive.
    #[must_use]
    pub fn exclusive(&self, region: &str) -> Vec<String> {
        let sentence = |gpu: &HeldGpu| {
            let Party { owner, domain } = gpu.party();
            match domain {
                Some(domain) => {
                    format!(
                        "Region {region} is exclusive to trust domain \"{domain}\" (GPU {} of {owner}).",
                        gpu.function
                    )
                }
                None => format!("Region {region} is exclusive to {owner} (GPU {}).", gpu.function),
            }
        };
        self.gpus.iter().map(sentence).collect()
    }

    /// All held bytes.
    #[must_use]
    pub fn busy(&self) -> SpanSet<InRegion> {
        self.held.iter().map(|held| held.span).collect()
    }
}

impl Ledger {
    /// Bytes of `line` that are held or quarantined, with the owner where the record names one.
    pub(super) fn held(&self, grants: &[Entry], line: &Line, file: &File) -> Result<Vec<Held>, LedgerError> {
        let error = |source| self.lock_error(line, source);
        let locked = claim::held(file, line.whole).map_err(error)?;
        let inode = inode(file).map_err(error)?;
        let lives = |entry: &&Entry| {
            entry.line == line.name
                && if entry.is_quarantined() {
                    true
                } else if entry.lock == inode {
                    SpanSet::from_iter(entry.span.intersection(line.whole)).minus(&locked).is_empty()
                } else {
                    // The lock file that this grant is locked in was removed.
                    entry.owner.is_alive()
                }
        };
        let known: Vec<&Entry> = grants.iter().filter(lives).collect();
        let unknown = locked.minus(&known.iter().map(|entry| entry.span).collect());
        let unknown = unknown.iter().filter_map(|span| {
            let (owner, evidence) = (None, Vec::new());
            Some(Held { span: line.offset(span)?, owner, usage: Use::Granted, since: 0, evidence })
        });
        let known = known.iter().filter_map(|entry| {
            let (owner, usage, since) = (entry.owner(), entry.usage, entry.since);
            Some(Held {
                span: line.offset(entry.span)?,
                owner,
                usage,
                since,
                evidence: entry.evidence.clone(),
            })
        });
        let mut held: Vec<Held> = known.chain(unknown).collect();
        held.sort_by_key(|held| held.span.start());
        Ok(held)
    }
}

impl From<&States> for Usage {
    fn from(states: &States) -> Self {
        let part = |span: Span<InRegion>| usage::Part {
            offset: span.start().get(),
            size: ByteSize::new(span.size()),
        };
        let owner = |held: &Held| {
            let owner = held.owner.as_ref().map_or_else(|| "unknown".to_owned(), Owner::to_string);
            if held.usage == Use::Quarantined { format!("quarantined after {owner}") } else { owner }
        };
        Self {
            held: states
                .held
                .iter()
                .map(|held| usage::Held { part: part(held.span), owner: owner(held) })
                .collect(),
            dirty: states.dirty.iter().map(part).collect(),
            exclusive: Vec::new(),
        }
    }
}
