//! The waiting queue: which request is served next.
//!
//! 1. Order: priority, then the tenant with the smallest holding for its weight, then the tenant with the smallest use
//!    over time for its weight, then arrival.
//! 2. A request that does not fit is passed over: memory is not idle while a smaller request can use it.
//! 3. This has a limit. A request that was passed over too often ([`OvertakeLimits`]) is *overdue*: overdue requests go
//!    first, in the order of arrival, and memory that becomes free in their candidate regions is kept for them.
//! 4. Reserved memory serves only its own rule: no other request takes it, and no overdue request blocks it.
//!
//! A request with a used-up quota does not count as waiting: it blocks no request and does not become overdue.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::accounts::Accounts;
use super::rules::{OrphanedSlice, Policy, Supply, Tenant};

/// Numbers of grants that may precede a waiting request before it is overdue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OvertakeLimits {
    /// Grants to requests behind it, because it did not fit.
    pub passes: u32,
    /// Grants to any request from its regions since it became its tenant's first. This bounds the wait whatever
    /// priorities and shares decide. It is large, so that it acts only against starvation.
    pub grants: u32,
}

impl Default for OvertakeLimits {
    fn default() -> Self {
        Self { passes: 16, grants: 1024 }
    }
}

/// Time for which a request skips a region that had no place for it, unless a slice comes back there: other processes
/// may free memory in it without a notification.
const PASS_OVER: Duration = Duration::from_secs(5);

/// A waiting request's number; later ones are larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// A region that can serve a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the region.
    pub region: String,
    /// The requester's tenant there.
    pub tenant: Tenant,
}

/// Position of a request in the serving order, in which smaller ranks come first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    overdue: Reverse<bool>,
    priority: Reverse<i32>,
    /// The tenant's share; overdue requests are served in the order of arrival.
    share: (u128, u128),
    ticket: Ticket,
}

/// A request in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiter {
    ticket: Ticket,
    size: u64,
    /// In the order in which the request names them; the first that fits serves it.
    candidates: Vec<Candidate>,
    passed: u32,
    seen: u32,
    /// Regions that had no place for it, and until when they are passed over.
    short: BTreeMap<String, Duration>,
}

impl Waiter {
    /// Ticket of this request.
    #[must_use]
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The tenant that orders the request by its share: that of its first candidate region.
    fn tenant(&self) -> Option<Tenant> {
        self.candidates.first().map(|candidate| candidate.tenant)
    }
}

/// A grant to make: the account is already charged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PickedRequest {
    /// The request that is served; it has left the queue.
    pub ticket: Ticket,
    /// The account that is charged.
    pub tenant: Tenant,
    /// Name of the region that serves it.
    pub region: String,
    /// Size of the slice, in bytes.
    pub size: u64,
    /// The request as it waited, for [`Queue::put_back`].
    waiter: Waiter,
}

/// The waiting requests, and the accounts that order them.
#[derive(Debug, Clone)]
pub struct Queue {
    policy: Policy,
    limits: OvertakeLimits,
    accounts: Accounts,
    /// In the order of arrival.
    waiting: Vec<Waiter>,
    next: u64,
}

impl Queue {
    /// An empty queue, with empty accounts.
    #[must_use]
    pub fn new(policy: Policy, limits: OvertakeLimits) -> Self {
        Self { policy, limits, accounts: Accounts::default(), waiting: Vec::new(), next: 0 }
    }

    /// The policy that the queue enforces.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Holdings of each tenant.
    #[must_use]
    pub const fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// The waiting requests, in the order of arrival.
    #[must_use]
    pub fn waiting(&self) -> &[Waiter] {
        &self.waiting
    }

    /// Adds a request for `size` bytes of any of `candidates`.
    pub fn arrive(&mut self, now: Duration, size: u64, candidates: Vec<Candidate>) -> Ticket {
        self.accounts.advance(&self.policy, now);
        let active: BTreeSet<Tenant> =
            self.waiting.iter().flat_map(|w| &w.candidates).map(|candidate| candidate.tenant).collect();
        for candidate in &candidates {
            self.accounts.enter(candidate.tenant, active.iter().copied());
        }
        let ticket = Ticket(self.next);
        self.next = self.next.saturating_add(1);
        self.waiting.push(Waiter { ticket, size, candidates, passed: 0, seen: 0, short: BTreeMap::new() });
        ticket
    }

