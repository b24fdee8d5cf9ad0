//! The state of every byte of a region: retired, held, clean or dirty.
#![forbid(unsafe_code)]

use std::fs::File;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use serde::{Serialize, Serializer};

use super::held::{HeldBytes, HeldGpu};
use super::record::{Doubt, Entry, GrantState, InRecordSpace};
use super::{Ledger, LedgerError, RecordSpace, claim, inode};
use crate::owner::Owner;
use crate::region::Region;
use crate::region::usage::{self, Usage};
use crate::retired::Retired;
use crate::trust::Party;

/// The bytes of one region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct States {
    /// Held bytes, by offset.
    pub held: Vec<HeldBytes>,
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
        held: Vec<HeldBytes>,
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

    /// Bytes that have an owner or are quarantined.
    #[must_use]
    pub fn busy(&self) -> SpanSet<InRegion> {
        self.held.iter().map(|held| held.span).collect()
    }
}

impl Ledger {
    /// Bytes of `space` that are held or quarantined, with the owner where the record names one.
    pub(super) fn held(
        &self,
        grants: &[Entry],
        space: &RecordSpace,
        file: &File,
    ) -> Result<Vec<HeldBytes>, LedgerError> {
        let error = |source| self.lock_error(space, source);
        let locks = SpaceLocks {
            space,
            file: inode(file).map_err(error)?,
            locked: claim::held(file, space.whole).map_err(error)?,
        };
        let known: Vec<&Entry> = grants.iter().filter(|entry| locks.keep(entry)).collect();
        let unknown = locks.locked.minus(&known.iter().map(|entry| entry.span).collect());
        let mut held: Vec<HeldBytes> = known.iter().filter_map(|entry| locks.held_bytes(entry)).collect();
        let unknown = unknown.iter().filter_map(|span| space.offset(span));
        held.extend(unknown.map(|span| HeldBytes::unrecorded(span, GrantState::Granted)));
        held.sort_by_key(|held| held.span.start());
        Ok(held)
    }
}

/// The locks of a space, which its recorded grants are compared with.
struct SpaceLocks<'a> {
    space: &'a RecordSpace,
    /// Inode of the lock file.
    file: u64,
    locked: SpanSet<InRecordSpace>,
}

impl SpaceLocks<'_> {
    /// Whether the bytes of `entry` are in this space and held or quarantined.
    fn keep(&self, entry: &Entry) -> bool {
        if entry.space != self.space.name {
            return false;
        }
        if entry.is_quarantined() || entry.is_orphaned(&self.locked) {
            return true;
        }
        if entry.lock == self.file {
            return SpanSet::from_iter(entry.span.intersection(self.space.whole))
                .minus(&self.locked)
                .is_empty();
        }
        // The lock file that this grant is locked in was removed.
        entry.owner.is_alive()
    }

    /// The bytes of `entry` in the region, if it has any there.
    fn held_bytes(&self, entry: &Entry) -> Option<HeldBytes> {
        let is_orphaned = entry.is_orphaned(&self.locked);
        Some(HeldBytes {
            span: self.space.offset(entry.span)?,
            owner: entry.owner(),
            usage: if is_orphaned { GrantState::Quarantined } else { entry.usage },
            since: entry.since,
            evidence: entry.evidence.clone(),
        })
    }
}

