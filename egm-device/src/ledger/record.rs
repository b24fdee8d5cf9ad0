//! The record: grants and their owners, clean bytes, and retired pages.
//!
//! *Unknown means dirty*: a record with any fault is replaced by an empty one, under which every byte is scrubbed
//! before it is granted. Only retired pages outlive a boot, because the memory is the same; they are written twice, so
//! that they survive the loss of the record too.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fmt, fs, io};

use egm_address::{Address, PciAddress, Span, SpanSet, align_down, align_up};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::pool_slice::PoolSlice;
use crate::free::Evidence;
use crate::owner::Owner;

/// Maximum size of a record in bytes, for its writer and its reader alike: 16 MiB are some 60,000 grants, or fewer of pools.
pub const LIMIT: usize = 16 << 20;

/// Maximum number of retired spans of a space. Beyond it, neighbours are joined to blocks with the sound bytes between
/// them: a host with so many bad pages loses more memory, and forgets none of them.
const MAX_RETIRED: usize = 16_384;

/// The smallest block that neighbours are joined to.
const BLOCK: u64 = 64 << 10;

/// Marker: bytes of a record space (`record_space.rs`).
#[derive(Debug)]
pub enum InRecordSpace {}

/// The host and the boot that a record belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `/etc/machine-id`; a host without one trusts no record of an earlier boot.
    pub machine: Option<String>,
    /// Text of `/proc/sys/kernel/random/boot_id`, different after each boot.
    pub boot: String,
}

impl Identity {
    /// The host with its `/etc` and `/proc` below `root`.
    ///
    /// # Errors
    /// The kernel's, when the boot's number cannot be read: no record could be trusted then.
    pub fn read(root: &Path) -> io::Result<Self> {
        let text = |path: &str| fs::read_to_string(root.join(path)).map(|text| text.trim().to_owned());
        let machine = text("etc/machine-id").ok().filter(|id| !id.is_empty());
        Ok(Self { machine, boot: text("proc/sys/kernel/random/boot_id")? })
    }
}

/// State of granted bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GrantState {
    /// The owner uses them.
    Granted,
    /// They are being scrubbed, before or after their use.
    Scrubbing,
    /// The owner has returned them or ended, and they may be in use still.
    Quarantined,
}

/// A grant in the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name of the region, for people.
    pub region: String,
    /// The space that its bytes are counted in.
    #[serde(rename = "line")]
    pub space: String,
    /// Granted bytes in that space.
    pub span: Span<InRecordSpace>,
    /// The owner of the grant.
    pub owner: Owner,
    /// State of the bytes.
    pub usage: GrantState,
    /// Start of the grant, in seconds of 1970 by the wall clock: for people, no decision depends on it.
    pub since: u64,
    /// Inode of the lock file: a file in its place has no lock for this grant. 0 for quarantined bytes, which no lock
    /// keeps.
    pub lock: u64,
    /// Whether a GPU reached the bytes since they were last scrubbed: they are not recorded clean then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exposed: bool,
    /// Evidence that quarantined bytes are in use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
    /// Earlier owners of some of the bytes, not known to be scrubbed since; 32 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Owner>,
    /// VFIO groups and devices of these owners, as scans of `/proc` name them: they may map the bytes for DMA.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub devices: BTreeSet<String>,
    /// Bytes that no page of 2 MiB can map, because of where the blocks of the slice's file lie.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub small_pages: u64,
    /// File and account of a pool's slice that a broker granted, with which a later broker counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolSlice>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl Entry {
    /// Whether no lock keeps these bytes, and they are kept from every owner until nothing has them in use.
    #[must_use]
    pub const fn is_quarantined(&self) -> bool {
        self.lock == 0
    }

    /// The owner, where it is known.
    #[must_use]
    pub fn owner(&self) -> Option<Owner> {
        (self.owner.pid != 0).then(|| self.owner.clone())
    }
}