    /// Removes a request that was cancelled or lost its client. Returns whether it was waiting.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|w| w.ticket != ticket);
        self.waiting.len() < before
    }

    /// Replaces the slices that clients of earlier brokers may still have. Those that no rule covers any more are on no
    /// account.
    pub(crate) fn set_orphaned(&mut self, left: &[OrphanedSlice], supplies: &[Supply]) {
        let on_account = |left: &OrphanedSlice| {
            let supply = supplies.iter().find(|supply| supply.region == left.region)?;
            Some((self.policy.tenant_of(left, supply)?, left.region.clone(), left.bytes))
        };
        self.accounts.set_orphaned(left.iter().filter_map(on_account));
    }

    /// A slice of a [`PickedRequest`] came back, or could not be made.
    pub fn credit(&mut self, now: Duration, tenant: Tenant, region: &str, size: u64) {
        self.accounts.advance(&self.policy, now);
        self.accounts.credit(tenant, region, size);
        for waiter in &mut self.waiting {
            waiter.short.remove(region);
        }
    }

    /// Queues `pick` again, because its region had no place although enough bytes are free. The request keeps its
    /// position and its counts, and skips that region until a slice comes back there, or for a few seconds.
    pub(crate) fn put_back(&mut self, now: Duration, pick: PickedRequest) {
        self.accounts.advance(&self.policy, now);
        self.accounts.credit(pick.tenant, &pick.region, pick.size);
        let mut waiter = pick.waiter;
        waiter.short.insert(pick.region, now.saturating_add(PASS_OVER));
        let at = self.waiting.partition_point(|other| other.ticket < waiter.ticket);
        self.waiting.insert(at, waiter);
    }

    /// The next grant that `supplies` have room for. After the grant, read the regions again and repeat the call.
    pub fn next(&mut self, now: Duration, supplies: &[Supply]) -> Option<PickedRequest> {
        self.accounts.advance(&self.policy, now);
        let mut closed = BTreeSet::new();
        let mut ahead = Vec::new();
        for index in self.order() {
            let waiter = self.waiting.get(index)?;
            let fits = |candidate: &&Candidate| self.fits(waiter, candidate, now, supplies, &closed);
            if let Some(Candidate { region, tenant }) = waiter.candidates.iter().find(fits).cloned() {
                let (ticket, size) = (waiter.ticket, waiter.size);
                let pick = PickedRequest { ticket, tenant, region, size, waiter: self.waiting.remove(index) };
                self.count(&pick, &ahead);
                self.accounts.take(tenant, &pick.region, pick.size);
                return Some(pick);
            }
            let regions = self.within_quota(waiter);
            if self.is_overdue(waiter) {
                closed.extend(regions.iter().map(|region| (*region).to_owned()));
            }
            if !regions.is_empty() {
                ahead.push(waiter.ticket);
            }
        }
        None
    }

    /// Indices of the waiting requests, in serving order.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<(Option<Rank>, usize)> =
            self.waiting.iter().enumerate().map(|(index, waiter)| (self.rank(waiter), index)).collect();
        order.sort();
        order.into_iter().map(|(_, index)| index).collect()
    }

    fn rank(&self, waiter: &Waiter) -> Option<Rank> {
        let (tenant, ticket) = (waiter.tenant()?, waiter.ticket);
        let overdue = Reverse(self.is_overdue(waiter));
        if overdue.0 {
            return Some(Rank { overdue, priority: Reverse(0), share: (0, 0), ticket });
        }
        let priority = Reverse(self.policy.of(tenant.rule).map_or(0, |rule| rule.priority));
        Some(Rank { overdue, priority, share: self.accounts.share(&self.policy, tenant), ticket })
    }

    const fn is_overdue(&self, waiter: &Waiter) -> bool {
        waiter.passed >= self.limits.passes || waiter.seen >= self.limits.grants
    }

    /// Regions in which only room keeps `waiter` from its slice: its quota does not.
    fn within_quota<'a>(&self, waiter: &'a Waiter) -> Vec<&'a str> {
        let has_quota = |candidate: &&Candidate| {
            self.policy.quota_used(candidate.tenant, waiter.size, &self.accounts).is_none()
        };
        waiter.candidates.iter().filter(has_quota).map(|candidate| candidate.region.as_str()).collect()
    }

    /// Whether `waiter` can be served from `candidate`, a `closed` one only from its rule's own reservation.
    fn fits(
        &self,
        waiter: &Waiter,
        candidate: &Candidate,
        now: Duration,
        supplies: &[Supply],
        closed: &BTreeSet<String>,
    ) -> bool {
        let Candidate { region, tenant } = candidate;
        let own = self.accounts.unused_reservation(&self.policy, tenant.rule, region);
        let is_open = !closed.contains(region) || waiter.size <= own;
        let is_short = waiter.short.get(region).is_some_and(|until| now < *until);
        let Some(supply) = supplies.iter().find(|supply| supply.region == *region) else { return false };
        is_open && !is_short && self.policy.not_now(*tenant, waiter.size, supply, &self.accounts).is_none()
    }

    /// Counts `pick` against each waiting request that could have used its region.
    fn count(&mut self, pick: &PickedRequest, ahead: &[Ticket]) {
        let mut firsts = BTreeSet::new();
        for index in 0..self.waiting.len() {
            let Some(waiter) = self.waiting.get(index) else { break };
            let first = waiter.tenant().is_some_and(|tenant| firsts.insert(tenant));
            let passed = ahead.contains(&waiter.ticket);
            if !self.within_quota(waiter).contains(&pick.region.as_str()) {
                continue;
            }
            if let Some(waiter) = self.waiting.get_mut(index) {
                waiter.passed = waiter.passed.saturating_add(u32::from(passed));
                waiter.seen = waiter.seen.saturating_add(u32::from(first));
            }
        }
    }
}
