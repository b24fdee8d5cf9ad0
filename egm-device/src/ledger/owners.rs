//! Earlier owners of dirty bytes, each of which may still use them.
#![forbid(unsafe_code)]

use egm_address::SpanSet;

use super::record::{Entry, OnLine, Record};
use crate::owner::Owner;

/// Owners that have had bytes since their last scrub.
pub(crate) struct Last {
    pub(super) owners: Vec<Owner>,
    /// Whether there are no others, even if a record was lost.
    pub(super) are_all: bool,
}

/// Most earlier owners of an entry. With more, any user counts as one.
const MAX_EARLIER: usize = 32;

impl Entry {
    /// The owner and earlier owners, where they are known.
    pub(super) fn owners(&self) -> impl Iterator<Item = Owner> {
        self.all_owners().filter(|owner| owner.pid != 0).cloned()
    }

    /// Whether [`Entry::owners`] are all.
    pub(super) fn knows_all(&self) -> bool {
        self.all_owners().all(|owner| owner.pid != 0)
    }

    fn all_owners(&self) -> impl Iterator<Item = &Owner> {
        std::iter::once(&self.owner).chain(&self.earlier)
    }
}

impl Record {
    /// All owners of `entries`, once each, for the [`Entry::earlier`] of an entry of `bytes`; the last is unknown if
    /// others may have had some of them.
    pub(super) fn owners_of(&mut self, entries: &[Entry], bytes: &SpanSet<OnLine>) -> Vec<Owner> {
        let mut owners: Vec<Owner> = Vec::new();
        for owner in entries.iter().flat_map(Entry::all_owners).filter(|owner| owner.pid != 0) {
            if !owners.contains(owner) {
                owners.push(owner.clone());
            }
        }
        self.was_lost |= owners.len() > MAX_EARLIER;
        let known: SpanSet<OnLine> =
            entries.iter().filter(|entry| entry.knows_all()).map(|entry| entry.span).collect();
        if owners.len() > MAX_EARLIER || (self.was_lost && !bytes.minus(&known).is_empty()) {
            owners.truncate(MAX_EARLIER);
            owners.push(unknown());
        }
        owners
    }
}

/// Stands for an unrecorded owner.
pub(super) const fn unknown() -> Owner {
    Owner { name: String::new(), uid: u32::MAX, pid: 0, started: 0, domain: None }
}

impl Last {
    /// The last owner of a slice that was scrubbed for it.
    pub(super) fn only(owner: Owner) -> Self {
        Self { owners: vec![owner], are_all: true }
    }

    pub(super) fn of(entry: &Entry) -> Self {
        Self { owners: entry.owners().collect(), are_all: entry.knows_all() }
    }
}