/// A GPU of an owner, which reaches all of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuClaim {
    /// Address of the GPU.
    pub function: PciAddress,
    /// Name of the region that it reaches.
    pub region: String,
    /// The owner of the GPU.
    pub owner: Owner,
    /// Start of the claim, in seconds of 1970 by the wall clock; for display only.
    pub since: u64,
    /// Inode of the lock file: a file in its place has no lock for this claim.
    pub lock: u64,
    /// Evidence that the GPU of an owner that has ended is in use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
}

impl GpuClaim {
    /// Whether both are one claim, whatever was found since.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let evidence = other.evidence.clone();
        *other == Self { evidence, ..self.clone() }
    }
}

/// Contents of the ledger's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Number of replacements of the file before this one.
    pub sequence: u64,
    machine: Option<String>,
    boot: String,
    /// Whether an earlier record of this boot was lost, and the owners of dirty bytes with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_lost: bool,
    /// Grants, living or left behind: the locks decide.
    pub grants: Vec<Entry>,
    /// GPUs that reach a region, living or left behind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuClaim>,
    clean: BTreeMap<String, Vec<Span<InRecordSpace>>>,
    retired: BTreeMap<String, Vec<Span<InRecordSpace>>>,
}

/// Why a record is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Doubt {
    /// It is no record, or its checksum is wrong.
    Broken,
    /// It is another host's.
    OtherHost,
    /// It is of another boot.
    OtherBoot,
    /// A newer one was written in this boot, or its number is lost: an old file may have been put back.
    RolledBack,
    /// One was written in this boot, and the file is missing.
    Missing,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Broken => "it is broken",
            Self::OtherHost => "it is another host's",
            Self::OtherBoot => "it is of another boot",
            Self::RolledBack => "it is older than the last one written in this boot",
            Self::Missing => "it is gone",
        })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    checksum: String,
    record: Record,
}

impl Record {
    /// An empty record with the number `sequence`.
    #[must_use]
    pub fn new(identity: &Identity, sequence: u64) -> Self {
        Self {
            sequence,
            machine: identity.machine.clone(),
            boot: identity.boot.clone(),
            was_lost: false,
            grants: Vec::new(),
            gpus: Vec::new(),
            clean: BTreeMap::new(),
            retired: BTreeMap::new(),
        }
    }

    /// The part of the record in `bytes` that `identity` can trust, when the newest record of this boot has number
    /// `newest`; and the reason, if that is not all of it.
    #[must_use]
    pub fn judge(bytes: Option<&[u8]>, identity: &Identity, newest: Option<u64>) -> (Self, Option<Doubt>) {
        let was_lost = newest.is_some();
        let new = |sequence| Self { was_lost, ..Self::new(identity, sequence) };
        let floor = newest.unwrap_or(0);
        let Some(bytes) = bytes else { return (new(floor), newest.map(|_| Doubt::Missing)) };
        let Some(record) = Self::decode(bytes, LIMIT) else {
            // It may be of this boot.
            return (Self { was_lost: true, ..new(floor) }, Some(Doubt::Broken));
        };
        let same_host = record.machine == identity.machine;
        let doubt = if !same_host {
            Doubt::OtherHost
        } else if record.boot != identity.boot {
            Doubt::OtherBoot
        } else if newest.is_none_or(|newest| record.sequence < newest) {
            Doubt::RolledBack
        } else {
            return (record, None);
        };
        let mut replacement = new(floor.max(record.sequence));
        if same_host && (identity.machine.is_some() || record.boot == identity.boot) {
            replacement.retired = record.retired;
        }
        if doubt == Doubt::RolledBack {
            // They are only ever a reason to refuse: removing the lock files removes the record's number with them.
            replacement.grants = record.grants;
            replacement.gpus = record.gpus;
            replacement.was_lost = true;
        }
        (replacement, Some(doubt))
    }

    fn decode(bytes: &[u8], limit: usize) -> Option<Self> {
        if bytes.len() > limit {
            return None;
        }
        let Sealed { checksum, record } = serde_json::from_slice(bytes).ok()?;
        (record.checksum() == checksum).then_some(record)
    }

