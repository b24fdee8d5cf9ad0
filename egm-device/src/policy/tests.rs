//! Guarantees of the rules and the queue, as sentences and as properties over random arrivals.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use egm_report::Chain;
use proptest::prelude::*;

use super::*;

const G: u64 = 1 << 30;

fn names() -> Names {
    Names::new("alice:x:1000:1000::/:/bin/sh\nbob:x:1001:1001::/:/bin/sh\n", "gpu:x:500:alice\n")
}

fn peer(uid: u32, gids: &[u32]) -> Peer {
    Peer { uid, gids: gids.to_vec() }
}

fn supply(region: &str, kind: &str, usable: u64, free: u64) -> Supply {
    let (region, kind) = (region.into(), kind.into());
    Supply { region, kind, page_size: 1, usable, free, largest: free, shares_file: false }
}

fn rule(name: &str, uid: u32) -> Rule {
    Rule {
        name: name.into(),
        who: RuleSubject::User(uid),
        class: None,
        regions: vec!["egm4".into()],
        quota: None,
        quota_each: None,
        reservation: 0,
        priority: 0,
        weight: NonZeroU32::MIN,
        whole_device: false,
        trust_domain: None,
    }
}

fn decide(policy: &Policy, peer: &Peer, size: u64, class: Option<&str>, all: &[Supply]) -> Decision {
    policy.decide(peer, RegionRequest { size, class }, &all[0], &Accounts::default(), all)
}

#[test]
fn without_a_policy_only_root_takes() {
    let all = [supply("egm4", "egm", 8 * G, 8 * G)];
    let policy = Policy::root_only();
    assert!(matches!(decide(&policy, &peer(0, &[]), G, None, &all), Decision::Allowed(_)));
    let Decision::Refused(refusal) = decide(&policy, &peer(1000, &[0]), G, None, &all) else { panic!() };
    assert_eq!(
        refusal.to_string(),
        "the policy: no rule lets user 1000 take from \"egm4\": an operator can add one; nothing else is available"
    );
}

#[test]
fn a_descriptor_of_a_whole_region_needs_a_rule_that_permits_it_and_root_needs_none() {
    let text = r#"{"rules": [
        {"name": "alice", "user": "alice", "regions": ["egm4"]},
        {"name": "bob", "user": "bob", "whole_device": true},
        {"name": "admin", "user": 0, "regions": ["egm4"]}
    ]}"#;
    let policy = parse(text, &names()).unwrap();
    let all = [Supply { shares_file: true, ..supply("egm4", "egm", 8 * G, 8 * G) }];
    let Decision::Refused(refusal) = decide(&policy, &peer(1000, &[]), G, None, &all) else { panic!() };
    assert_eq!(refusal.why, RefusalReason::WholeDevice { uid: 1000, region: "egm4".into() });
    assert_eq!((refusal.rule.as_deref(), refusal.free.total), (Some("alice"), 0));
    for uid in [0, 1001] {
        assert!(matches!(decide(&policy, &peer(uid, &[]), G, None, &all), Decision::Allowed(_)), "{uid}");
    }
    let own_files = [supply("egm4", "egm", 8 * G, 8 * G)];
    assert!(matches!(decide(&policy, &peer(1000, &[]), G, None, &own_files), Decision::Allowed(_)));
}

#[test]
fn a_class_is_for_the_users_that_its_rule_names() {
    let text = r#"{"rules": [{"name": "train", "group": "gpu", "class": "train", "regions": ["egm"]}]}"#;
    let policy = parse(text, &names()).unwrap();
    let all = [supply("egm4", "egm", 8 * G, 8 * G)];
    assert!(matches!(decide(&policy, &peer(1000, &[500]), G, Some("train"), &all), Decision::Allowed(_)));
    for (uid, gids, class) in
        [(1000, &[500][..], None), (1001, &[100], Some("train")), (0, &[], Some("train"))]
    {
        assert!(matches!(decide(&policy, &peer(uid, gids), G, class, &all), Decision::Refused(_)), "{uid}");
    }
}

