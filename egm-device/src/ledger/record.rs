//! What is written down: who has what, which bytes are clean, which pages went bad.
//!
//! *Unknown means dirty*: whatever is wrong with a record, the answer is an empty one, under which every byte is scrubbed
//! before it is handed out. Only retired pages outlive a boot, because the memory is the same; they are written twice, to
//! outlive the record too.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs, io};

use egm_address::{PciAddress, Span, SpanSet};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::owner::Owner;

/// A record is not longer, or it is not one: 16 MiB are some 60,000 grants.
pub const LIMIT: usize = 16 << 20;

/// Marker: bytes of a line, as `line.rs` says.
#[derive(Debug)]
pub enum OnLine {}

/// The host and the boot that a record speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `/etc/machine-id`; a host without one trusts no record of an earlier boot.
    pub machine: Option<String>,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
}

impl Identity {
    /// The host whose `/etc` and `/proc` are below `root`.
    ///
    /// # Errors
    /// The kernel's, when it does not say which boot this is: nothing could be believed then.
    pub fn read(root: &Path) -> io::Result<Self> {
        let line = |path: &str| fs::read_to_string(root.join(path)).map(|text| text.trim().to_owned());
        let machine = line("etc/machine-id").ok().filter(|id| !id.is_empty());
        Ok(Self { machine, boot: line("proc/sys/kernel/random/boot_id")? })
    }
}

/// What is being done with bytes that somebody holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// The owner uses them.
    Granted,
    /// They are being scrubbed, before or after.
    Scrubbing,
}

/// One grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name of the region, for people.
    pub region: String,
    /// The line that its bytes are counted on.
    pub line: String,
    /// The bytes.
    pub span: Span<OnLine>,
    /// Who holds them.
    pub owner: Owner,
    /// What for.
    pub usage: Use,
    /// Since when, in seconds of 1970 by the wall clock: for people, nothing is decided by it.
    pub since: u64,
    /// Inode of the lock file: another one in its place would not know of this grant.
    pub lock: u64,
    /// Whether a GPU reached the bytes since they were last scrubbed: they are not recorded clean then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exposed: bool,
}

/// A GPU of an owner, which reaches all of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuClaim {
    /// The GPU.
    pub function: PciAddress,
    /// Name of the region that it reaches.
    pub region: String,
    /// The owner of the GPU.
    pub owner: Owner,
    /// Start of the claim, in seconds of 1970 by the wall clock; for display only.
    pub since: u64,
    /// Inode of the lock file: a file in its place has no lock for this claim.
    pub lock: u64,
}

/// The whole record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Which replacement of the file this is.
    pub sequence: u64,
    machine: Option<String>,
    boot: String,
    /// Grants, living or left behind: the locks decide.
    pub grants: Vec<Entry>,
    /// GPUs that reach a region, living or left behind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuClaim>,
    clean: BTreeMap<String, Vec<Span<OnLine>>>,
    retired: BTreeMap<String, Vec<Span<OnLine>>>,
}