    /// The bytes of the file; never more than a reader accepts.
    ///
    /// # Errors
    /// `FileTooLarge` for more than [`LIMIT`].
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        self.encode_within(LIMIT)
    }

    /// [`Record::encode`], without the clean bytes if they leave no room for the rest: they are scrubbed again.
    pub(super) fn encode_or_forget_clean(&mut self) -> io::Result<Vec<u8>> {
        self.encode().or_else(|error| {
            if self.clean.values().all(Vec::is_empty) {
                return Err(error);
            }
            self.clean.clear();
            self.encode()
        })
    }

    fn encode_within(&self, limit: usize) -> io::Result<Vec<u8>> {
        let sealed = Sealed { checksum: self.checksum(), record: self.clone() };
        // Every map has string keys, so nothing of it can fail to be JSON; if it did, no bytes are a broken record.
        let mut bytes = serde_json::to_vec_pretty(&sealed).unwrap_or_default();
        bytes.push(b'\n');
        if bytes.len() > limit {
            let what = format!("the record would have {} bytes, and {limit} are read back", bytes.len());
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        Ok(bytes)
    }

    fn checksum(&self) -> String {
        let text = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Removes `place` from the grants that `is_left` selects (left behind by their owners); returns the removed parts.
    pub(super) fn cut_grants(
        &mut self,
        place: Span<InRecordSpace>,
        is_left: impl Fn(&Entry) -> bool,
    ) -> Vec<Entry> {
        let (left, mut grants): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.grants).into_iter().partition(is_left);
        let mut cut = Vec::new();
        for entry in left {
            let part = |span| Entry { span, ..entry.clone() };
            grants.extend(
                SpanSet::from_iter([entry.span]).minus(&SpanSet::from_iter([place])).iter().map(part),
            );
            cut.extend(entry.span.intersection(place).map(part));
        }
        self.grants = grants;
        cut
    }

    /// Bytes of `space` that are known to be zero.
    #[must_use]
    pub fn clean(&self, space: &str) -> SpanSet<InRecordSpace> {
        self.clean.get(space).into_iter().flatten().copied().collect()
    }

    /// Bytes of `space` that went bad while it was used.
    #[must_use]
    pub fn retired(&self, space: &str) -> SpanSet<InRecordSpace> {
        self.retired.get(space).into_iter().flatten().copied().collect()
    }

    /// `bytes` of `space` are known to be zero.
    pub(crate) fn add_clean(&mut self, space: &str, bytes: &SpanSet<InRecordSpace>) {
        let all: SpanSet<InRecordSpace> = self.clean(space).iter().chain(bytes.iter()).collect();
        self.clean.insert(space.to_owned(), all.iter().collect());
    }

    /// `bytes` of `space` are of unknown content.
    pub(crate) fn remove_clean(&mut self, space: &str, bytes: &SpanSet<InRecordSpace>) {
        let left = self.clean(space).minus(bytes);
        self.clean.insert(space.to_owned(), left.iter().collect());
    }

    /// `bytes` of `space` are bad.
    pub fn add_retired(&mut self, space: &str, bytes: &SpanSet<InRecordSpace>) {
        if bytes.is_empty() {
            return;
        }
        let all: SpanSet<InRecordSpace> = self.retired(space).iter().chain(bytes.iter()).collect();
        let all = joined(all);
        self.remove_clean(space, &all);
        self.retired.insert(space.to_owned(), all.iter().collect());
    }

    /// `bytes` of `space` are not bad any more; their content is unknown.
    pub(super) fn remove_retired(&mut self, space: &str, bytes: &SpanSet<InRecordSpace>) {
        self.remove_clean(space, bytes);
        let left = self.retired(space).minus(bytes);
        self.retired.insert(space.to_owned(), left.iter().collect());
    }

    /// Adds the retired bytes of `other`.
    pub(super) fn add_retired_of(&mut self, other: &Self) {
        for space in other.retired.keys() {
            self.add_retired(space, &other.retired(space));
        }
    }

    /// A record of the bad pages alone; `None` when `known` has the same ones.
    pub(super) fn retired_beside(&self, known: &Self) -> Option<Self> {
        let alone = || Self { grants: Vec::new(), gpus: Vec::new(), clean: BTreeMap::new(), ..self.clone() };
        (self.retired != known.retired).then(alone)
    }
}