#[test]
fn a_slice_left_by_a_client_of_an_earlier_broker_is_on_the_account_of_its_rule_today() {
    let text = r#"{"rules": [
        {"name": "alice", "user": "alice", "regions": ["memfd"], "quota": "1GiB"},
        {"name": "train", "group": "gpu", "class": "train", "regions": ["memfd"], "quota": "4GiB"}
    ]}"#;
    let all = [supply("local", "memfd", 8 * G, 8 * G), supply("egm4", "egm", 8 * G, 8 * G)];
    let policy = parse(text, &names()).unwrap();
    // As the session has it, for the record.
    let left = |uid, gids: &[u32], class, bytes| {
        let tenant = policy.tenant(&peer(uid, gids), class, &all[0]).unwrap();
        OrphanedSlice { region: "local".into(), uid, charge: policy.charge(tenant), bytes }
    };
    let all_left = [
        left(1000, &[100, 500], None, G / 2),
        left(1000, &[100, 500], Some("train"), G),
        left(1001, &[500], Some("train"), 2 * G),
    ];
    let held = |policy: &Policy, left: &[OrphanedSlice]| {
        let mut queue = Queue::new(policy.clone(), OvertakeLimits::default());
        queue.set_orphaned(&[OrphanedSlice { bytes: 7 * G, ..all_left[0].clone() }], &all);
        queue.set_orphaned(left, &all);
        let of = |name| policy.rules().iter().position(|rule| rule.name == name).map(RuleId);
        ["alice", "train"].map(|name| of(name).map(|rule| queue.accounts().held_by_rule(rule)))
    };
    assert_eq!(held(&policy, &all_left), [Some(G / 2), Some(3 * G)]);
    assert_eq!(held(&policy, &[]), [Some(0), Some(0)], "the last call counts");
    let elsewhere = OrphanedSlice { region: "gone".into(), ..all_left[0].clone() };
    assert_eq!(held(&policy, &[elsewhere]), [Some(0), Some(0)]);
    // Rules that an operator renamed or put in another order are those of the same requests, and removed ones of none.
    let renamed = text.replace("\"train\", \"group\"", "\"other\", \"group\"");
    assert_eq!(held(&parse(&renamed, &names()).unwrap(), &all_left), [Some(G / 2), None]);
    let mut rules = policy.rules().to_vec();
    rules.reverse();
    assert_eq!(held(&Policy::new(rules.clone()), &all_left), [Some(G / 2), Some(3 * G)]);
    rules.retain(|rule| rule.name != "train");
    assert_eq!(held(&Policy::new(rules), &all_left), [Some(G / 2), None]);
}

#[test]
fn what_is_left_counts_against_a_quota_beside_what_is_held() {
    let mut limited = rule("limited", 1000);
    (limited.quota, limited.reservation) = (Some(4 * G), 4 * G);
    let all = [supply("egm4", "egm", 8 * G, 8 * G)];
    let mut queue = Queue::new(Policy::new(vec![limited]), OvertakeLimits::default());
    let charge = Charge::default();
    queue.set_orphaned(&[OrphanedSlice { region: "egm4".into(), uid: 1000, charge, bytes: G }], &all);
    let tenant = queue.policy().tenant(&peer(1000, &[]), None, &all[0]).unwrap();
    let unused = |queue: &Queue| queue.accounts().unused_reservation(queue.policy(), tenant.rule, "egm4");
    assert_eq!(unused(&queue), 3 * G);
    for size in [2 * G, G + 1, G] {
        queue.arrive(Duration::ZERO, size, vec![Candidate { region: "egm4".into(), tenant }]);
    }
    let served = std::iter::from_fn(|| Some(queue.next(Duration::ZERO, &all)?.size)).collect::<Vec<_>>();
    assert_eq!((served, unused(&queue)), (vec![2 * G, G], 0));
    queue.set_orphaned(&[], &all);
    assert_eq!(queue.accounts().held(tenant), 3 * G);
}

