//! What every byte of a region is: retired, held, clean or dirty.
#![forbid(unsafe_code)]

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use serde::{Serialize, Serializer};

use super::gpus::HeldGpu;
use super::record::{Doubt, Use};
use crate::owner::Owner;
use crate::region::Region;
use crate::region::usage::{self, Usage};
use crate::retired::Retired;

/// Bytes that somebody holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Where.
    pub span: Span<InRegion>,
    /// Who; `None` when the record does not say.
    pub owner: Option<Owner>,
    /// What for.
    pub usage: Use,
    /// Since when, in seconds of 1970 by the wall clock; 0 when the record does not say.
    pub since: u64,
}

/// The bytes of one region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct States {
    /// What somebody holds, by offset.
    pub held: Vec<Held>,
    /// GPUs that reach all of the region and have a live owner.
    pub gpus: Vec<HeldGpu>,
    /// Free bytes that need no scrub.
    #[serde(serialize_with = "spans")]
    pub clean: SpanSet<InRegion>,
    /// Free bytes that are scrubbed before anybody gets them. A pool has none.
    #[serde(serialize_with = "spans")]
    pub dirty: SpanSet<InRegion>,
    /// What nobody may use: the kernel's list and what was found since, held or not.
    pub retired: Retired,
    /// Why the record was not believed, if it was not.
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
            let owner = gpu.owner.as_ref().map_or_else(|| "an unknown process".to_owned(), Owner::to_string);
            match gpu.owner.as_ref().and_then(|owner| owner.domain.as_ref()) {
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

    /// What somebody holds.
    #[must_use]
    pub fn busy(&self) -> SpanSet<InRegion> {
        self.held.iter().map(|held| held.span).collect()
    }
}

impl From<&States> for Usage {
    fn from(states: &States) -> Self {
        let part = |span: Span<InRegion>| usage::Part {
            offset: span.start().get(),
            size: ByteSize::new(span.size()),
        };
        let owner = |held: &Held| held.owner.as_ref().map_or_else(|| "unknown".to_owned(), Owner::to_string);
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