/// All VFIO groups and devices of `entries`.
pub(super) fn devices_of(entries: &[Entry]) -> BTreeSet<String> {
    entries.iter().flat_map(|entry| entry.devices.iter().cloned()).collect()
}

/// `bytes` in [`MAX_RETIRED`] spans at most, joined to the smallest blocks that suffice.
fn joined(bytes: SpanSet<InRecordSpace>) -> SpanSet<InRecordSpace> {
    let (mut joined, mut block) = (bytes, BLOCK);
    while joined.iter().count() > MAX_RETIRED {
        let widen = |span: Span<InRecordSpace>| {
            let end = align_up(span.end().get(), block).unwrap_or(u64::MAX);
            Span::between(Address::new(align_down(span.start().get(), block)), Address::new(end))
                .unwrap_or(span)
        };
        joined = joined.iter().map(widen).collect();
        block = block.saturating_mul(2);
    }
    joined
}

#[cfg(test)]
mod tests {
    use egm_address::Address;
    use proptest::prelude::*;

    use super::*;

    fn identity(machine: Option<&str>, boot: &str) -> Identity {
        Identity { machine: machine.map(str::to_owned), boot: boot.to_owned() }
    }

    fn set(start: u64, size: u64) -> SpanSet<InRecordSpace> {
        SpanSet::from_iter([Span::new(Address::new(start), size).unwrap()])
    }

    fn sample() -> Record {
        let mut record = Record::new(&identity(Some("host"), "boot"), 7);
        record.add_clean("egm4", &set(0, 0x4000));
        record.add_retired("egm4", &set(0x1000, 0x1000));
        record.grants.push(Entry {
            region: "egm4".to_owned(),
            space: "egm4".to_owned(),
            span: Span::new(Address::new(0x8000), 0x1000).unwrap(),
            owner: Owner { name: "vm".to_owned(), uid: 0, pid: 1, started: 2, domain: None },
            usage: GrantState::Granted,
            since: u64::MAX,
            lock: 3,
            exposed: false,
            evidence: Vec::new(),
            earlier: Vec::new(),
            devices: BTreeSet::new(),
            small_pages: 0,
            pool: None,
        });
        record
    }

    #[test]
    fn a_record_of_this_boot_is_read_as_it_was_written() {
        let (record, doubt) =
            Record::judge(Some(&sample().encode().unwrap()), &identity(Some("host"), "boot"), Some(7));
        assert_eq!((record, doubt), (sample(), None));
        assert_eq!(sample().clean("egm4").size(), 0x3000);
    }

    #[test]
    fn a_record_in_doubt_calls_nothing_clean_and_keeps_bad_pages_of_the_same_host() {
        let bytes = sample().encode().unwrap();
        let cases = [
            (identity(Some("host"), "next"), Some(7), Doubt::OtherBoot, 0x1000),
            (identity(Some("other"), "boot"), Some(7), Doubt::OtherHost, 0),
            (identity(None, "boot"), Some(7), Doubt::OtherHost, 0),
            (identity(Some("host"), "boot"), Some(8), Doubt::RolledBack, 0x1000),
            (identity(Some("host"), "boot"), None, Doubt::RolledBack, 0x1000),
        ];
        for (identity, newest, doubt, retired) in cases {
            let (record, found) = Record::judge(Some(&bytes), &identity, newest);
            assert_eq!(found, Some(doubt));
            assert!(record.clean("egm4").is_empty());
            // A grant of this boot is a reason to refuse, whatever else is wrong.
            assert_eq!(record.grants.is_empty(), doubt != Doubt::RolledBack);
            assert_eq!(record.retired("egm4").size(), retired);
            assert!(record.sequence >= newest.unwrap_or(0).max(7));
        }
    }

    #[test]
    fn bad_pages_of_a_host_without_a_name_are_known_within_a_boot() {
        let mut record = Record::new(&identity(None, "boot"), 7);
        record.add_retired("egm4", &set(0, 0x1000));
        for (boot, retired) in [("boot", 0x1000), ("next", 0)] {
            let (record, _) = Record::judge(Some(&record.encode().unwrap()), &identity(None, boot), None);
            assert_eq!(record.retired("egm4").size(), retired);
        }
    }