#[test]
fn the_first_rule_that_fits_decides() {
    let mut rules = vec![rule("small", 1000), rule("large", 1000)];
    rules[0].quota = Some(G);
    let all = [supply("egm4", "egm", 8 * G, 8 * G), supply("egm5", "egm", 8 * G, 8 * G)];
    let Decision::Refused(refusal) = decide(&Policy::new(rules), &peer(1000, &[]), 2 * G, None, &all) else {
        panic!()
    };
    assert_eq!(refusal.rule.as_deref(), Some("small"));
    assert_eq!(refusal.why, RefusalReason::AboveQuota { size: 2 * G, quota: G });
}

#[test]
fn an_unprivileged_user_gets_totals_and_root_gets_regions() {
    let mut any = rule("any", 1000);
    any.regions = vec!["egm".into()];
    let policy = Policy::new(vec![any]);
    let all =
        [supply("egm4", "egm", 8 * G, G), supply("egm5", "egm", 8 * G, 3 * G), supply("m", "memfd", G, G)];
    let Decision::Wait(_, refusal) = decide(&policy, &peer(1000, &[]), 2 * G, None, &all) else { panic!() };
    assert_eq!(refusal.free.to_string(), "available: 4GiB, largest contiguous block: 3GiB");
    let Decision::Wait(_, refusal) = decide(&policy, &peer(0, &[]), 2 * G, None, &all) else { panic!() };
    assert_eq!(
        refusal.free.to_string(),
        "available: 5GiB, largest contiguous block: 3GiB (egm4 1GiB, egm5 3GiB, m 1GiB)"
    );
}

#[test]
fn what_can_never_be_is_refused_and_not_queued() {
    let mut other = rule("other", 1001);
    other.reservation = 3 * G;
    let policy = Policy::new(vec![rule("mine", 1000), other]);
    let all = [supply("egm4", "egm", 8 * G, 8 * G)];
    let why = |size| match decide(&policy, &peer(1000, &[]), size, None, &all) {
        Decision::Refused(refusal) => refusal.why,
        other => panic!("{other:?}"),
    };
    assert_eq!(why(6 * G), RefusalReason::NeverFits { size: 6 * G, region: "egm4".into(), most: 5 * G });
    assert!(matches!(why(0), RefusalReason::Page { .. }));
    assert!(matches!(decide(&policy, &peer(1001, &[]), 8 * G, None, &all), Decision::Allowed(_)));
}

