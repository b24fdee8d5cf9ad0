//! Rules: the users that they name, the regions that they cover, and their limits.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

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
pub enum RuleSubject {
    /// One user, by number.
    User(u32),
    /// The members of one group, each on its own account.
    Group(u32),
}

impl RuleSubject {
    pub(super) fn names(self, peer: &Peer) -> bool {
        match self {
            Self::User(uid) => peer.uid == uid,
            Self::Group(gid) => peer.gids.contains(&gid),
        }
    }
}

/// Position of a rule in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub(super) usize);

/// The account that a slice is on: a user, by the rule that allowed the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant {
    /// The rule that allowed the slice.
    pub rule: RuleId,
    /// User id of the client.
    pub uid: u32,
}

/// An account without its user, by names that are still valid after the broker has ended and its policy has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Charge {
    /// The group that the rule names, if it names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// The VM class that the rule names, if it names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
}

/// A slice of a pool that a client of an earlier broker may still have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrphanedSlice {
    /// Name of the region.
    pub region: String,
    /// User id of the client.
    pub uid: u32,
    /// The account, together with `uid`.
    pub charge: Charge,
    /// Size of the slice, in bytes.
    pub bytes: u64,
}

/// Permissions of one rule. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Name of the rule in refusals and for operators.
    pub name: String,
    /// The user or group that it names.
    pub who: RuleSubject,
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
    /// Requests of a higher priority are served first.
    pub priority: i32,
    /// Share among waiting tenants of one priority.
    pub weight: NonZeroU32,
    /// Whether its users may get the file of a whole region, and so the bytes of all tenants: [`Supply::shares_file`].
    pub whole_device: bool,
    /// Trust domain of its users' slices; without it each owner is a domain of its own.
    pub trust_domain: Option<String>,
}

impl Rule {
    pub(super) fn covers(&self, supply: &Supply) -> bool {
        self.regions.is_empty() || self.regions.iter().any(|r| *r == supply.region || *r == supply.kind)
    }

    /// Whether user `uid` may get a descriptor of `supply`. Root opens every device anyway.
    pub(super) fn may_hold(&self, uid: u32, supply: &Supply) -> bool {
        egm_address::fault!("whole-device-rule-ignored")
            || uid == 0
            || self.whole_device
            || !supply.shares_file
    }
}

/// The memory that a region has for requests, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supply {
    /// Name of the region.
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
            who: RuleSubject::User(0),
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

    /// The account of `tenant`, for the record.
    #[must_use]
    pub(crate) fn charge(&self, tenant: Tenant) -> Charge {
        let rule = self.of(tenant.rule);
        let gid = rule.and_then(|rule| match rule.who {
            RuleSubject::Group(gid) => Some(gid),
            RuleSubject::User(_) => None,
        });
        Charge { gid, class: rule.and_then(|rule| rule.class.clone()) }
    }

    /// The account of `left`: that of the same request under today's policy, if a rule still allows it.
    pub(super) fn tenant_of(&self, left: &OrphanedSlice, supply: &Supply) -> Option<Tenant> {
        let peer = Peer { uid: left.uid, gids: left.charge.gid.into_iter().collect() };
        self.tenant(&peer, left.charge.class.as_deref(), supply)
    }

    /// Whether any rule names `peer`: the broker may ignore a peer that no rule names.
    #[must_use]
    pub(crate) fn names(&self, peer: &Peer) -> bool {
        self.rules.iter().any(|rule| rule.who.names(peer))
    }

    /// The trust domain in every rule for `subject`; `None` when their domains differ, or there is no such rule.
    #[must_use]
    pub(crate) fn domain_of(&self, who: RuleSubject) -> Option<&str> {
        let mut domains =
            self.rules.iter().filter(|rule| rule.who == who).map(|rule| rule.trust_domain.as_deref());
        let first = domains.next()?;
        first.filter(|_| domains.all(|domain| domain == first))
    }

    /// Bytes of `supply` that are reserved for rules other than `rule` while nothing is held.
    #[must_use]
    pub(crate) fn reserved_from(&self, rule: RuleId, region: &str) -> u64 {
        let others = self.reservations(region).filter(|(id, _)| *id != rule);
        others.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Rules that keep bytes of `region`, and how many.
    pub(super) fn reservations(&self, region: &str) -> impl Iterator<Item = (RuleId, u64)> {
        let kept = move |rule: &Rule| rule.reservation > 0 && rule.regions.iter().any(|r| r == region);
        self.rules.iter().enumerate().filter(move |(_, r)| kept(r)).map(|(at, r)| (RuleId(at), r.reservation))
    }
}
