//! Earlier owners of dirty bytes, each of which may still use them.
#![forbid(unsafe_code)]

use egm_address::SpanSet;

use super::record::{Entry, InRecordSpace, Record};
use crate::owner::Owner;

/// Owners that have had bytes since their last scrub.
pub(crate) struct LastOwners {
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
    pub(super) fn has_all_owners(&self) -> bool {
        self.all_owners().all(|owner| owner.pid != 0)
    }

    fn all_owners(&self) -> impl Iterator<Item = &Owner> {
        std::iter::once(&self.owner).chain(&self.earlier)
    }
}

impl Record {
    /// All owners of `entries`, once each, for the [`Entry::earlier`] of an entry of `bytes`; the last is unknown if
    /// others may have had some of them.
    pub(super) fn owners_of(&mut self, entries: &[Entry], bytes: &SpanSet<InRecordSpace>) -> Vec<Owner> {
        let mut owners: Vec<Owner> = Vec::new();
        for owner in entries.iter().flat_map(Entry::all_owners).filter(|owner| owner.pid != 0) {
            if !owners.contains(owner) {
                owners.push(owner.clone());
            }
        }
        self.was_lost |= owners.len() > MAX_EARLIER;
        let known: SpanSet<InRecordSpace> =
            entries.iter().filter(|entry| entry.has_all_owners()).map(|entry| entry.span).collect();
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

impl LastOwners {
    /// The last owner of a slice that was scrubbed for it.
    pub(super) fn only(owner: Owner) -> Self {
        Self { owners: vec![owner], are_all: true }
    }

    pub(super) fn of(entry: &Entry) -> Self {
        Self { owners: entry.owners().collect(), are_all: entry.has_all_owners() }
    }
}

#[cfg(test)]
mod tests {
    use egm_address::{Address, Span};

    use super::*;
    use crate::ledger::record::{GrantState, Identity};

    fn owner(pid: u32) -> Owner {
        Owner { name: format!("vm{pid}"), uid: 0, pid, started: 1, domain: None }
    }

    fn span(start: u64, size: u64) -> Span<InRecordSpace> {
        Span::new(Address::new(start), size).unwrap()
    }

    fn entry(start: u64, owner: Owner, earlier: Vec<Owner>) -> Entry {
        Entry {
            region: "egm4".to_owned(),
            space: "egm4".to_owned(),
            span: span(start, 0x1000),
            owner,
            usage: GrantState::Granted,
            since: 0,
            lock: 1,
            exposed: false,
            evidence: Vec::new(),
            earlier,
            devices: std::collections::BTreeSet::new(),
            small_pages: 0,
            pool: None,
        }
    }

    fn record(was_lost: bool) -> Record {
        let identity = Identity { machine: None, boot: "boot".to_owned() };
        let mut record = Record::new(&identity, 1);
        record.was_lost = was_lost;
        record
    }

    fn bytes(size: u64) -> SpanSet<InRecordSpace> {
        SpanSet::from_iter([span(0, size)])
    }

    #[test]
    fn an_entry_has_all_owners_when_none_of_them_is_unknown() {
        let known = entry(0, owner(1), vec![owner(2), owner(3)]);
        assert_eq!(known.owners().collect::<Vec<_>>(), [1, 2, 3].map(owner));
        let last = LastOwners::of(&known);
        assert_eq!((known.has_all_owners(), last.owners.len(), last.are_all), (true, 3, true));
        for some in [entry(0, owner(1), vec![unknown()]), entry(0, unknown(), vec![owner(1)])] {
            assert_eq!(some.owners().collect::<Vec<_>>(), [owner(1)]);
            assert!(!some.has_all_owners() && !LastOwners::of(&some).are_all);
        }
        let only = LastOwners::only(owner(4));
        assert_eq!((only.owners, only.are_all), (vec![owner(4)], true));
    }

    #[test]
    fn owners_of_bytes_are_named_once_with_an_unknown_one_where_a_record_was_lost() {
        let entries = [entry(0, owner(1), vec![owner(2)]), entry(0x1000, owner(2), Vec::new())];
        let known = [1, 2].map(owner).to_vec();
        let with_unknown = [known.clone(), vec![unknown()]].concat();
        assert_eq!(record(false).owners_of(&entries, &bytes(0x4000)), known, "no record was lost");
        assert_eq!(record(true).owners_of(&entries, &bytes(0x2000)), known, "the entries have all bytes");
        assert_eq!(record(true).owners_of(&entries, &bytes(0x3000)), with_unknown);
        let unsure = [entry(0, owner(1), vec![unknown(), owner(2)])];
        assert_eq!(record(false).owners_of(&unsure, &bytes(0x1000)), known);
        assert_eq!(record(true).owners_of(&unsure, &bytes(0x1000)), with_unknown);
    }

    #[test]
    fn more_than_32_owners_are_32_and_an_unknown_one() {
        let of = |count: u32| {
            let mut record = record(false);
            let entries = [entry(0, owner(1), (2..=count).map(owner).collect())];
            let owners = record.owners_of(&entries, &bytes(0x1000));
            (owners.len(), owners.last() == Some(&unknown()), record.was_lost)
        };
        assert_eq!(of(32), (32, false, false));
        assert_eq!(of(33), (33, true, true));
        let mut lost = record(true);
        let _ = lost.owners_of(&[], &bytes(0x1000));
        assert!(lost.was_lost, "what was lost stays lost");
    }
}
