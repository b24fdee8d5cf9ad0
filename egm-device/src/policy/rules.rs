//! Rules, and their decision on one request.

use std::fmt;
use std::num::NonZeroU32;

use egm_address::ByteSize;

use super::accounts::{Accounts, Tenant};

/// Identity of a process, as the kernel reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Effective user at the time it connected.
    pub uid: u32,
    /// Effective and supplementary groups.
    pub gids: Vec<u32>,
}

/// The user or group that a rule names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// One user.
    User(u32),
    /// The members of one group, each on its own account.
    Group(u32),
}

impl Who {
    fn names(self, peer: &Peer) -> bool {
        match self {
            Self::User(uid) => peer.uid == uid,
            Self::Group(gid) => peer.gids.contains(&gid),
        }
    }
}

/// Position of a rule in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub(super) usize);

/// What one rule allows. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Name of the rule in refusals and for operators.
    pub name: String,
    /// The user or group that it names.
    pub who: Who,
    /// The VM class that the rule is for: a request names a class, and the rule grants the right to it.
    pub class: Option<String>,
    /// Names and kinds of regions; empty means every region.
    pub regions: Vec<String>,
    /// The most that all users of the rule may hold together.
    pub quota: Option<u64>,
    /// The most that one user may hold by it.
    pub quota_each: Option<u64>,
    /// Bytes kept free for the rule in its one region.
    pub reservation: u64,
    /// Higher goes first.
    pub priority: i32,
    /// Share among waiting tenants of one priority.
    pub weight: NonZeroU32,
    /// Whether its users may get the file of a whole region, and so the bytes of all tenants: [`Supply::shares_file`].
    pub whole_device: bool,
    /// Trust domain of its users' slices; without it each owner is a domain of its own.
    pub trust_domain: Option<String>,
}

impl Rule {
    fn covers(&self, supply: &Supply) -> bool {
        self.regions.is_empty() || self.regions.iter().any(|r| *r == supply.region || *r == supply.kind)
    }

    /// Whether user `uid` may get a descriptor of `supply`. Root opens every device anyway.
    fn may_hold(&self, uid: u32, supply: &Supply) -> bool {
        egm_address::fault!("whole-device-rule-ignored")
            || uid == 0
            || self.whole_device
            || !supply.shares_file
    }
}

/// The memory that a region has for requests, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supply {
    /// The region's name.
    pub region: String,
    /// Its kind, as configuration files write it: `egm`, `devdax`, `hugetlb`, …
    pub kind: String,
    /// Its page: slices are a multiple of it. Not zero.
    pub page_size: u64,
    /// Bytes that are not retired, free or held.
    pub usable: u64,
    /// Bytes that no owner holds.
    pub free: u64,
    /// The largest slice that fits now; at most `free`.
    pub largest: u64,
    /// Whether all slices are one file, so that the holder of one slice can map the others.
    pub shares_file: bool,
}

/// A request for a slice of one region.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Bytes.
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
    pub why: Why,
    /// What is free for this peer instead.
    pub free: Free,
}

impl Refusal {
    fn rule_text(&self) -> String {
        self.rule.as_ref().map_or_else(|| "the policy".to_owned(), |name| format!("rule {name:?}"))
    }
}

/// Why a request is not granted. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Why {
    #[error("no rule lets user {uid} take from {region:?}: an operator can add one")]
    NoRule { uid: u32, region: String },
    #[error("no rule lets user {uid} start class {class:?} with {region:?}: an operator can add one")]
    NoClass { uid: u32, class: String, region: String },
    #[error("{} is not a multiple of the page of {region:?}, {}", ByteSize::new(*size), ByteSize::new(*page))]
    Page { size: u64, region: String, page: u64 },
    #[error("{} is more than the quota of {}", ByteSize::new(*size), ByteSize::new(*quota))]
    AboveQuota { size: u64, quota: u64 },
    #[error("{} held and {} asked are more than the quota of {}: return a slice",
        ByteSize::new(*held), ByteSize::new(*size), ByteSize::new(*quota))]
    QuotaUsed { held: u64, size: u64, quota: u64 },
    #[error("{} is more than {region:?} can ever give: {}", ByteSize::new(*size), ByteSize::new(*most))]
    NeverFits { size: u64, region: String, most: u64 },
    #[error("{} does not fit in {region:?} now (available {}, largest contiguous block {})",
        ByteSize::new(*size), ByteSize::new(*free), ByteSize::new(*largest))]
    NoRoom { size: u64, region: String, free: u64, largest: u64 },
    #[error("{} does not fit in {region:?} now: the free memory is not so aligned, or an earlier owner still maps it",
        ByteSize::new(*size))]
    NoPlace { size: u64, region: String },
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
pub struct Free {
    /// Bytes over all regions that it may take from.
    pub total: u64,
    /// Bytes of the largest slice among them.
    pub largest: u64,
    /// For an operator: each region by name, with its bytes.
    pub regions: Vec<(String, u64)>,
}

