//! Limits on what clients may claim to be bad memory, until the claims are checked with the return of the slice.

use egm_address::{InRegion, SpanSet};
use egm_report::show::size;

use super::Server;
use crate::audit::{Event, Finding, RegionBytes};
use crate::broker::link::Link;
use crate::broker::session::Key;

/// Claims that wait to be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClaimAmount {
    spans: usize,
    bytes: u64,
}

/// The most that one user may claim.
const OF_USER: ClaimAmount = ClaimAmount { spans: 4096, bytes: 256 << 20 };

/// The most that may be claimed of one region.
const OF_REGION: ClaimAmount = ClaimAmount { spans: 16_384, bytes: 1 << 30 };

impl Server {
    /// Records that the client of `key` claims `spans` of its slice to be bad, unless its user or the region has too
    /// many claims already. The scrub of the slice finds bad pages in either case.
    pub(super) fn claim(&mut self, key: Key, spans: &[(u64, u64)]) {
        let Some(link) = self.links.get(&key) else { return };
        let (Some(region), claimed) = (link.region(), link.with_claims(spans)) else { return };
        let others = |is_meant: &dyn Fn(&Link) -> bool| {
            let links = self.links.iter().filter(|(other, link)| **other != key && is_meant(link));
            links.fold(ClaimAmount::of(&claimed), |sum, (_, link)| sum.and(ClaimAmount::of(link.claims())))
        };
        let uid = link.uid();
        let of_user = others(&|link| link.uid() == uid);
        let of_region = others(&|link| link.region() == Some(region));
        let reason = if of_user.exceeds(OF_USER) {
            format!("user {} has more claims that are not checked yet than {OF_USER}", link.uid())
        } else if of_region.exceeds(OF_REGION) {
            format!("region {region} has more claims that are not checked yet than {OF_REGION}")
        } else {
            if let Some(link) = self.links.get_mut(&key) {
                link.set_claims(claimed);
            }
            return;
        };
        let new = claimed.minus(link.claims());
        if let Some(place) = RegionBytes::of_set(region, &new) {
            let finding = Finding::new(link.by(), place, reason);
            self.source.audit().write(&Event::ClaimRefused(finding));
        }
    }
}

impl ClaimAmount {
    fn of(claims: &SpanSet<InRegion>) -> Self {
        Self { spans: claims.iter().count(), bytes: claims.size() }
    }

    const fn and(self, other: Self) -> Self {
        Self { spans: self.spans.saturating_add(other.spans), bytes: self.bytes.saturating_add(other.bytes) }
    }

    const fn exceeds(self, most: Self) -> bool {
        self.spans > most.spans || self.bytes > most.bytes
    }
}

impl std::fmt::Display for ClaimAmount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} spans or {}", self.spans, size(self.bytes))
    }
}
