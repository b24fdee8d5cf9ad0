//! The policy's answer to a request that names several regions.

use super::wire::SliceRequest;
use crate::policy::{
    Candidate, Decision, FreeMemory, Peer, Policy, Queue, Refusal, RefusalReason, RegionRequest, Supply,
};

/// The policy's answer to a request.
pub(super) struct Judgement {
    /// Regions that can serve it now or later.
    pub(super) candidates: Vec<Candidate>,
    /// The reply to send when none can serve it now.
    pub(super) refusal: Refusal,
}

/// The policy's answer to `peer`, which requests `take`.
pub(super) fn judge(queue: &Queue, peer: &Peer, take: &SliceRequest, supplies: &[Supply]) -> Judgement {
    let (policy, accounts) = (queue.policy(), queue.accounts());
    let ask = RegionRequest { size: take.size, class: take.class.as_deref() };
    let mut candidates: Vec<Candidate> = Vec::new();
    let (mut never, mut later) = (None, None);
    for word in &take.regions {
        for supply in supplies.iter().filter(|s| s.region == *word || s.kind == *word) {
            if candidates.iter().any(|candidate| candidate.region == supply.region) {
                continue;
            }
            let tenant = match policy.decide(peer, ask, supply, accounts, supplies) {
                Decision::Refused(refusal) => {
                    never.get_or_insert(refusal);
                    continue;
                }
                Decision::Wait(tenant, refusal) => {
                    later.get_or_insert(refusal);
                    tenant
                }
                Decision::Allowed(tenant) => tenant,
            };
            candidates.push(Candidate { region: supply.region.clone(), tenant });
        }
    }
    let free = || policy.free_for(peer, accounts, supplies);
    let refusal = if candidates.is_empty() { never } else { later };
    let refusal = refusal.unwrap_or_else(|| otherwise(policy, candidates.first(), take, free()));
    Judgement { candidates, refusal }
}

/// The reply when there is room, or no such region.
fn otherwise(policy: &Policy, first: Option<&Candidate>, take: &SliceRequest, free: FreeMemory) -> Refusal {
    match first {
        Some(Candidate { region, tenant }) => {
            let rule = policy.rule(*tenant).map(|rule| rule.name.clone());
            Refusal { rule, why: RefusalReason::OthersFirst { region: region.clone() }, free }
        }
        None => Refusal { rule: None, why: RefusalReason::NoRegion { names: take.regions.join(", ") }, free },
    }
}