/// Why a record was not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Doubt {
    /// It is no record, or its checksum is wrong.
    Broken,
    /// It is another host's.
    OtherHost,
    /// It is of another boot.
    OtherBoot,
    /// A newer one was written in this boot: somebody put an old one back.
    RolledBack,
    /// One was written in this boot, and there is none.
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
    /// An empty record.
    #[must_use]
    pub fn new(identity: &Identity, sequence: u64) -> Self {
        Self {
            sequence,
            machine: identity.machine.clone(),
            boot: identity.boot.clone(),
            grants: Vec::new(),
            gpus: Vec::new(),
            clean: BTreeMap::new(),
            retired: BTreeMap::new(),
        }
    }

    /// The record in `bytes` as far as it can be believed by `identity`, when the newest one that this boot wrote has
    /// number `newest`; and why not, if not.
    #[must_use]
    pub fn judge(bytes: Option<&[u8]>, identity: &Identity, newest: Option<u64>) -> (Self, Option<Doubt>) {
        let floor = newest.unwrap_or(0);
        let Some(bytes) = bytes else {
            return (Self::new(identity, floor), newest.map(|_| Doubt::Missing));
        };
        let Some(record) = Self::decode(bytes) else {
            return (Self::new(identity, floor), Some(Doubt::Broken));
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
        let mut fresh = Self::new(identity, floor.max(record.sequence));
        if same_host && (identity.machine.is_some() || record.boot == identity.boot) {
            fresh.retired = record.retired;
        }
        if doubt == Doubt::RolledBack {
            // They only ever are a reason to refuse: who removed the lock files removed the record's number with them.
            fresh.grants = record.grants;
            fresh.gpus = record.gpus;
        }
        (fresh, Some(doubt))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > LIMIT {
            return None;
        }
        let Sealed { checksum, record } = serde_json::from_slice(bytes).ok()?;
        (record.checksum() == checksum).then_some(record)
    }

    /// The file's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let sealed = Sealed { checksum: self.checksum(), record: self.clone() };
        // Every map has string keys, so nothing of it can fail to be JSON; if it did, no bytes are a broken record.
        let mut bytes = serde_json::to_vec_pretty(&sealed).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    fn checksum(&self) -> String {
        let text = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Bytes of `line` that are known to be zero.
    #[must_use]
    pub fn clean(&self, line: &str) -> SpanSet<OnLine> {
        self.clean.get(line).into_iter().flatten().copied().collect()
    }

    /// Bytes of `line` that went bad while it was used.
    #[must_use]
    pub fn retired(&self, line: &str) -> SpanSet<OnLine> {
        self.retired.get(line).into_iter().flatten().copied().collect()
    }

    /// `bytes` of `line` are known to be zero.
    pub fn add_clean(&mut self, line: &str, bytes: &SpanSet<OnLine>) {
        let all: SpanSet<OnLine> = self.clean(line).iter().chain(bytes.iter()).collect();
        self.clean.insert(line.to_owned(), all.iter().collect());
    }

    /// Nothing is known of `bytes` of `line`.
    pub fn remove_clean(&mut self, line: &str, bytes: &SpanSet<OnLine>) {
        let left = self.clean(line).minus(bytes);
        self.clean.insert(line.to_owned(), left.iter().collect());
    }

    /// `bytes` of `line` are bad.
    pub fn add_retired(&mut self, line: &str, bytes: &SpanSet<OnLine>) {
        if bytes.is_empty() {
            return;
        }
        self.remove_clean(line, bytes);
        let all: SpanSet<OnLine> = self.retired(line).iter().chain(bytes.iter()).collect();
        self.retired.insert(line.to_owned(), all.iter().collect());
    }

    /// What `other` calls bad is bad.
    pub(super) fn add_retired_of(&mut self, other: &Self) {
        for line in other.retired.keys() {
            self.add_retired(line, &other.retired(line));
        }
    }

    /// A record of the bad pages alone; `None` when `known` is one of the same already.
    pub(super) fn retired_beside(&self, known: &Self) -> Option<Self> {
        let alone = || Self { grants: Vec::new(), gpus: Vec::new(), clean: BTreeMap::new(), ..self.clone() };
        (self.retired != known.retired).then(alone)
    }
}

#[cfg(test)]
mod tests {
    use egm_address::Address;
    use proptest::prelude::*;

    use super::*;

    fn identity(machine: Option<&str>, boot: &str) -> Identity {
        Identity { machine: machine.map(str::to_owned), boot: boot.to_owned() }
    }

    fn set(start: u64, size: u64) -> SpanSet<OnLine> {
        SpanSet::from_iter([Span::new(Address::new(start), size).unwrap()])
    }

    fn sample() -> Record {
        let mut record = Record::new(&identity(Some("host"), "boot"), 7);
        record.add_clean("egm4", &set(0, 0x4000));
        record.add_retired("egm4", &set(0x1000, 0x1000));
        record.grants.push(Entry {
            region: "egm4".to_owned(),
            line: "egm4".to_owned(),
            span: Span::new(Address::new(0x8000), 0x1000).unwrap(),
            owner: Owner { name: "vm".to_owned(), uid: 0, pid: 1, started: 2, domain: None },
            usage: Use::Granted,
            since: u64::MAX,
            lock: 3,
            exposed: false,
        });
        record
    }

    #[test]
    fn a_record_of_this_boot_is_read_as_it_was_written() {
        let (record, doubt) =
            Record::judge(Some(&sample().encode()), &identity(Some("host"), "boot"), Some(7));
        assert_eq!((record, doubt), (sample(), None));
        assert_eq!(sample().clean("egm4").size(), 0x3000);
    }

    #[test]
    fn a_record_in_doubt_calls_nothing_clean_and_keeps_bad_pages_of_the_same_host() {
        let bytes = sample().encode();
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
            let (record, _) = Record::judge(Some(&record.encode()), &identity(None, boot), None);
            assert_eq!(record.retired("egm4").size(), retired);
        }
    }

    #[test]
    fn a_record_that_was_cut_anywhere_is_broken() {
        let (bytes, identity) = (sample().encode(), identity(Some("host"), "boot"));
        // The last byte is the line's end.
        for length in 0..bytes.len() - 1 {
            assert_eq!(Record::judge(Some(&bytes[..length]), &identity, Some(7)).1, Some(Doubt::Broken));
        }
    }

    proptest! {
        #[test]
        fn a_changed_byte_never_changes_what_is_read(at in 0usize..2000, to: u8) {
            let (mut bytes, identity) = (sample().encode(), identity(Some("host"), "boot"));
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