#[test]
fn a_mistyped_key_is_refused_with_the_right_one() {
    let refused = |text: &str| Chain(&parse(text, &names()).unwrap_err()).to_string();
    let quotta = refused("{\"rules\": [\n  {\"name\": \"a\", \"user\": 1, \"quotta\": \"1GiB\"}\n]}");
    let wanted = "error: line 2, column 28: policy is not JSON of its schema\n  \
                  2 |   {\"name\": \"a\", \"user\": 1, \"quotta\": \"1GiB\"}\n    \
                  |                            ^^^^^^^^\n  \
                  caused by: unknown key \"quotta\"\n  \
                  help: did you mean \"quota\"? keys here are: name, user, group, class, regions, quota, ";
    assert!(quotta.starts_with(wanted), "{quotta}");
    let rulez = refused(r#"{"rulez": []}"#);
    assert!(rulez.ends_with("did you mean \"rules\"? keys here are: $schema, description, rules"), "{rulez}");
    assert!(refused(r#"{"rules": [{"name": "a", "user": "carol"}]}"#).contains("write its number"));
    assert!(refused(r#"{"rules": [{"name": "a", "user": 1, "group": 2}]}"#).contains("either"));
    assert!(refused(r#"{"rules": [{"name": "root", "user": 1}]}"#).contains("root"));
    let kinds = r#"{"rules": [{"name": "a", "user": 1, "regions": ["egm"], "reservation": 1}]}"#;
    assert!(refused(kinds).contains("name exactly one"));
}

#[test]
fn a_policy_that_another_user_could_have_written_does_not_hold() {
    use std::os::unix::fs::PermissionsExt;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), r#"{"rules": []}"#).unwrap();
    for (mode, good) in [(0o644, true), (0o600, true), (0o664, false), (0o646, false)] {
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        // Only root can own it as it should be; for others every mode is refused.
        assert_eq!(load(file.path(), &names()).is_ok(), good && rustix::process::getuid().is_root());
    }
    let gone = load(&file.path().with_extension("gone"), &names()).unwrap_err();
    assert!(matches!(gone, PolicyError::Read { .. }), "{gone}");
}

/// A name that the host lacks would stop the broker, and a descriptor of a whole region would reach every tenant's bytes.
#[test]
fn the_sample_names_what_the_installation_makes_and_regions_with_a_file_for_each_slice() {
    let text = include_str!("../../../configs/policy/sample.json");
    let names = Names::new("egm-serve:x:990:990::/:/bin/sh", "egm:x:991:egm-serve");
    let policy = parse(text, &names).unwrap();
    let of_users: Vec<_> = policy.rules().iter().filter(|rule| rule.who != RuleSubject::User(0)).collect();
    assert_eq!(of_users.len(), 4);
    for rule in of_users {
        let regions: Vec<_> = rule.regions.iter().map(String::as_str).collect();
        assert!(matches!(*regions, ["hugetlb" | "memfd"]) && !rule.whole_device, "{rule:?}");
    }
}

/// A region and tenants that take and return in it, step by step.
struct World {
    queue: Queue,
    usable: u64,
    now: Duration,
    arrived: BTreeMap<Ticket, u32>,
    held: Vec<(PickedRequest, Duration)>,
    log: Vec<PickedRequest>,
}

impl World {
    fn new(rules: Vec<Rule>, usable: u64, limits: OvertakeLimits) -> Self {
        let queue = Queue::new(Policy::new(rules), limits);
        let (now, arrived, held, log) = (Duration::ZERO, BTreeMap::new(), Vec::new(), Vec::new());
        Self { queue, usable, now, arrived, held, log }
    }

    fn free(&self) -> u64 {
        self.usable - self.held.iter().map(|(pick, _)| pick.size).sum::<u64>()
    }

    fn supply(&self) -> Supply {
        supply("egm4", "egm", self.usable, self.free())
    }

    /// A request; `None` when the policy refuses it for ever.
    fn ask(&mut self, uid: u32, size: u64) -> Option<Ticket> {
        let supply = self.supply();
        let ask = RegionRequest { size, class: None };
        let policy = self.queue.policy();
        let (Decision::Allowed(tenant) | Decision::Wait(tenant, _)) =
            policy.decide(&peer(uid, &[]), ask, &supply, self.queue.accounts(), &[])
        else {
            return None;
        };
        let ticket = self.queue.arrive(self.now, size, vec![Candidate { region: "egm4".into(), tenant }]);
        self.arrived.insert(ticket, uid);
        Some(ticket)
    }

    fn ask_times(&mut self, times: usize, uid: u32, size: u64) {
        for _ in 0..times {
            self.ask(uid, size).unwrap();
        }
    }

    /// Grants all there is room for; each is held until `end(ticket)`.
    fn serve(&mut self, mut end: impl FnMut(Ticket) -> Duration) {
        while let Some(pick) = self.queue.next(self.now, &[self.supply()]) {
            assert!(pick.size <= self.free(), "more than there is");
            let end = self.now + end(pick.ticket);
            self.log.push(pick.clone());
            self.held.push((pick, end));
            self.check();
        }
    }

    /// The next slice that is due comes back.
    fn one_returns(&mut self) -> Option<u32> {
        let at = (0..self.held.len()).min_by_key(|at| self.held[*at].1)?;
        let (pick, end) = self.held.remove(at);
        self.now = self.now.max(end);
        self.queue.credit(self.now, pick.tenant, &pick.region, pick.size);
        Some(pick.tenant.uid)
    }

    /// Quotas are never exceeded, and the reservations of others stay free.
    fn check(&self) {
        let (policy, accounts) = (self.queue.policy(), self.queue.accounts());
        let mut unused = 0;
        for (at, rule) in policy.rules().iter().enumerate() {
            let held = accounts.held_by_rule(RuleId(at));
            assert!(held <= rule.quota.unwrap_or(u64::MAX), "quota of {}", rule.name);
            unused += rule.reservation.saturating_sub(held);
        }
        assert!(self.free() >= unused, "{} free, {unused} reserved", self.free());
    }
}

#[derive(Debug, Clone)]
enum Step {
    Request { uid: u32, size: u64, hold: u64 },
    Leave(usize),
    Return,
}

fn steps(users: u32, most: u64) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..=users, 1..=most, 1..100u64).prop_map(|(uid, size, hold)| Step::Request { uid, size, hold }),
        1 => (0..64usize).prop_map(Step::Leave),
        3 => Just(Step::Return),
    ];
    prop::collection::vec(step, 1..200)
}

/// Runs `script`, then lets everything return until the queue is empty.
fn run(rules: &[Rule], usable: u64, limits: OvertakeLimits, script: &[Step]) -> World {
    let mut world = World::new(rules.to_vec(), usable, limits);
    let mut holds = BTreeMap::new();
    for step in script {
        match step {
            Step::Request { uid, size, hold } => {
                if let Some(ticket) = world.ask(*uid, *size) {
                    holds.insert(ticket, Duration::from_millis(*hold));
                }
            }
            Step::Leave(at) => {
                if let Some(ticket) = world.queue.waiting().get(*at).map(Waiter::ticket) {
                    assert!(world.queue.leave(ticket) && !world.queue.leave(ticket));
                    world.arrived.remove(&ticket);
                }
            }
            Step::Return => {
                world.one_returns();
            }
        }
        world.serve(|ticket| holds[&ticket]);
    }
    while world.one_returns().is_some() {
        world.serve(|ticket| holds[&ticket]);
    }
    world
}

fn rules_with(limits: &[(u64, u64, i32, u32)]) -> Vec<Rule> {
    let one = |(uid, (quota, reservation, priority, weight)): (u32, &(u64, u64, i32, u32))| Rule {
        quota: Some((*quota).max(*reservation)),
        reservation: *reservation,
        priority: *priority,
        weight: NonZeroU32::new(*weight).unwrap(),
        ..rule(&format!("u{uid}"), uid)
    };
    (1..).zip(limits).map(one).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, ..ProptestConfig::default() })]
    /// For any arrivals: no quota is exceeded and no reservation used up (checked after each grant), each request that
    /// stays is served, once, when all others have returned, and a replay is the same.
    #[test]
    fn limits_hold_all_are_served_and_a_replay_is_the_same(
        limits in prop::collection::vec((1..100u64, 0..20u64, -1..2i32, 1..4u32), 1..5),
        script in steps(4, 40),
        passes in 0..4u32,
    ) {
        let rules = rules_with(&limits);
        let limits = OvertakeLimits { passes, grants: 8 };
        let world = run(&rules, 100, limits, &script);
        prop_assert!(world.queue.waiting().is_empty(), "left waiting: {:?}", world.queue.waiting());
        let mut served: Vec<_> = world.log.iter().map(|pick| pick.ticket).collect();
        served.sort_unstable();
        prop_assert_eq!(served, world.arrived.keys().copied().collect::<Vec<_>>());
        prop_assert_eq!(run(&rules, 100, limits, &script).log, world.log);
    }

    /// A tenant with any number of small requests, of a higher priority and a heavier weight, cannot starve another:
    /// a request is granted within `grants` grants of becoming its tenant's first, and those before it in line.
    #[test]
    fn a_greedy_tenant_starves_no_other(
        sizes in prop::collection::vec(1..30u64, 40..80),
        holds in prop::collection::vec(1..20u64, 300),
        size in 1..=100u64,
        greedy_priority in 0..3i32,
        weight in 1..100u32,
        held in 0..100u64,
    ) {
        let rules = rules_with(&[(100, 0, greedy_priority, weight), (200, 0, 0, 1)]);
        let limits = OvertakeLimits { passes: 4, grants: 16 };
        let mut world = World::new(rules, 100, limits);
        let hold = |ticket: Ticket| Duration::from_millis(holds[world_index(ticket) % holds.len()]);
        // The victim holds much already, so that its share alone would never bring it forward.
        if held > 0 {
            world.ask(2, held).unwrap();
            world.serve(|_| Duration::from_secs(3600));
        }
        world.ask(1, 5).unwrap();
        world.serve(hold);
        let victim = (size <= 100 - held).then(|| world.ask(2, size).unwrap());
        let before = world.log.len();
        let most = 16 + world.queue.waiting().iter().filter(|w| Some(w.ticket()) != victim).count();
        for size in &sizes {
            world.ask(1, *size).unwrap();
        }
        let mut went = 0;
        while let Some(victim) = victim {
            world.serve(hold);
            went = world.log[before..].iter().take_while(|pick| pick.ticket != victim).count();
            if went < world.log.len() - before {
                break;
            }
            prop_assert!(world.one_returns().is_some());
        }
        prop_assert!(went <= most, "{} went before", went);
    }

    /// Equal tenants that always have requests waiting share equally: their use, in bytes times time, never differs by
    /// more than one slice held for the longest time. It starts unfairly: one tenant's requests all came first.
    #[test]
    fn equal_tenants_share_equally(
        tenants in 2..6u32,
        slots in 1..9u64,
        holds in prop::collection::vec(1..50u64, 64),
    ) {
        let rules = rules_with(&vec![(1 << 40, 0, 0, 1); usize::try_from(tenants).unwrap()]);
        let mut world = World::new(rules, slots * 10, OvertakeLimits::default());
        let hold = |ticket: Ticket| Duration::from_millis(holds[world_index(ticket) % holds.len()]);
        for uid in 1..=tenants {
            for _ in 0..20 {
                world.ask(uid, 10).unwrap();
            }
        }
        for _ in 0..100 {
            world.serve(hold);
            let had: Vec<u128> = (0..usize::try_from(tenants).unwrap())
                .map(|at| Tenant { rule: RuleId(at), uid: u32::try_from(at).unwrap() + 1 })
                .map(|tenant| world.queue.accounts().served(tenant))
                .collect();
            let apart = had.iter().max().unwrap() - had.iter().min().unwrap();
            prop_assert!(apart <= 10 * 50, "{had:?}");
            let again = world.one_returns().unwrap();
            world.ask(again, 10).unwrap();
        }
    }

    /// A request that fits the unused part of its rule's reservation is granted at once, whatever else waits.
    #[test]
    fn a_reservation_is_there_at_once(script in steps(2, 60), reservation in 1..40u64) {
        let rules = rules_with(&[(100, 0, 5, 1), (100, 0, 0, 9), (100, reservation, -5, 1)]);
        let mut world = World::new(rules, 100, OvertakeLimits { passes: 1, grants: 2 });
        for step in &script {
            if let Step::Request { uid, size, .. } = step {
                world.ask(*uid, *size);
            } else {
                world.one_returns();
            }
            world.serve(|_| Duration::from_millis(10));
        }
        let mine = world.ask(3, reservation).unwrap();
        world.serve(|_| Duration::from_millis(10));
        prop_assert!(world.log.iter().any(|pick| pick.ticket == mine));
    }
}

