//! Current holdings of each tenant, and their sum over time.

use std::collections::BTreeMap;
use std::time::Duration;

use super::rules::{Policy, RuleId, Supply, Tenant};

/// Bits behind the point of a share.
const FRACTION: u32 = 16;

/// Current holdings of tenants, in bytes, and their sum over time, in bytes times milliseconds divided by weight.
#[derive(Debug, Clone, Default)]
pub struct Accounts {
    held: BTreeMap<(Tenant, String), u64>,
    /// Bytes that clients of earlier brokers may still have.
    left: BTreeMap<(Tenant, String), u64>,
    served: BTreeMap<Tenant, u128>,
    clock: Duration,
}

impl Accounts {
    /// Bytes that `tenant` holds in all regions.
    #[must_use]
    pub fn held(&self, tenant: Tenant) -> u64 {
        self.sum(|(t, _)| *t == tenant)
    }

    /// Bytes that all tenants of `rule` hold in all regions.
    #[must_use]
    pub(crate) fn held_by_rule(&self, rule: RuleId) -> u64 {
        self.sum(|(t, _)| t.rule == rule)
    }

    /// Bytes that all tenants hold in `region`.
    #[cfg(test)]
    pub(crate) fn held_in(&self, region: &str) -> u64 {
        self.sum(|(_, r)| r == region)
    }

    /// Bytes of `rule`'s reservation in `region` that it does not hold yet.
    #[must_use]
    pub(crate) fn unused_reservation(&self, policy: &Policy, rule: RuleId, region: &str) -> u64 {
        let reserved = policy.reservations(region).find(|(id, _)| *id == rule).map_or(0, |(_, bytes)| bytes);
        reserved.saturating_sub(self.sum(|(t, r)| t.rule == rule && r == region))
    }

    /// Bytes of `supply` that are free and not kept for rules other than `rule`.
    #[must_use]
    pub(crate) fn free_for(&self, policy: &Policy, rule: RuleId, supply: &Supply) -> u64 {
        let others = policy.reservations(&supply.region).filter(|(id, _)| *id != rule);
        let kept = others.map(|(id, _)| self.unused_reservation(policy, id, &supply.region));
        supply.free.saturating_sub(kept.fold(0, u64::saturating_add))
    }

    /// The holdings of `tenant` summed up to the last `advance`, in bytes times milliseconds, divided by its weight.
    #[must_use]
    pub fn served(&self, tenant: Tenant) -> u128 {
        self.served.get(&tenant).map_or(0, |served| served >> FRACTION)
    }

    /// The order among tenants of one priority: least held for its weight, then least had for its weight.
    pub(super) fn share(&self, policy: &Policy, tenant: Tenant) -> (u128, u128) {
        let held = weighed(policy, tenant, u128::from(self.held(tenant)));
        (held, self.served.get(&tenant).copied().unwrap_or(0))
    }

    /// Lets the clock, which only ever goes forward, reach `now`.
    pub(super) fn advance(&mut self, policy: &Policy, now: Duration) {
        let passed = now.saturating_sub(self.clock).as_millis();
        self.clock = self.clock.max(now);
        for ((tenant, _), bytes) in &self.held {
            let had = weighed(policy, *tenant, u128::from(*bytes).saturating_mul(passed));
            let served = self.served.entry(*tenant).or_default();
            *served = served.saturating_add(had);
        }
    }

    /// `tenant` begins to wait. Idle time is no credit: its account starts level with the `active` tenant that has had
    /// least. Accounts that carry no more information than that are dropped.
    pub(super) fn enter(&mut self, tenant: Tenant, active: impl Iterator<Item = Tenant>) {
        let mut active: Vec<Tenant> = active.chain(self.held.keys().map(|(t, _)| *t)).collect();
        if active.contains(&tenant) {
            return;
        }
        let had = |t: &Tenant| self.served.get(t).copied().unwrap_or(0);
        let least = active.iter().map(had).min().unwrap_or(0);
        active.push(tenant);
        let quiet = active.len() == 1;
        self.served.retain(|t, served| active.contains(t) || (!quiet && *served > least));
        let served = self.served.entry(tenant).or_default();
        *served = if quiet { 0 } else { least.max(*served) };
    }

    pub(super) fn take(&mut self, tenant: Tenant, region: &str, bytes: u64) {
        let held = self.held.entry((tenant, region.to_owned())).or_default();
        *held = held.saturating_add(bytes);
    }

    pub(super) fn credit(&mut self, tenant: Tenant, region: &str, bytes: u64) {
        let key = (tenant, region.to_owned());
        if let Some(held) = self.held.get_mut(&key) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                self.held.remove(&key);
            }
        }
    }

    /// Replaces the bytes that clients of earlier brokers may still have.
    pub(super) fn set_orphaned(&mut self, left: impl Iterator<Item = (Tenant, String, u64)>) {
        self.left.clear();
        for (tenant, region, bytes) in left {
            let sum = self.left.entry((tenant, region)).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    fn sum(&self, of: impl Fn(&(Tenant, String)) -> bool) -> u64 {
        let held = self.held.iter().chain(&self.left).filter(|(key, _)| of(key));
        held.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

fn weighed(policy: &Policy, tenant: Tenant, amount: u128) -> u128 {
    let weight = policy.of(tenant.rule).map_or(1, |rule| rule.weight.get());
    amount.saturating_mul(1 << FRACTION).checked_div(u128::from(weight)).unwrap_or(amount)
}