    #[test]
    fn a_record_that_was_cut_anywhere_is_broken() {
        let (bytes, identity) = (sample().encode().unwrap(), identity(Some("host"), "boot"));
        // The last byte is the line's end.
        for length in 0..bytes.len() - 1 {
            assert_eq!(Record::judge(Some(&bytes[..length]), &identity, Some(7)).1, Some(Doubt::Broken));
        }
    }

    #[test]
    fn ten_thousand_bad_pages_stay_small_and_any_number_is_joined_and_none_forgotten() {
        let mut record = Record::new(&identity(Some("host"), "boot"), 7);
        let page = |n: u64| Span::new(Address::new((1 << 40) + n * 0x1_0000), 0x1000).unwrap();
        let some: SpanSet<InRecordSpace> = (0..10_000).map(page).collect();
        record.add_retired("@host", &some);
        assert_eq!(record.retired("@host"), some);
        assert!(record.encode().unwrap().len() < 1 << 20);
        let all: SpanSet<InRecordSpace> = (0..50_000).map(|n| page(3 * n)).collect();
        record.add_retired("@host", &all);
        let retired = record.retired("@host");
        assert!(all.minus(&retired).is_empty() && some.minus(&retired).is_empty());
        assert!(retired.iter().count() <= MAX_RETIRED);
    }

    /// A record as it was written before this version: new fields must not change the checksum of old records.
    #[test]
    fn a_record_of_an_earlier_version_is_read() {
        let bytes = include_bytes!("../../tests/golden/ledger-record.json");
        let (record, doubt) = Record::judge(Some(bytes), &identity(Some("host"), "boot"), Some(7));
        assert_eq!(doubt, None);
        assert_eq!(
            (record.grants.len(), record.clean("egm4").size(), record.retired("egm4").size()),
            (1, 0x3000, 0x1000)
        );
    }

