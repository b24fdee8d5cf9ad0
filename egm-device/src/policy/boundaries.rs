//! Limits of the rules, the file and the queue, each with the value on either side.

use std::fmt::Write;
use std::num::NonZeroU32;
use std::time::Duration;

use egm_report::Chain;

use super::*;

fn second(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn rule(name: &str, uid: u32) -> Rule {
    Rule {
        name: name.to_owned(),
        who: RuleSubject::User(uid),
        class: None,
        regions: Vec::new(),
        quota: None,
        quota_each: None,
        reservation: 0,
        priority: 0,
        weight: NonZeroU32::MIN,
        whole_device: false,
        trust_domain: None,
    }
}

fn supply(region: &str, free: u64) -> Supply {
    let (region, kind) = (region.to_owned(), "egm".to_owned());
    Supply { region, kind, page_size: 4, usable: 100, free, largest: free, shares_file: false }
}

fn peer(uid: u32) -> Peer {
    Peer { uid, gids: vec![uid + 1000] }
}

/// The account of rule 0 for user 1, of rule 1 for user 2, and so on.
fn tenant(rule: usize) -> Tenant {
    Tenant { rule: RuleId(rule), uid: u32::try_from(rule).unwrap() + 1 }
}

/// The answer to user 1 about `size` bytes of `supply`, when user 1 holds `held` bytes.
fn decide(policy: &Policy, size: u64, supply: &Supply, held: u64) -> Result<Tenant, RefusalReason> {
    let mut accounts = Accounts::default();
    accounts.take(tenant(0), &supply.region, held);
    let ask = RegionRequest { size, class: None };
    match policy.decide(&peer(1), ask, supply, &accounts, std::slice::from_ref(supply)) {
        Decision::Allowed(tenant) => Ok(tenant),
        Decision::Wait(_, refusal) | Decision::Refused(refusal) => Err(refusal.why),
    }
}

#[test]
fn a_reservation_is_used_by_its_rule_in_its_region_only() {
    let reserving =
        |name, uid, reservation| Rule { regions: vec!["a".into()], reservation, ..rule(name, uid) };
    let policy = Policy::new(vec![reserving("first", 1, 10), reserving("second", 2, 20), rule("third", 3)]);
    let mut accounts = Accounts::default();
    accounts.take(tenant(0), "b", 5);
    accounts.take(tenant(2), "a", 7);
    let unused = |accounts: &Accounts, id, region| accounts.unused_reservation(&policy, RuleId(id), region);
    assert_eq!([0, 1, 2].map(|id| unused(&accounts, id, "a")), [10, 20, 0]);
    assert_eq!([0, 1, 2].map(|id| unused(&accounts, id, "b")), [0; 3]);
    accounts.take(tenant(0), "a", 4);
    assert_eq!([unused(&accounts, 0, "a"), unused(&accounts, 1, "a")], [6, 20]);
    let free = |id| accounts.free_for(&policy, RuleId(id), &supply("a", 30));
    assert_eq!([0, 1, 2].map(free), [10, 24, 4], "less what the others have not used yet");
    assert_eq!([0, 1, 2, 3].map(|id| policy.reserved_from(RuleId(id), "a")), [20, 10, 30, 30]);
    assert_eq!(
        (accounts.held(tenant(0)), accounts.held_by_rule(RuleId(0)), accounts.held_in("a")),
        (9, 9, 11)
    );
    accounts.credit(tenant(0), "a", 4);
    assert_eq!((accounts.held(tenant(0)), unused(&accounts, 0, "a")), (5, 10));
}

#[test]
fn what_a_tenant_was_served_is_bytes_by_time_by_weight() {
    let weight = NonZeroU32::new(2).unwrap();
    let policy = Policy::new(vec![Rule { weight, ..rule("first", 1) }]);
    let mut accounts = Accounts::default();
    accounts.take(tenant(0), "a", 8);
    accounts.advance(&policy, second(1));
    accounts.advance(&policy, second(1));
    assert_eq!(accounts.served(tenant(0)), 8 * 1000 / 2, "the same second counts once");
    accounts.advance(&policy, second(0));
    accounts.advance(&policy, second(3));
    assert_eq!(accounts.served(tenant(0)), 8 * 3000 / 2, "the clock never goes back");
    assert_eq!(accounts.share(&policy, tenant(0)), (4 << 16, 12_000 << 16));
    accounts.credit(tenant(0), "a", 8);
    accounts.advance(&policy, second(9));
    assert_eq!(accounts.served(tenant(0)), 12_000);
    assert_eq!(accounts.served(tenant(1)), 0);
}

#[test]
fn a_tenant_enters_level_with_the_active_one_that_had_least() {
    let policy = Policy::new((1..6).map(|uid| rule(&format!("r{uid}"), uid)).collect());
    let mut accounts = Accounts::default();
    for (id, bytes) in [(0, 30), (1, 10), (2, 5), (3, 10)] {
        accounts.take(tenant(id), "a", bytes);
    }
    accounts.advance(&policy, second(1));
    for (id, bytes) in [(0, 30), (2, 5), (3, 10)] {
        accounts.credit(tenant(id), "a", bytes);
    }
    let served = |accounts: &Accounts| [0, 1, 2, 3, 4].map(|id| accounts.served(tenant(id)));
    assert_eq!(served(&accounts), [30_000, 10_000, 5000, 10_000, 0]);
    let before = accounts.clone();
    accounts.enter(tenant(1), std::iter::empty());
    assert_eq!(served(&accounts), served(&before), "it holds memory, so it is active");
    // 1 holds memory and 0 waits. 2 and 3 had no more than 1, so their accounts are dropped.
    accounts.enter(tenant(4), [tenant(0)].into_iter());
    assert_eq!(served(&accounts), [30_000, 10_000, 0, 0, 10_000]);
    // One that had more than the least keeps that.
    let mut accounts = before.clone();
    accounts.enter(tenant(0), std::iter::empty());
    assert_eq!(served(&accounts), [30_000, 10_000, 0, 0, 0]);
    let mut accounts = before.clone();
    accounts.enter(tenant(4), std::iter::empty());
    assert_eq!(served(&accounts), [30_000, 10_000, 0, 0, 10_000]);
    // Without another tenant there is nothing to be level with.
    let mut alone = before;
    alone.credit(tenant(1), "a", 10);
    alone.enter(tenant(0), std::iter::empty());
    assert_eq!(served(&alone), [0; 5]);
}

#[test]
fn a_rule_is_for_a_user_or_a_group_and_for_regions_by_name_or_kind() {
    let of = |who, regions: &[&str]| {
        let regions = regions.iter().map(|&region| region.to_owned()).collect();
        Policy::new(vec![Rule { who, regions, ..rule("rule", 0) }])
    };
    let named = |policy: &Policy, uid| policy.tenant(&peer(uid), None, &supply("a", 8)).is_some();
    for (who, uid) in [(RuleSubject::User(1), 1), (RuleSubject::Group(1001), 1)] {
        assert_eq!([1, 2, 1001].map(|uid| named(&of(who, &[]), uid)), [true, false, false]);
        assert!(of(who, &[]).names(&peer(uid)) && !of(who, &[]).names(&peer(2)));
        for (regions, covered) in [(&["a"][..], true), (&["b", "a"], true), (&["egm"], true), (&["b"], false)]
        {
            assert_eq!(named(&of(who, regions), uid), covered, "{regions:?}");
        }
    }
    assert!(Policy::root_only().names(&peer(0)) && !Policy::root_only().names(&peer(1)));
}

#[test]
fn a_domain_is_that_of_all_rules_for_a_user() {
    let of = |domains: &[(u32, Option<&str>)]| {
        let rules = domains.iter().enumerate().map(|(index, (uid, domain))| Rule {
            trust_domain: domain.map(str::to_owned),
            ..rule(&format!("r{index}"), *uid)
        });
        let policy = Policy::new(rules.collect());
        policy.domain_of(RuleSubject::User(1)).map(str::to_owned)
    };
    let (red, blue) = (Some("red"), Some("blue"));
    assert_eq!(of(&[(1, red), (2, blue), (1, red)]).as_deref(), red);
    assert_eq!(of(&[(1, red), (1, blue)]), None);
    assert_eq!(of(&[(1, red), (1, None)]), None);
    assert_eq!(of(&[(1, None), (1, red)]), None);
    assert_eq!(of(&[(2, red)]), None);
}

#[test]
fn a_size_is_whole_pages_up_to_the_smaller_quota_and_the_region() {
    let quotas = |quota, quota_each| Policy::new(vec![Rule { quota, quota_each, ..rule("rule", 1) }]);
    let none = quotas(None, None);
    let all = supply("a", 100);
    assert!([4, 8, 100].iter().all(|size| decide(&none, *size, &all, 0) == Ok(tenant(0))));
    for size in [0, 1, 3, 6] {
        assert!(matches!(decide(&none, size, &all, 0), Err(RefusalReason::Page { .. })), "{size}");
    }
    assert!(matches!(decide(&none, 104, &all, 0), Err(RefusalReason::NeverFits { most: 100, .. })));
    for (quota, each) in [(Some(40), None), (None, Some(40)), (Some(40), Some(60)), (Some(60), Some(40))] {
        let policy = quotas(quota, each);
        assert!(decide(&policy, 40, &all, 0).is_ok());
        assert_eq!(decide(&policy, 44, &all, 0), Err(RefusalReason::AboveQuota { size: 44, quota: 40 }));
        assert!(decide(&policy, 20, &all, 20).is_ok());
        assert_eq!(
            decide(&policy, 24, &all, 20),
            Err(RefusalReason::QuotaUsed { held: 20, size: 24, quota: 40 })
        );
    }
}

#[test]
fn a_slice_fits_in_the_largest_free_block() {
    let policy = Policy::new(vec![rule("rule", 1)]);
    let part = Supply { largest: 40, ..supply("a", 60) };
    assert!(decide(&policy, 40, &part, 0).is_ok());
    let why = RefusalReason::NoRoom { size: 44, region: "a".to_owned(), free: 60, largest: 40 };
    assert_eq!(decide(&policy, 44, &part, 0), Err(why));
}

#[test]
fn a_refusal_names_its_rule_and_what_is_free() {
    let text = |rule: Option<&str>, free| {
        let why = RefusalReason::OthersFirst { region: "a".to_owned() };
        Refusal { rule: rule.map(str::to_owned), why, free }.to_string()
    };
    let some = FreeMemory { total: 4096, largest: 1024, regions: Vec::new() };
    let why = "others wait for \"a\" and go first";
    assert_eq!(text(None, FreeMemory::default()), format!("the policy: {why}; nothing else is available"));
    let free = "available: 4KiB, largest contiguous block: 1KiB";
    assert_eq!(text(Some("mine"), some.clone()), format!("rule \"mine\": {why}; {free}"));
    let regions = vec![("a".to_owned(), 1024), ("b".to_owned(), 3072)];
    assert_eq!(FreeMemory { regions, ..some }.to_string(), format!("{free} (a 1KiB, b 3KiB)"));
}

#[test]
fn free_memory_is_that_of_regions_that_the_peer_may_take_from() {
    let mine = Rule { regions: vec!["a".into(), "b".into(), "c".into()], ..rule("mine", 1) };
    let other = Rule { regions: vec!["b".into()], reservation: 30, ..rule("other", 2) };
    let policy = Policy::new(vec![mine, other]);
    let all = [
        Supply { largest: 16, ..supply("a", 20) },
        supply("b", 50),
        Supply { shares_file: true, ..supply("c", 90) },
        supply("d", 90),
    ];
    let free = |uid| policy.free_for(&peer(uid), &Accounts::default(), &all);
    assert_eq!(free(1), FreeMemory { total: 40, largest: 20, regions: Vec::new() });
    assert_eq!(free(3), FreeMemory::default());
    let root = free(0);
    assert_eq!((root.total, root.largest), (220, 90), "root opens every device");
    let names: Vec<_> = root.regions.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
    assert_eq!(names, [("a", 20), ("b", 20), ("c", 90), ("d", 90)]);
}

#[test]
fn free_memory_is_no_more_than_the_quotas_leave() {
    let regions = vec!["a".into(), "b".into()];
    let mine = Rule { regions, quota: Some(30), quota_each: Some(16), ..rule("mine", 1) };
    let policy = Policy::new(vec![mine]);
    let all = [supply("a", 12), supply("b", 50)];
    let free = |accounts: &Accounts| policy.free_for(&peer(1), accounts, &all);
    let mut accounts = Accounts::default();
    assert_eq!(free(&accounts), FreeMemory { total: 16, largest: 16, regions: Vec::new() });
    let tenant = Tenant { uid: 1, rule: RuleId(0) };
    accounts.take(tenant, "a", 6);
    assert_eq!(free(&accounts), FreeMemory { total: 10, largest: 10, regions: Vec::new() });
    accounts.take(Tenant { uid: 2, ..tenant }, "b", 22);
    assert_eq!(free(&accounts), FreeMemory { total: 2, largest: 2, regions: Vec::new() });
}

fn parsed(rule: &str) -> Result<Policy, String> {
    let text = format!(r#"{{"rules": [{{"name": "rule", "user": 1{rule}}}]}}"#);
    parse(&text, &Names::default()).map_err(|error| Chain(&error).to_string())
}

#[test]
fn a_file_has_1_mib_and_1000_rules_at_most() {
    let padded = |length: usize| r#"{"rules": []}"#.to_owned() + &" ".repeat(length - 13);
    assert!(parse(&padded(1 << 20), &Names::default()).is_ok());
    assert!(matches!(parse(&padded((1 << 20) + 1), &Names::default()), Err(PolicyError::TooLarge)));
    let rules = |count: usize| {
        let mut rules = String::new();
        for index in 0..count {
            let comma = if index == 0 { "" } else { "," };
            write!(rules, r#"{comma}{{"name": "r{index}", "user": {index}}}"#).unwrap();
        }
        parse(&format!(r#"{{"rules": [{rules}]}}"#), &Names::default()).map(|policy| policy.rules().len())
    };
    assert!(matches!(rules(1000), Ok(1001)), "root's is the last");
    assert!(matches!(rules(1001), Err(PolicyError::TooManyRules { count: 1001 })));
}

#[test]
fn a_rule_keeps_the_values_of_its_keys() {
    let keys = r#", "class": "train", "regions": ["a"], "quota": "8KiB", "quota_each": "4KiB", "reservation": "8KiB",
        "priority": -3, "weight": 65536, "whole_device": true, "trust_domain": "red""#;
    let policy = parsed(keys).unwrap();
    let wanted = Rule {
        class: Some("train".to_owned()),
        regions: vec!["a".to_owned()],
        quota: Some(8192),
        quota_each: Some(4096),
        reservation: 8192,
        priority: -3,
        weight: NonZeroU32::new(65536).unwrap(),
        whole_device: true,
        trust_domain: Some("red".to_owned()),
        ..rule("rule", 1)
    };
    assert_eq!(policy.rules()[0], wanted);
    assert_eq!(policy.rule(tenant(0)), Some(&wanted));
    assert_eq!(policy.rule(tenant(2)), None);
    assert_eq!(parsed("").unwrap().rules()[0], rule("rule", 1));
}

#[test]
fn a_rule_that_contradicts_itself_is_refused() {
    for (keys, wanted) in [
        (r#", "weight": 65537"#, "weight 65537 is outside 1 to 65536"),
        (r#", "quota": 4096, "regions": ["a"], "reservation": 4097"#, "more than the quota"),
        (r#", "reservation": 1"#, "name exactly one"),
        (r#", "regions": ["a", "b"], "reservation": 1"#, "name exactly one"),
        (r#", "regions": ["hugetlb"], "reservation": 1"#, "name exactly one"),
        (r#", "regions": ["a", "a b"]"#, "\"a b\" is not a name"),
        (r#", "class": "ä""#, "is not a name"),
        (r#", "trust_domain": """#, "is not a name"),
    ] {
        assert!(parsed(keys).is_err_and(|error| error.contains(wanted)), "{keys}");
    }
    assert!(parsed(r#", "regions": ["a", "hugetlb"], "reservation": 0"#).is_ok());
    let named = |names: &[&str]| {
        let rules: Vec<_> = names.iter().map(|name| format!(r#"{{"name": "{name}", "user": 1}}"#)).collect();
        parse(&format!(r#"{{"rules": [{}]}}"#, rules.join(",")), &Names::default()).is_ok()
    };
    let long = "x".repeat(65);
    assert!(named(&["a", "b", &long[..64], "A.b_c-9"]));
    assert!(!named(&["a", "b", "a"]) && !named(&[&long]) && !named(&[""]) && !named(&["a/b"]));
}

#[test]
fn a_rule_for_an_empty_list_of_regions_is_refused_at_its_place() {
    let text = "{\"rules\": [\n  {\"name\": \"a\", \"user\": 1, \"regions\": []}\n]}";
    let Err(PolicyError::Json(error)) = parse(text, &Names::default()) else { panic!("{text}") };
    assert_eq!((error.line, error.column, error.reason.as_str()), (2, 40, "\"regions\" is empty"));
    assert!(error.help.as_ref().is_some_and(|help| help.contains("remove \"regions\"")), "{error:?}");
    let lines: Vec<&str> = error.excerpt.lines().collect();
    assert_eq!(lines[0].find(']').unwrap(), lines[1].find('^').unwrap());
    assert!(parsed(r#", "regions": null"#).is_ok());
}

#[test]
fn an_unknown_key_is_answered_with_all_keys() {
    let near = parsed(r#", "qtoa": 1"#).unwrap_err();
    assert!(near.contains("\n  help: did you mean \"quota\"? keys here are: name, "), "{near}");
    let far = parsed(r#", "bandwidth_in_mbit": 1"#).unwrap_err();
    assert!(far.contains("\n  help: keys here are: name, user, group,"), "{far}");
}

#[test]
fn names_and_the_policy_are_those_of_the_host() {
    let root = tempfile::tempdir().unwrap();
    let etc = root.path().join("etc/egm-device");
    std::fs::create_dir_all(&etc).unwrap();
    assert_eq!(Policy::of_host(root.path()), Policy::root_only());
    std::fs::write(root.path().join("etc/passwd"), "# none\nalice:x:1000:7::/:/bin/sh\n").unwrap();
    std::fs::write(root.path().join("etc/group"), "gpu:x:500:alice\n").unwrap();
    let text = r#"{"rules": [{"name": "a", "user": "alice"}, {"name": "b", "group": "gpu"}]}"#;
    std::fs::write(etc.join("policy.json"), text).unwrap();
    let policy = parse(text, &Names::of_host(root.path())).unwrap();
    assert_eq!(
        (policy.rules()[0].who, policy.rules()[1].who),
        (RuleSubject::User(1000), RuleSubject::Group(500))
    );
    // Only root's own file counts.
    let counts = rustix::process::getuid().is_root();
    assert_eq!(Policy::of_host(root.path()), if counts { policy } else { Policy::root_only() });
}

/// A queue of one rule for each of users 1 to 4, that of user 4 with priority 1.
fn queue(limits: OvertakeLimits) -> Queue {
    let mut rules: Vec<Rule> = (1..5).map(|uid| rule(&format!("r{uid}"), uid)).collect();
    rules[3].priority = 1;
    Queue::new(Policy::new(rules), limits)
}

fn ask(queue: &mut Queue, rule: usize, size: u64) -> Ticket {
    queue.arrive(Duration::ZERO, size, vec![Candidate { region: "a".to_owned(), tenant: tenant(rule) }])
}

#[test]
fn a_request_that_left_is_not_served_and_leaves_once() {
    let mut queue = queue(OvertakeLimits::default());
    let (first, second) = (ask(&mut queue, 0, 8), ask(&mut queue, 1, 8));
    assert!(queue.leave(first) && !queue.leave(first));
    assert_eq!(queue.waiting().iter().map(Waiter::ticket).collect::<Vec<_>>(), [second]);
    assert_eq!(queue.next(Duration::ZERO, &[supply("a", 8)]).unwrap().ticket, second);
    assert_eq!(queue.accounts().held(tenant(1)), 8, "a pick is charged");
    assert_eq!(queue.next(Duration::ZERO, &[supply("a", 8)]), None);
}

#[test]
fn priority_goes_first_then_the_smaller_holding_then_arrival() {
    let mut queue = queue(OvertakeLimits::default());
    let tickets = [0, 1, 0, 2, 3].map(|rule| ask(&mut queue, rule, 8));
    let served: Vec<_> = std::iter::from_fn(|| queue.next(Duration::ZERO, &[supply("a", 8)]))
        .map(|pick| pick.ticket)
        .collect();
    assert_eq!(served, [4, 0, 1, 3, 2].map(|index| tickets[index]));
}

#[test]
fn a_region_without_a_place_is_skipped_for_5_seconds_or_until_a_slice_comes_back() {
    let all = [supply("a", 100)];
    let short = || {
        let mut queue = queue(OvertakeLimits::default());
        let tickets = [0, 1, 2].map(|rule| ask(&mut queue, rule, 8));
        let pick = queue.next(Duration::ZERO, &all).unwrap();
        queue.put_back(Duration::ZERO, pick);
        assert_eq!(
            queue.waiting().iter().map(Waiter::ticket).collect::<Vec<_>>(),
            tickets,
            "in its position"
        );
        assert_eq!(queue.accounts().held(tenant(0)), 0, "and not charged");
        (queue, tickets)
    };
    let mut last = queue(OvertakeLimits::default());
    let tickets = [0, 1, 3].map(|rule| ask(&mut last, rule, 8));
    let urgent = last.next(Duration::ZERO, &all).unwrap();
    assert_eq!(urgent.ticket, tickets[2]);
    last.put_back(Duration::ZERO, urgent);
    assert_eq!(last.waiting().iter().map(Waiter::ticket).collect::<Vec<_>>(), tickets);
    let (mut later, tickets) = short();
    let before = later.next(Duration::from_millis(4999), &all).unwrap().ticket;
    assert_eq!((before, later.next(second(5), &all).unwrap().ticket), (tickets[1], tickets[0]));
    let (mut returned, tickets) = short();
    returned.credit(Duration::ZERO, tenant(3), "b", 8);
    let before = returned.next(Duration::ZERO, &all).unwrap().ticket;
    returned.credit(Duration::ZERO, tenant(3), "a", 8);
    assert_eq!((before, returned.next(Duration::ZERO, &all).unwrap().ticket), (tickets[1], tickets[0]));
}

#[test]
fn an_overdue_request_keeps_memory_free_for_itself() {
    for (passes, grants) in [(2, 100), (100, 2)] {
        let mut queue = queue(OvertakeLimits { passes, grants });
        let large = ask(&mut queue, 0, 40);
        for _ in 0..5 {
            ask(&mut queue, 1, 8);
        }
        let room = [supply("a", 8)];
        for _ in 0..2 {
            assert_ne!(queue.next(Duration::ZERO, &room).unwrap().ticket, large);
        }
        assert_eq!(queue.next(Duration::ZERO, &room), None, "{passes} passes, {grants} grants");
        assert_eq!(queue.next(Duration::ZERO, &[supply("a", 40)]).unwrap().ticket, large);
        assert!(queue.next(Duration::ZERO, &room).is_some());
    }
}

#[test]
fn a_request_above_its_quota_does_not_become_overdue() {
    let mut rules: Vec<Rule> = (1..3).map(|uid| rule(&format!("r{uid}"), uid)).collect();
    rules[0].quota = Some(40);
    let mut queue = Queue::new(Policy::new(rules), OvertakeLimits { passes: 2, grants: 2 });
    for _ in 0..2 {
        ask(&mut queue, 0, 40);
    }
    let first = queue.next(Duration::ZERO, &[supply("a", 40)]).unwrap();
    for _ in 0..5 {
        ask(&mut queue, 1, 8);
    }
    let room = [supply("a", 8)];
    let mut others = || queue.next(Duration::ZERO, &room).map(|pick| pick.tenant);
    assert_eq!([(); 3].map(|()| others()), [Some(tenant(1)); 3]);
    queue.credit(Duration::ZERO, first.tenant, "a", first.size);
    assert_eq!(
        queue.next(Duration::ZERO, &room).map(|pick| pick.tenant),
        Some(tenant(1)),
        "it waits from now on"
    );
}