impl From<&States> for Usage {
    fn from(states: &States) -> Self {
        let part = |span: Span<InRegion>| usage::RegionPart {
            offset: span.start().get(),
            size: ByteSize::new(span.size()),
        };
        let owner = |held: &HeldBytes| {
            let owner = held.owner.as_ref().map_or_else(|| "unknown".to_owned(), Owner::to_string);
            if held.usage == GrantState::Quarantined { format!("quarantined after {owner}") } else { owner }
        };
        Self {
            held: states
                .held
                .iter()
                .map(|held| usage::OwnedPart { part: part(held.span), owner: owner(held) })
                .collect(),
            dirty: states.dirty.iter().map(part).collect(),
            exclusive: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::RegionKind;

    fn set(start: u64, size: u64) -> SpanSet<InRegion> {
        Span::new(Offset::new(start), size).into_iter().collect()
    }

    fn held(start: u64, usage: GrantState, owner: Option<Owner>) -> HeldBytes {
        let span = Span::new(Offset::new(start), 0x1000).unwrap();
        HeldBytes { span, owner, usage, since: 0, evidence: Vec::new() }
    }

    fn owner(domain: Option<&str>) -> Owner {
        Owner { name: "vm".to_owned(), uid: 7, pid: 5, started: 1, domain: domain.map(str::to_owned) }
    }

    fn gpu(owner: Option<Owner>) -> HeldGpu {
        let function = "0009:01:00.0".parse().unwrap();
        HeldGpu { function, owner, since: 0, open_to: None, evidence: Vec::new() }
    }

    /// A region of 64 KiB with a bad page at 32 KiB, of which a slice at 0 and one at 16 KiB are held.
    fn states(kind: RegionKind) -> States {
        let region = Region {
            name: "r".to_owned(),
            kind,
            node: None,
            size: ByteSize::new(0x1_0000),
            page_size: ByteSize::new(0x1000),
            base: None,
            functions: Vec::new(),
            retired: Retired::new([(0x8000, 0x1000)], 0x1_0000, 0x1000),
        };
        let slices = vec![
            held(0, GrantState::Granted, Some(owner(None))),
            held(0x4000, GrantState::Quarantined, None),
        ];
        let gpus = vec![gpu(Some(owner(Some("red")))), gpu(Some(owner(None)))];
        States::new(&region, slices, gpus, &set(0, 0x6000), Some(Doubt::Missing))
    }

    #[test]
    fn free_bytes_are_clean_where_that_is_known_and_dirty_elsewhere() {
        let states = states(RegionKind::Egm { device: "/dev/egm4".into() });
        let all = |parts: &[(u64, u64)]| {
            parts.iter().flat_map(|&(s, n)| set(s, n).iter().collect::<Vec<_>>()).collect()
        };
        let (clean, dirty): (SpanSet<_>, SpanSet<_>) =
            (all(&[(0x1000, 0x3000), (0x5000, 0x1000)]), all(&[(0x6000, 0x2000), (0x9000, 0x7000)]));
        assert_eq!((&states.clean, &states.dirty), (&clean, &dirty));
        assert_eq!(states.busy(), all(&[(0, 0x1000), (0x4000, 0x1000)]));
        assert_eq!((states.retired.spans(), states.doubt), (&set(0x8000, 0x1000), Some(Doubt::Missing)));
        let quarantined: Vec<_> = states.held.iter().map(HeldBytes::is_quarantined).collect();
        assert_eq!(quarantined, [false, true]);
    }

    #[test]
    fn pages_of_a_pool_come_clean() {
        let states = states(RegionKind::Hugetlb);
        assert!(states.dirty.is_empty());
        assert_eq!(states.clean.size(), 0x1_0000 - 0x3000);
    }

    #[test]
    fn a_gpu_makes_its_region_exclusive_to_its_owner_or_its_domain() {
        let sentences = states(RegionKind::Hugetlb).exclusive("egm4");
        assert_eq!(
            sentences,
            [
                "Region egm4 is exclusive to trust domain \"red\" (GPU 0009:01:00.0 of vm (process 5, user 7)).",
                "Region egm4 is exclusive to vm (process 5, user 7) (GPU 0009:01:00.0).",
            ]
        );
    }

    #[test]
    fn usage_names_the_owner_of_each_slice_and_what_must_be_scrubbed() {
        let usage = Usage::from(&states(RegionKind::Egm { device: "/dev/egm4".into() }));
        let part = |offset, size| usage::RegionPart { offset, size: ByteSize::new(size) };
        let owners: Vec<_> = usage.held.iter().map(|held| (held.part, held.owner.as_str())).collect();
        assert_eq!(
            owners,
            [
                (part(0, 0x1000), "vm (process 5, user 7)"),
                (part(0x4000, 0x1000), "quarantined after unknown")
            ]
        );
        assert_eq!(usage.dirty, [part(0x6000, 0x2000), part(0x9000, 0x7000)]);
        let json = serde_json::to_value(states(RegionKind::Hugetlb)).unwrap();
        assert_eq!(json["clean"].as_array().unwrap().len(), 3);
    }
}