    #[test]
    fn a_record_without_room_forgets_what_is_clean_and_then_states_that_it_is_too_large() {
        let scattered =
            |n: u64| (0..n).map(|n| Span::new(Address::new(n * 0x2000), 0x1000).unwrap()).collect();
        let mut record = sample();
        record.clean.insert("egm4".to_owned(), SpanSet::iter(&scattered(300_000)).collect());
        assert_eq!(record.encode().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let bytes = record.encode_or_forget_clean().unwrap();
        let (read, doubt) = Record::judge(Some(&bytes), &identity(Some("host"), "boot"), Some(7));
        assert_eq!((doubt, read.grants, read.clean.is_empty()), (None, sample().grants, true));
        let entry = sample().grants[0].clone();
        record.grants = vec![entry; 60_000];
        assert_eq!(record.encode_or_forget_clean().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    fn span(start: u64, size: u64) -> Span<InRecordSpace> {
        Span::new(Address::new(start), size).unwrap()
    }

    #[test]
    fn a_host_is_known_by_its_machine_and_boot() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert!(Identity::read(root.path()).is_err(), "no boot, no trust");
        write("proc/sys/kernel/random/boot_id", "b-1\n");
        assert_eq!(Identity::read(root.path()).unwrap(), identity(None, "b-1"));
        write("etc/machine-id", "\n");
        assert_eq!(Identity::read(root.path()).unwrap(), identity(None, "b-1"), "not yet written");
        write("etc/machine-id", "m-1\n");
        assert_eq!(Identity::read(root.path()).unwrap(), identity(Some("m-1"), "b-1"));
    }

    #[test]
    fn a_grant_without_a_process_has_no_owner_and_one_without_a_lock_is_quarantined() {
        let entry = sample().grants[0].clone();
        assert_eq!((entry.owner(), entry.is_quarantined()), (Some(entry.owner.clone()), false));
        let left = Entry { owner: Owner { pid: 0, ..entry.owner.clone() }, lock: 0, ..entry };
        assert_eq!((left.owner(), left.is_quarantined()), (None, true));
    }

    #[test]
    fn a_claim_is_the_same_whatever_was_found_since() {
        let claim = GpuClaim {
            function: "0009:01:00.0".parse().unwrap(),
            region: "egm4".to_owned(),
            owner: sample().grants[0].owner.clone(),
            since: 1,
            lock: 2,
            evidence: Vec::new(),
        };
        let evidence = Evidence { hold: crate::free::Hold::Mapping, pid: Some(1), program: String::new() };
        assert!(claim.is_same(&GpuClaim { evidence: vec![evidence], ..claim.clone() }));
        assert!(!claim.is_same(&GpuClaim { lock: 3, ..claim.clone() }));
        assert!(!claim.is_same(&GpuClaim { region: "egm5".to_owned(), ..claim.clone() }));
    }

    #[test]
    fn a_record_that_is_not_there_is_missing_only_after_one_was_written() {
        let host = identity(Some("host"), "boot");
        let (first, doubt) = Record::judge(None, &host, None);
        assert_eq!((first, doubt), (Record::new(&host, 0), None));
        let (again, doubt) = Record::judge(None, &host, Some(7));
        assert_eq!(doubt, Some(Doubt::Missing));
        assert_eq!((again.sequence, again.was_lost), (7, true));
        let (broken, doubt) = Record::judge(Some(b"{"), &host, None);
        assert_eq!((broken.sequence, broken.was_lost, doubt), (0, true, Some(Doubt::Broken)));
        let bytes = sample().encode().unwrap();
        for (boot, newest, lost) in [("next", None, false), ("next", Some(3), true), ("boot", None, true)] {
            let (record, doubt) = Record::judge(Some(&bytes), &identity(Some("host"), boot), newest);
            assert_eq!((record.was_lost, record.sequence), (lost, 7), "{doubt:?}");
        }
    }

    #[test]
    fn every_doubt_has_words_of_its_own() {
        let all = [Doubt::Broken, Doubt::OtherHost, Doubt::OtherBoot, Doubt::RolledBack, Doubt::Missing];
        let texts: BTreeSet<String> = all.iter().map(Doubt::to_string).collect();
        assert!(texts.len() == all.len() && texts.iter().all(|text| text.starts_with("it is ")));
    }

    #[test]
    fn a_record_may_fill_its_limit_and_not_exceed_it() {
        let bytes = sample().encode().unwrap();
        assert_eq!(sample().encode_within(bytes.len()).unwrap(), bytes);
        let error = sample().encode_within(bytes.len() - 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(Record::decode(&bytes, bytes.len()), Some(sample()));
        assert_eq!(Record::decode(&bytes, bytes.len() - 1), None);
    }

    #[test]
    fn bytes_are_cut_out_of_grants_that_were_left_and_of_no_others() {
        let entry = |start, size, lock| Entry { span: span(start, size), lock, ..sample().grants[0].clone() };
        let mut record = sample();
        record.grants = vec![entry(0, 0x4000, 0), entry(0, 0x4000, 3), entry(0x8000, 0x1000, 0)];
        let cut = record.cut_grants(span(0x1000, 0x1000), Entry::is_quarantined);
        assert_eq!(cut, [entry(0x1000, 0x1000, 0)]);
        let left: Vec<_> = record.grants.iter().map(|entry| (entry.span, entry.lock)).collect();
        let rest = [(span(0, 0x1000), 0), (span(0x2000, 0x2000), 0), (span(0x8000, 0x1000), 0)];
        assert_eq!(left, [&[(span(0, 0x4000), 3)][..], &rest].concat());
    }

    #[test]
    fn bad_bytes_are_not_clean_and_good_again_they_are_of_unknown_content() {
        let mut record = Record::new(&identity(Some("host"), "boot"), 1);
        record.add_clean("a", &set(0, 0x4000));
        record.add_clean("a", &set(0x4000, 0x1000));
        record.remove_clean("a", &set(0, 0x1000));
        assert_eq!(record.clean("a"), set(0x1000, 0x4000));
        record.add_retired("a", &set(0x1000, 0x1000));
        assert_eq!((record.clean("a"), record.retired("a")), (set(0x2000, 0x3000), set(0x1000, 0x1000)));
        record.remove_retired("a", &set(0x1000, 0x2000));
        assert_eq!((record.clean("a"), record.retired("a")), (set(0x3000, 0x2000), SpanSet::default()));
        assert_eq!((record.clean("b"), record.retired("b")), (SpanSet::default(), SpanSet::default()));
        let before = record.clone();
        record.add_retired("b", &SpanSet::default());
        assert_eq!(record, before, "no bytes, no line");
    }

    #[test]
    fn bad_bytes_of_two_records_come_together() {
        let mut record = sample();
        let mut other = Record::new(&identity(Some("host"), "boot"), 1);
        other.add_retired("egm4", &set(0x2000, 0x1000));
        other.add_retired("egm5", &set(0, 0x1000));
        record.add_retired_of(&other);
        assert_eq!(record.retired("egm4"), set(0x1000, 0x2000));
        assert_eq!((record.retired("egm5"), record.clean("egm4").size()), (set(0, 0x1000), 0x2000));
        let alone = record.retired_beside(&other).unwrap();
        assert_eq!(alone.retired, record.retired);
        assert_eq!((alone.grants.len(), alone.clean.len(), alone.sequence), (0, 0, 7));
        assert_eq!(record.retired_beside(&record), None);
    }

    #[test]
    fn devices_are_those_of_all_entries() {
        let entry = |devices: &[&str]| {
            let devices = devices.iter().map(|&device| device.to_owned()).collect();
            Entry { devices, ..sample().grants[0].clone() }
        };
        let all = devices_of(&[entry(&["group 1", "group 2"]), entry(&[]), entry(&["group 2", "group 3"])]);
        assert_eq!(all.into_iter().collect::<Vec<_>>(), ["group 1", "group 2", "group 3"]);
    }

    #[test]
    fn bad_pages_are_joined_only_beyond_their_limit_and_to_the_smallest_blocks() {
        let pages =
            |count: u64| (0..count).map(|n| span(n * 0x2000, 0x1000)).collect::<SpanSet<InRecordSpace>>();
        let most = u64::try_from(MAX_RETIRED).unwrap();
        assert_eq!(joined(pages(most)), pages(most));
        assert_eq!(joined(pages(most + 1)), set(0, (most * 0x2000 + 0x1000).next_multiple_of(BLOCK)));
        // One page in every other block of 64 KiB: the next size joins all, and no block is larger.
        let wide = |step: u64| {
            (0..=most).map(|n| span(n * step + 0x1000, 0x1000)).collect::<SpanSet<InRecordSpace>>()
        };
        assert_eq!(joined(wide(2 * BLOCK)), set(0, (most + 1) * 2 * BLOCK));
        assert_eq!(joined(wide(4 * BLOCK)), set(0, (most + 1) * 4 * BLOCK));
    }

    proptest! {
        #[test]
        fn what_is_written_can_be_read_back(
            limit in 0usize..4000, grants in 0usize..8, spans in prop::collection::vec((0u64..1000, 1u64..9), 0..30),
        ) {
            let mut record = sample();
            record.grants = vec![sample().grants[0].clone(); grants];
            let spans = spans.iter().map(|(page, count)| Span::new(Address::new(page << 12), count << 12).unwrap());
            record.add_retired("egm4", &spans.collect());
            match record.encode_within(limit) {
                Ok(bytes) => prop_assert_eq!(Record::decode(&bytes, limit), Some(record)),
                Err(error) => prop_assert_eq!(error.kind(), io::ErrorKind::FileTooLarge),
            }
        }

        #[test]
        fn a_changed_byte_never_changes_what_is_read(at in 0usize..2000, to: u8) {
            let (mut bytes, identity) = (sample().encode().unwrap(), identity(Some("host"), "boot"));
            let at = at % bytes.len();
            bytes[at] = to;
            let (record, doubt) = Record::judge(Some(&bytes), &identity, Some(7));
            prop_assert!(doubt == Some(Doubt::Broken) || record == sample());
        }

        #[test]
        fn any_bytes_are_a_record_or_broken(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (record, doubt) = Record::judge(Some(&bytes), &identity(None, "boot"), None);
            prop_assert!(doubt == Some(Doubt::Broken) && record.grants.is_empty());
        }
    }
}
