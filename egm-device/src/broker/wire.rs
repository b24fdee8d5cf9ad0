//! Messages on the socket: one JSON value per packet, of [`MAX_PACKET`] bytes at most, or [`MAX_REPLY`] from the
//! broker.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::policy::{FreeMemory, Refusal, is_word};
use crate::region::Slice;

/// Most bytes in a client's packet; no legal one is so long.
pub const MAX_PACKET: usize = 4096;

/// Most bytes in a reply: the free bytes by region take more room than any request.
pub(super) const MAX_REPLY: usize = 2 * MAX_PACKET;

/// Most regions in a request.
const MAX_REGIONS: usize = 16;

/// Most spans in a packet about bad bytes.
pub(super) const MAX_SPANS: usize = 64;

/// Most regions in a reply; an operator of more can use `egm-device regions`.
const MAX_NAMES: usize = 48;

/// A slice that a client requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceRequest {
    /// Its name for operators, that of a VM or a job: 1 to 64 of A-Z a-z 0-9 . _ -
    pub name: String,
    /// Names or kinds of regions that it may come from, best first: 1 to 16.
    pub regions: Vec<String>,
    /// Bytes, whole pages of the region.
    pub size: u64,
    /// Alignment in bytes, a power of two; 0 for the region's page.
    pub align: u64,
    /// The VM class that it is for.
    pub class: Option<String>,
    /// Whether to wait where there is no room now.
    pub wait: bool,
}

/// A message from a client.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Request {
    Take(SliceRequest),
    /// The memory of this connection's slice is unmapped everywhere.
    Return,
    /// Bytes of this connection's slice went bad: where in the region, and how many. It has no answer.
    Bad(Vec<(u64, u64)>),
    /// Report the free bytes.
    Free,
}

/// A message from the broker.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Reply {
    /// With two descriptors: the memory, and a file with the region as JSON, as retired pages may be many.
    Granted {
        slice: Slice,
        /// Offset of the slice in the first descriptor.
        offset: u64,
    },
    /// In the queue, and why.
    Waiting(RefusalReply),
    Refused(RefusalReply),
    /// Scrubbed, or recorded as dirty. For a pool an acknowledgement: its slice is back when its process has ended.
    Returned,
    Free(FreeReply),
}

/// Why a request is not granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RefusalReply {
    /// The rule, the reason and what is free instead, as a sentence.
    pub(super) why: String,
    pub(super) rule: Option<String>,
    pub(super) free: FreeReply,
    /// The host's error where it is not for the peer, because it names other owners. It stays in this process.
    #[serde(skip)]
    pub(super) cause: Option<String>,
}

/// Free memory for the peer, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FreeReply {
    pub(super) total: u64,
    pub(super) largest: u64,
    /// Free bytes by region, for operators only.
    pub(super) regions: Vec<(String, u64)>,
}

impl From<FreeMemory> for FreeReply {
    fn from(mut free: FreeMemory) -> Self {
        free.regions.truncate(MAX_NAMES);
        Self { total: free.total, largest: free.largest, regions: free.regions }
    }
}

impl From<Refusal> for RefusalReply {
    fn from(mut refusal: Refusal) -> Self {
        refusal.free.regions.truncate(MAX_NAMES);
        Self { why: refusal.to_string(), rule: refusal.rule, free: refusal.free.into(), cause: None }
    }
}

impl RefusalReply {
    /// A refusal without a rule.
    pub(super) fn because(why: impl Into<String>) -> Self {
        Self { why: why.into(), rule: None, free: FreeReply::default(), cause: None }
    }
}

/// Parses and checks a request; the error names what is wrong.
pub(super) fn parse(packet: &[u8]) -> Result<Request, String> {
    let request = decode(packet).ok_or("cannot read the request: its format is unknown")?;
    if let Request::Take(take) = &request {
        let words = take.regions.iter().chain(&take.class).chain([&take.name]);
        if let Some(word) = words.into_iter().find(|word| !is_word(word)) {
            let start: String = word.chars().take(64).collect();
            return Err(format!("cannot use {start:?} as a name: write 1 to 64 of A-Z a-z 0-9 . _ -"));
        }
        if !(1..=MAX_REGIONS).contains(&take.regions.len()) {
            return Err(format!("{} regions are named: name 1 to {MAX_REGIONS}", take.regions.len()));
        }
        if take.align != 0 && !take.align.is_power_of_two() {
            return Err(format!("an alignment is a power of two, and {:#x} is none", take.align));
        }
    }
    if let Request::Bad(spans) = &request
        && spans.len() > MAX_SPANS
    {
        return Err(format!("{} spans are bad: name {MAX_SPANS} at a time", spans.len()));
    }
    Ok(request)
}

pub(super) fn decode<T: DeserializeOwned>(packet: &[u8]) -> Option<T> {
    if packet.len() > MAX_PACKET {
        return None;
    }
    serde_json::from_slice(packet).ok()
}

/// Encodes a packet. Every map has string keys, so the value always has a JSON form.
pub(super) fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::RefusalReason;

    pub(crate) fn take(region: &str, size: u64) -> SliceRequest {
        SliceRequest {
            name: "vm".into(),
            regions: vec![region.into()],
            size,
            align: 0,
            class: None,
            wait: true,
        }
    }

    #[test]
    fn the_longest_request_and_the_longest_refusal_fit_a_packet() {
        let long = "x".repeat(64);
        let most = SliceRequest {
            name: long.clone(),
            regions: vec![long.clone(); MAX_REGIONS],
            size: u64::MAX,
            align: 1 << 63,
            class: Some(long.clone()),
            wait: false,
        };
        let packet = encode(&Request::Take(most));
        assert!(packet.len() < MAX_PACKET / 2 && parse(&packet).is_ok());
        let bad = encode(&Request::Bad(vec![(u64::MAX, u64::MAX); MAX_SPANS]));
        assert!(bad.len() < MAX_PACKET && parse(&bad).is_ok());
        let region = "r".repeat(32);
        let why = RefusalReason::NoClass { uid: u32::MAX, class: long.clone(), region: region.clone() };
        let free = FreeMemory { total: u64::MAX, largest: u64::MAX, regions: vec![(region, u64::MAX); 1000] };
        let refused = Reply::Refused(Refusal { rule: Some(long), why, free }.into());
        assert!(encode(&refused).len() < MAX_REPLY);
    }

    #[test]
    fn what_is_no_request_is_refused_with_what_is_wrong() {
        let with = |change: fn(&mut SliceRequest)| {
            let mut take = take("egm4", 1);
            change(&mut take);
            parse(&encode(&Request::Take(take))).unwrap_err()
        };
        assert_eq!(with(|t| t.align = 3), "an alignment is a power of two, and 0x3 is none");
        assert_eq!(with(|t| t.regions.clear()), "0 regions are named: name 1 to 16");
        assert_eq!(
            with(|t| t.name = "\u{1b}[2J".into()),
            "cannot use \"\\u{1b}[2J\" as a name: write 1 to 64 of A-Z a-z 0-9 . _ -"
        );
        assert!(parse(&encode(&Request::Bad(vec![(0, 1); MAX_SPANS + 1]))).is_err());
        assert!(parse(b"{\"take\":{}}").is_err() && parse(b"").is_err() && parse(&[b' '; 5000]).is_err());
    }

    proptest! {
        #[test]
        fn any_packet_is_a_request_or_refused(packet in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(request) = parse(&packet) {
                prop_assert_eq!(parse(&encode(&request)).unwrap(), request);
            }
        }
    }
}