impl fmt::Display for Free {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.total == 0 {
            return f.write_str("nothing else is free");
        }
        write!(f, "free: {}, {} in one piece", ByteSize::new(self.total), ByteSize::new(self.largest))?;
        let regions: Vec<_> =
            self.regions.iter().map(|(name, bytes)| format!("{name} {}", ByteSize::new(*bytes))).collect();
        if regions.is_empty() { Ok(()) } else { write!(f, " ({})", regions.join(", ")) }
    }
}

/// All rules; the first that fits a request decides. The last rule always names root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
}

impl Policy {
    /// `rules` and, behind them, root's: any region, no limit, nothing reserved.
    #[must_use]
    pub fn new(mut rules: Vec<Rule>) -> Self {
        rules.push(Rule {
            name: "root".to_owned(),
            who: Who::User(0),
            class: None,
            regions: Vec::new(),
            quota: None,
            quota_each: None,
            reservation: 0,
            priority: 0,
            weight: NonZeroU32::MIN,
            whole_device: true,
            trust_domain: None,
        });
        Self { rules }
    }

    /// The policy of a host without a policy file: root only.
    #[must_use]
    pub fn root_only() -> Self {
        Self::new(Vec::new())
    }

    /// Every rule, root's last.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The rule of a tenant.
    #[must_use]
    pub fn rule(&self, tenant: Tenant) -> Option<&Rule> {
        self.of(tenant.rule)
    }

    pub(super) fn of(&self, rule: RuleId) -> Option<&Rule> {
        self.rules.get(rule.0)
    }

    /// The tenant that `peer` is for a slice of `supply` and VM class `class`: the first rule that names all three.
    #[must_use]
    pub fn tenant(&self, peer: &Peer, class: Option<&str>, supply: &Supply) -> Option<Tenant> {
        let fits =
            |rule: &Rule| rule.who.names(peer) && rule.class.as_deref() == class && rule.covers(supply);
        self.rules.iter().position(fits).map(|at| Tenant { rule: RuleId(at), uid: peer.uid })
    }

    /// Whether any rule names `peer`: the broker may ignore a peer that no rule names.
    #[must_use]
    pub fn knows(&self, peer: &Peer) -> bool {
        self.rules.iter().any(|rule| rule.who.names(peer))
    }

    /// The trust domain in every rule for `who`; `None` when their domains differ, or no rule is for `who`.
    #[must_use]
    pub fn domain_of(&self, who: Who) -> Option<&str> {
        let mut domains =
            self.rules.iter().filter(|rule| rule.who == who).map(|rule| rule.trust_domain.as_deref());
        let first = domains.next()?;
        first.filter(|_| domains.all(|domain| domain == first))
    }

