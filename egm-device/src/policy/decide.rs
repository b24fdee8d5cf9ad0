//! Decision on one request, by the rules and all current holdings.

use std::collections::BTreeMap;
use std::fmt;

use egm_address::ByteSize;

use super::accounts::Accounts;
use super::rules::{Peer, Policy, Rule, RuleId, Supply, Tenant};

/// A request for a slice of one region.
#[derive(Debug, Clone, Copy)]
pub struct RegionRequest<'a> {
    /// Requested size in bytes.
    pub size: u64,
    /// The VM class that the requester claims to start.
    pub class: Option<&'a str>,
}

/// The policy's answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// There is room, and this tenant may have it.
    Allowed(Tenant),
    /// This tenant may have it later; the refusal is for a requester that does not wait.
    Wait(Tenant, Refusal),
    /// Never, as things are configured.
    Refused(Refusal),
}

/// A request that is not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{rule}: {why}; {free}", rule = self.rule_text())]
pub struct Refusal {
    /// Name of the rule that decided; `None` when no rule names the peer.
    pub rule: Option<String>,
    /// Reason of the refusal.
    pub why: RefusalReason,
    /// Memory that is free for this peer.
    pub free: FreeMemory,
}

impl Refusal {
    fn rule_text(&self) -> String {
        self.rule.as_ref().map_or_else(|| "the policy".to_owned(), |name| format!("rule {name:?}"))
    }
}

/// Why a request is not granted. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum RefusalReason {
    #[error("no rule lets user {uid} take from {region:?}: an operator can add one")]
    NoRule { uid: u32, region: String },
    #[error("no rule lets user {uid} start class {class:?} with {region:?}: an operator can add one")]
    NoClass { uid: u32, class: String, region: String },
    #[error("{} is not a multiple of the page of {region:?}, {}", ByteSize::new(*size), ByteSize::new(*page))]
    Page { size: u64, region: String, page: u64 },
    #[error("{} is more than the quota of {}", ByteSize::new(*size), ByteSize::new(*quota))]
    AboveQuota { size: u64, quota: u64 },
    #[error("{} held and {} requested exceed the quota of {}: return a slice",
        ByteSize::new(*held), ByteSize::new(*size), ByteSize::new(*quota))]
    QuotaUsed { held: u64, size: u64, quota: u64 },
    #[error("{} is more than {region:?} can ever give: {}", ByteSize::new(*size), ByteSize::new(*most))]
    NeverFits { size: u64, region: String, most: u64 },
    #[error("{} does not fit in {region:?} now (available {}, largest contiguous block {})",
        ByteSize::new(*size), ByteSize::new(*free), ByteSize::new(*largest))]
    NoRoom { size: u64, region: String, free: u64, largest: u64 },
    #[error("{} does not fit in {region:?} now: the free memory is not so aligned, or an earlier owner still maps it",
        ByteSize::new(*size))]
    NoPlacement { size: u64, region: String },
    #[error(
        "all slices of {region:?} are one file, which would give user {uid} every tenant's bytes, and the host's for \
        reserved memory: run the machine as root with egm-vmm run --user, or add \"whole_device\": true to the rule"
    )]
    WholeDevice { uid: u32, region: String },
    #[error("this host has no region {names}")]
    NoRegion { names: String },
    #[error("others wait for {region:?} and go first")]
    OthersFirst { region: String },
}

/// Memory that is free for a peer, without the reservations of others. An ordinary user sees no region names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreeMemory {
    /// Bytes over all regions that it may take from.
    pub total: u64,
    /// Bytes of the largest slice among them.
    pub largest: u64,
    /// For an operator: each region by name, with its bytes.
    pub regions: Vec<(String, u64)>,
}

impl fmt::Display for FreeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.total == 0 {
            return f.write_str("nothing else is available");
        }
        let (total, largest) = (ByteSize::new(self.total), ByteSize::new(self.largest));
        write!(f, "available: {total}, largest contiguous block: {largest}")?;
        let regions: Vec<_> =
            self.regions.iter().map(|(name, bytes)| format!("{name} {}", ByteSize::new(*bytes))).collect();
        if regions.is_empty() { Ok(()) } else { write!(f, " ({})", regions.join(", ")) }
    }
}

impl Policy {
    /// Decides on the request of `peer` for a slice of `supply`, where `accounts` has all current holdings. `all`
    /// regions are for the answer to "what is free instead".
    #[must_use]
    pub fn decide(
        &self,
        peer: &Peer,
        request: RegionRequest<'_>,
        supply: &Supply,
        accounts: &Accounts,
        all: &[Supply],
    ) -> Decision {
        let refusal = |rule: Option<&Rule>, why| Refusal {
            rule: rule.map(|rule| rule.name.clone()),
            why,
            free: self.free_for(peer, accounts, all),
        };
        let Some(tenant) = self.tenant(peer, request.class, supply) else {
            return Decision::Refused(refusal(None, no_rule(peer, request, &supply.region)));
        };
        let rule = self.of(tenant.rule);
        if let Some(why) = self.never(tenant, request.size, supply) {
            return Decision::Refused(refusal(rule, why));
        }
        match self.not_now(tenant, request.size, supply, accounts) {
            Some(why) => Decision::Wait(tenant, refusal(rule, why)),
            None => Decision::Allowed(tenant),
        }
    }