fn world_index(ticket: Ticket) -> usize {
    format!("{ticket:?}").chars().filter(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

#[test]
fn weights_share_in_proportion() {
    let mut world =
        World::new(rules_with(&[(1 << 40, 0, 0, 1), (1 << 40, 0, 0, 3)]), 40, OvertakeLimits::default());
    for uid in [1, 2] {
        world.ask_times(100, uid, 10);
    }
    world.serve(|_| Duration::from_millis(10));
    let by = |world: &World, uid| world.log.iter().filter(|pick| pick.tenant.uid == uid).count();
    assert_eq!((by(&world, 1), by(&world, 2)), (1, 3));
    for _ in 0..40 {
        world.one_returns();
        world.serve(|_| Duration::from_millis(10));
    }
    assert_eq!((by(&world, 1), by(&world, 2)), (11, 33));
}

#[test]
fn a_large_request_is_passed_over_a_bounded_number_of_times() {
    let mut world = World::new(
        rules_with(&[(1 << 40, 0, 0, 1), (1 << 40, 0, 0, 1)]),
        100,
        OvertakeLimits { passes: 3, grants: 1000 },
    );
    let mut next: VecDeque<u64> = (1..).take(50).collect();
    world.ask(1, 60).unwrap();
    world.serve(|_| Duration::from_millis(1));
    let large = world.ask(2, 100).unwrap();
    for _ in 0..20 {
        world.ask(1, 10).unwrap();
    }
    while !world.log.iter().any(|pick| pick.ticket == large) {
        world.serve(|_| Duration::from_millis(next.pop_front().unwrap()));
        if !world.log.iter().any(|pick| pick.ticket == large) {
            assert!(world.one_returns().is_some());
        }
    }
    assert_eq!(
        world.log.iter().position(|pick| pick.ticket == large),
        Some(4),
        "after the first and three passes"
    );
}

#[test]
fn time_in_which_a_tenant_requested_nothing_is_no_credit() {
    let mut world =
        World::new(rules_with(&[(1 << 40, 0, 0, 1), (1 << 40, 0, 0, 1)]), 10, OvertakeLimits::default());
    world.ask_times(100, 1, 10);
    for _ in 0..50 {
        world.serve(|_| Duration::from_millis(10));
        world.one_returns();
    }
    world.ask_times(50, 2, 10);
    let start = world.log.len();
    for _ in 0..20 {
        world.serve(|_| Duration::from_millis(10));
        world.one_returns();
    }
    let newcomers = world.log[start..].iter().filter(|pick| pick.tenant.uid == 2).count();
    assert_eq!(newcomers, 10);
}

#[test]
fn a_tenant_at_its_quota_delays_no_other() {
    let mut world = World::new(
        rules_with(&[(10, 0, 9, 1), (100, 0, 0, 1)]),
        100,
        OvertakeLimits { passes: 0, grants: 0 },
    );
    world.ask_times(2, 1, 10);
    world.ask(2, 90).unwrap();
    world.serve(|_| Duration::from_millis(1));
    assert_eq!(world.log.iter().map(|pick| pick.tenant.uid).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn a_request_takes_the_region_that_it_prefers() {
    let mut queue = Queue::new(Policy::root_only(), OvertakeLimits::default());
    let supplies = [supply("a", "egm", 10, 0), supply("b", "egm", 10, 10), supply("c", "egm", 10, 10)];
    let tenant = queue.policy().tenant(&peer(0, &[]), None, &supplies[0]).unwrap();
    let candidates = ["a", "c", "b"].map(|region| Candidate { region: region.to_owned(), tenant });
    queue.arrive(Duration::ZERO, 5, candidates.to_vec());
    assert_eq!(queue.next(Duration::ZERO, &supplies).unwrap().region, "c");
}

#[test]
fn a_missing_file_is_another_error_than_one_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    assert!(load(&folder.path().join("policy.json"), &names()).unwrap_err().is_missing());
    assert!(!load(folder.path(), &names()).unwrap_err().is_missing());
}

#[test]
fn the_published_schema_and_the_words_for_a_list_are_those_of_the_code() {
    assert_eq!(schema(), include_str!("../../../configs/schemas/policy.schema.json"));
    let error = parse(r#"{"rules": [{"name": "a", "user": 1, "regions": 3}]}"#, &names()).unwrap_err();
    assert!(Chain(&error).to_string().contains("an array of names"), "{}", Chain(&error));
}
