//! The policy's answer to a request that names several regions.

use super::wire::SliceRequest;
use crate::policy::{
    Decision, FreeMemory, Peer, Policy, Queue, Refusal, RefusalReason, RegionRequest, Supply, Tenant,
};

/// Regions that can serve `peer` now or later, each with the tenant that is charged there; and the reply to send when
/// none can serve it now.
pub(super) fn judge(
    queue: &Queue,
    peer: &Peer,
    take: &SliceRequest,
    supplies: &[Supply],
) -> (Vec<(String, Tenant)>, Refusal) {
    let (policy, accounts) = (queue.policy(), queue.accounts());
    let ask = RegionRequest { size: take.size, class: take.class.as_deref() };
    let mut places: Vec<(String, Tenant)> = Vec::new();
    let (mut never, mut later) = (None, None);
    for word in &take.regions {
        for supply in supplies.iter().filter(|s| s.region == *word || s.kind == *word) {
            if places.iter().any(|(region, _)| *region == supply.region) {
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
            places.push((supply.region.clone(), tenant));
        }
    }
    let free = || policy.free_for(peer, accounts, supplies);
    let refusal = if places.is_empty() { never } else { later };
    let refusal = refusal.unwrap_or_else(|| otherwise(policy, places.first(), take, free()));
    (places, refusal)
}

/// The reply when there is room, or no such region.
fn otherwise(
    policy: &Policy,
    first: Option<&(String, Tenant)>,
    take: &SliceRequest,
    free: FreeMemory,
) -> Refusal {
    match first {
        Some((region, tenant)) => {
            let rule = policy.rule(*tenant).map(|rule| rule.name.clone());
            Refusal { rule, why: RefusalReason::OthersFirst { region: region.clone() }, free }
        }
        None => Refusal { rule: None, why: RefusalReason::NoRegion { names: take.regions.join(", ") }, free },
    }
}
