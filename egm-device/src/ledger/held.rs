//! Bytes and GPUs that owners hold.

use egm_address::{InRegion, PciAddress, Span};
use serde::Serialize;

use super::openers::OpenGpu;
use super::record::{GpuClaim, GrantState};
use crate::free::Evidence;
use crate::owner::Owner;
use crate::trust::Party;

/// Bytes that an owner holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeldBytes {
    /// Their place in the region.
    pub span: Span<InRegion>,
    /// The owner; `None` when the record has none.
    pub owner: Option<Owner>,
    /// State of the grant.
    pub usage: GrantState,
    /// Start of the grant, in seconds of 1970 by the wall clock; 0 when the record has none.
    pub since: u64,
    /// Evidence that quarantined bytes are in use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
}

impl HeldBytes {
    /// Bytes in use that the record has no grant of.
    pub(super) const fn unrecorded(span: Span<InRegion>, usage: GrantState) -> Self {
        Self { span, owner: None, usage, since: 0, evidence: Vec::new() }
    }

    /// Whether no owner has them, and they may be in use.
    #[must_use]
    pub fn is_quarantined(&self) -> bool {
        self.usage == GrantState::Quarantined
    }
}

/// A GPU that reaches a region and has a live owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeldGpu {
    /// Address of the GPU.
    pub function: PciAddress,
    /// Its owner; `None` when the record has none for the lock.
    pub owner: Option<Owner>,
    /// Start of the claim, in seconds of 1970 by the wall clock; 0 when unknown.
    pub since: u64,
    /// The users that may open it, if this is not a claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_to: Option<OpenGpu>,
    /// Evidence that the GPU of an owner that has ended is in use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
}

impl HeldGpu {
    /// A GPU that users may open.
    pub(super) const fn open(function: PciAddress, open: OpenGpu) -> Self {
        Self { function, owner: None, since: 0, open_to: Some(open), evidence: Vec::new() }
    }

    /// A claim on `function`; without a record of it, its owner is unknown.
    pub(super) fn claimed(function: PciAddress, claim: Option<&GpuClaim>) -> Self {
        let (owner, since) = claim.map_or((None, 0), |claim| (Some(claim.owner.clone()), claim.since));
        let evidence = claim.map_or_else(Vec::new, |claim| claim.evidence.clone());
        Self { function, owner, since, open_to: None, evidence }
    }

    /// The owner or the users, in words.
    #[must_use]
    pub fn party(&self) -> Party {
        if let Some(open) = &self.open_to {
            return Party { owner: open.to_string(), domain: open.domain.clone() };
        }
        let mut party = self.owner.as_ref().map_or_else(unknown, Party::from);
        if !self.evidence.is_empty() {
            let evidence = Evidence::summary(&self.evidence);
            party.owner.push_str(&format!(" (ended, but its GPU is in use: {evidence})"));
        }
        party
    }

    /// Whether `owner` may share the region with this GPU.
    pub(super) fn is_trusted_by(&self, owner: &Owner) -> bool {
        match &self.open_to {
            Some(open) => open.is_trusted_by(owner),
            None => self.owner.as_ref().is_some_and(|other| owner.trusts(other)),
        }
    }
}

pub(super) fn unknown() -> Party {
    Party { owner: "an unknown process".to_owned(), domain: None }
}