    /// Bytes of `supply` that are reserved for rules other than `rule` while nothing is held.
    #[must_use]
    pub fn reserved_from(&self, rule: RuleId, region: &str) -> u64 {
        let others = self.reservations(region).filter(|(id, _)| *id != rule);
        others.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Rules that keep bytes of `region`, and how many.
    pub(super) fn reservations(&self, region: &str) -> impl Iterator<Item = (RuleId, u64)> {
        let kept = move |rule: &Rule| rule.reservation > 0 && rule.regions.iter().any(|r| r == region);
        self.rules.iter().enumerate().filter(move |(_, r)| kept(r)).map(|(at, r)| (RuleId(at), r.reservation))
    }

    /// Decides on the request of `peer` for a slice of `supply`, where `accounts` has all current holdings. `all`
    /// regions are for the answer to "what is free instead".
    #[must_use]
    pub fn decide(
        &self,
        peer: &Peer,
        ask: Ask<'_>,
        supply: &Supply,
        accounts: &Accounts,
        all: &[Supply],
    ) -> Decision {
        let refusal = |rule: Option<&Rule>, why| Refusal {
            rule: rule.map(|rule| rule.name.clone()),
            why,
            free: self.free_for(peer, accounts, all),
        };
        let Some(tenant) = self.tenant(peer, ask.class, supply) else {
            return Decision::Refused(refusal(None, no_rule(peer, ask, &supply.region)));
        };
        let rule = self.of(tenant.rule);
        if let Some(why) = self.never(tenant, ask.size, supply) {
            return Decision::Refused(refusal(rule, why));
        }
        match self.not_now(tenant, ask.size, supply, accounts) {
            Some(why) => Decision::Wait(tenant, refusal(rule, why)),
            None => Decision::Allowed(tenant),
        }
    }

    /// Why `tenant` can never have `size` bytes of `supply`.
    fn never(&self, tenant: Tenant, size: u64, supply: &Supply) -> Option<Why> {
        let rule = self.of(tenant.rule)?;
        let region = || supply.region.clone();
        if !rule.may_hold(tenant.uid, supply) {
            return Some(Why::WholeDevice { uid: tenant.uid, region: region() });
        }
        if size == 0 || !size.is_multiple_of(supply.page_size) {
            return Some(Why::Page { size, region: region(), page: supply.page_size });
        }
        let quota = rule.quota.into_iter().chain(rule.quota_each).min().filter(|quota| size > *quota);
        if let Some(quota) = quota {
            return Some(Why::AboveQuota { size, quota });
        }
        let most = supply.usable.saturating_sub(self.reserved_from(tenant.rule, &supply.region));
        (size > most).then(|| Why::NeverFits { size, region: region(), most })
    }

    /// Why `tenant` cannot have `size` bytes of `supply` now.
    pub(super) fn not_now(
        &self,
        tenant: Tenant,
        size: u64,
        supply: &Supply,
        accounts: &Accounts,
    ) -> Option<Why> {
        if let Some(why) = self.quota_used(tenant, size, accounts) {
            return Some(why);
        }
        let free = accounts.free_for(self, tenant.rule, supply);
        let largest = free.min(supply.largest);
        let region = supply.region.clone();
        (size > largest).then_some(Why::NoRoom { size, region, free, largest })
    }

    /// Why the quotas of `tenant` do not let it hold `size` bytes more.
    pub(super) fn quota_used(&self, tenant: Tenant, size: u64, accounts: &Accounts) -> Option<Why> {
        let rule = self.of(tenant.rule).filter(|_| !egm_address::fault!("quota-ignored"))?;
        let over = |held: u64, quota: Option<u64>| {
            let quota = quota?;
            (held.saturating_add(size) > quota).then_some(Why::QuotaUsed { held, size, quota })
        };
        over(accounts.held(tenant), rule.quota_each)
            .or_else(|| over(accounts.held_by_rule(tenant.rule), rule.quota))
    }

    /// Memory that `peer` could take now, whatever its class.
    #[must_use]
    pub fn free_for(&self, peer: &Peer, accounts: &Accounts, all: &[Supply]) -> Free {
        let mut free = Free::default();
        for supply in all {
            let mut rules = self.rules.iter().enumerate();
            let named = rules.find(|(_, rule)| rule.who.names(peer) && rule.covers(supply));
            let Some((at, _)) = named.filter(|(_, rule)| rule.may_hold(peer.uid, supply)) else { continue };
            let bytes = accounts.free_for(self, RuleId(at), supply);
            free.total = free.total.saturating_add(bytes);
            free.largest = free.largest.max(bytes.min(supply.largest));
            if peer.uid == 0 {
                free.regions.push((supply.region.clone(), bytes));
            }
        }
        free
    }
}

fn no_rule(peer: &Peer, ask: Ask<'_>, region: &str) -> Why {
    let (uid, region) = (peer.uid, region.to_owned());
    match ask.class {
        Some(class) => Why::NoClass { uid, class: class.to_owned(), region },
        None => Why::NoRule { uid, region },
    }
}