    /// Why `tenant` can never have `size` bytes of `supply`.
    fn never(&self, tenant: Tenant, size: u64, supply: &Supply) -> Option<RefusalReason> {
        let rule = self.of(tenant.rule)?;
        let region = || supply.region.clone();
        if !rule.may_hold(tenant.uid, supply) {
            return Some(RefusalReason::WholeDevice { uid: tenant.uid, region: region() });
        }
        if size == 0 || !size.is_multiple_of(supply.page_size) {
            return Some(RefusalReason::Page { size, region: region(), page: supply.page_size });
        }
        let quota = rule.quota.into_iter().chain(rule.quota_each).min().filter(|quota| size > *quota);
        if let Some(quota) = quota {
            return Some(RefusalReason::AboveQuota { size, quota });
        }
        let most = supply.usable.saturating_sub(self.reserved_from(tenant.rule, &supply.region));
        (size > most).then(|| RefusalReason::NeverFits { size, region: region(), most })
    }

    /// Why `tenant` cannot have `size` bytes of `supply` now.
    pub(super) fn not_now(
        &self,
        tenant: Tenant,
        size: u64,
        supply: &Supply,
        accounts: &Accounts,
    ) -> Option<RefusalReason> {
        if let Some(why) = self.quota_used(tenant, size, accounts) {
            return Some(why);
        }
        let free = accounts.free_for(self, tenant.rule, supply);
        let largest = free.min(supply.largest);
        let region = supply.region.clone();
        (size > largest).then_some(RefusalReason::NoRoom { size, region, free, largest })
    }

    /// Why the quotas of `tenant` do not let it hold `size` bytes more.
    pub(super) fn quota_used(&self, tenant: Tenant, size: u64, accounts: &Accounts) -> Option<RefusalReason> {
        let rule = self.of(tenant.rule).filter(|_| !egm_address::fault!("quota-ignored"))?;
        let over = |held: u64, quota: Option<u64>| {
            let quota = quota?;
            (held.saturating_add(size) > quota).then_some(RefusalReason::QuotaUsed { held, size, quota })
        };
        over(accounts.held(tenant), rule.quota_each)
            .or_else(|| over(accounts.held_by_rule(tenant.rule), rule.quota))
    }

    /// Bytes that the quotas of `tenant` let it hold beside what it holds.
    fn room(&self, tenant: Tenant, accounts: &Accounts) -> u64 {
        let Some(rule) = self.of(tenant.rule) else { return u64::MAX };
        let room = |quota: Option<u64>, held: u64| quota.map_or(u64::MAX, |quota| quota.saturating_sub(held));
        let each = room(rule.quota_each, accounts.held(tenant));
        each.min(room(rule.quota, accounts.held_by_rule(tenant.rule)))
    }

    /// Memory that `peer` could take now, whatever its class.
    #[must_use]
    pub(crate) fn free_for(&self, peer: &Peer, accounts: &Accounts, all: &[Supply]) -> FreeMemory {
        let mut free = FreeMemory::default();
        // A quota is for all regions of its rule together.
        let mut rooms = BTreeMap::new();
        for supply in all {
            let mut rules = self.rules().iter().enumerate();
            let named = rules.find(|(_, rule)| rule.who.names(peer) && rule.covers(supply));
            let Some((at, _)) = named.filter(|(_, rule)| rule.may_hold(peer.uid, supply)) else { continue };
            let tenant = Tenant { uid: peer.uid, rule: RuleId(at) };
            let room = self.room(tenant, accounts);
            let bytes = accounts.free_for(self, tenant.rule, supply).min(room);
            let left = rooms.entry(at).or_insert(room);
            free.total = free.total.saturating_add(bytes.min(*left));
            *left = left.saturating_sub(bytes);
            free.largest = free.largest.max(bytes.min(supply.largest));
            if peer.uid == 0 {
                free.regions.push((supply.region.clone(), bytes));
            }
        }
        free
    }
}

fn no_rule(peer: &Peer, request: RegionRequest<'_>, region: &str) -> RefusalReason {
    let (uid, region) = (peer.uid, region.to_owned());
    match request.class {
        Some(class) => RefusalReason::NoClass { uid, class: class.to_owned(), region },
        None => RefusalReason::NoRule { uid, region },
    }
}
