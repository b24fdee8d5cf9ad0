//! Guarantees of a session, as single cases and over random lives of clients.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::broker::wire::tests::take;
use crate::policy::{OvertakeLimits, Policy};

const SIZE: u64 = 100;

/// The world outside: a region of [`SIZE`] bytes, and its holders.
struct World {
    sessions: Sessions,
    now: Duration,
    /// By connection: bytes that the ledger has granted, whether its connection is open, whether its process lives.
    given: BTreeMap<Key, u64>,
    open: BTreeSet<Key>,
    alive: BTreeSet<Key>,
    making: BTreeMap<Key, u64>,
    returning: BTreeSet<Key>,
    sent_return: BTreeSet<Key>,
    answers: Vec<(Key, Reply)>,
}

impl World {
    fn new() -> Self {
        Self {
            sessions: Sessions::new(Queue::new(Policy::root_only(), OvertakeLimits::default())),
            now: Duration::ZERO,
            given: BTreeMap::new(),
            open: BTreeSet::new(),
            alive: BTreeSet::new(),
            making: BTreeMap::new(),
            returning: BTreeSet::new(),
            sent_return: BTreeSet::new(),
            answers: Vec::new(),
        }
    }

    fn supplies(&self) -> Vec<Supply> {
        let free = SIZE - self.given.values().sum::<u64>();
        let (region, kind) = ("egm4".to_owned(), "egm".to_owned());
        vec![Supply { region, kind, page_size: 1, usable: SIZE, free, largest: free, shares_file: true }]
    }

    fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(key, reply) => self.answers.push((key, reply)),
                Effect::Close(key) => drop(self.open.remove(&key)),
                Effect::Make(key, task) => {
                    assert!(self.open.contains(&key) && self.making.insert(key, task.size).is_none());
                }
                Effect::Return(key) => {
                    let is_unused = !self.open.contains(&key) && !self.alive.contains(&key);
                    let undelivered = self.making.remove(&key).is_some();
                    assert!(
                        is_unused || undelivered || self.sent_return.remove(&key),
                        "{key} may still map it"
                    );
                    assert!(self.returning.insert(key));
                }
                Effect::Bad(key, _) => assert!(self.given.contains_key(&key)),
                Effect::Forget(key) => {
                    assert!(!self.open.contains(&key) && !self.given.contains_key(&key));
                }
            }
        }
    }

    fn connect(&mut self) -> Key {
        let peer = Peer { uid: 0, gids: vec![0] };
        let key = self.sessions.connected(peer, 1, 1).unwrap();
        self.open.insert(key);
        self.alive.insert(key);
        key
    }

    fn send(&mut self, key: Key, request: Request) {
        let supplies = self.supplies();
        let effects = self.sessions.request(key, request, self.now, &supplies);
        self.apply(effects);
    }

    fn take(&mut self, key: Key, size: u64, wait: bool) {
        self.send(key, Request::Take(SliceRequest { wait, ..take("egm4", size) }));
    }

    fn return_slice(&mut self, key: Key) {
        if self.given.contains_key(&key) && !self.returning.contains(&key) {
            self.sent_return.insert(key);
        }
        self.send(key, Request::Return);
        self.sent_return.remove(&key); // what was not begun is not asked for later
    }

    fn close(&mut self, key: Key) {
        let effects = self.sessions.closed(key);
        self.apply(effects);
    }

    fn end(&mut self, key: Key) {
        self.alive.remove(&key);
        let effects = self.sessions.ended(key);
        self.apply(effects);
    }

    /// A thread has made the slice of `key`, or could not.
    fn make(&mut self, key: Key, outcome: Result<(), GrantFailure>) {
        let Some(size) = self.making.get(&key).copied() else { return };
        if outcome.is_ok() {
            self.given.insert(key, size);
            assert!(self.given.values().sum::<u64>() <= SIZE, "more is granted than there is");
        } else {
            self.making.remove(&key);
        }
        let supplies = self.supplies();
        let effects = self.sessions.made(key, outcome, self.now, &supplies);
        self.apply(effects);
        self.making.remove(&key);
        self.serve();
    }

    /// A thread has returned the slice of `key`, or a process `still` has it.
    fn scrub(&mut self, key: Key, still: bool) {
        if self.returning.remove(&key) {
            let outcome = if still { Err(ReturnFailure::Used("still used".to_owned())) } else { Ok(()) };
            if !still {
                self.given.remove(&key);
            }
            let effects = self.sessions.returned(key, outcome, self.now);
            self.apply(effects);
            self.serve();
        }
    }

    fn tick(&mut self) {
        let effects = self.sessions.tick();
        self.apply(effects);
    }

    fn held(&self) -> u64 {
        self.sessions.queue.accounts().held_in("egm4")
    }

    fn serve(&mut self) {
        self.now += Duration::from_millis(1);
        let effects = self.sessions.serve(self.now, &self.supplies());
        self.apply(effects);
    }
}

#[test]
fn a_slice_is_granted_until_the_connection_is_closed_and_the_process_has_ended() {
    for close_first in [true, false] {
        let mut world = World::new();
        let key = world.connect();
        world.take(key, SIZE, false);
        world.make(key, Ok(()));
        if close_first {
            world.close(key)
        } else {
            world.end(key)
        }
        assert!(world.returning.is_empty());
        if close_first {
            world.end(key)
        } else {
            world.close(key)
        }
        assert_eq!(world.returning, [key].into());
    }
}

#[test]
fn a_slice_without_a_waiting_client_is_returned_at_once() {
    let mut world = World::new();
    let key = world.connect();
    world.take(key, SIZE, false);
    world.close(key);
    world.make(key, Ok(()));
    assert_eq!(world.returning, [key].into());
    world.scrub(key, false);
    assert!(world.sessions.sessions.is_empty());
}

#[test]
fn why_a_slice_could_not_be_made_is_for_operators() {
    let mut world = World::new();
    let key = world.connect();
    world.take(key, SIZE, false);
    world.sessions.sessions.get_mut(&key).unwrap().peer.uid = 1000;
    world.make(key, Err(GrantFailure::Failed("no".into())));
    let (_, Reply::Refused(refused)) = world.answers.last().unwrap() else { panic!() };
    assert_eq!(refused.why, "the host could not make the slice: ask an operator, or for another region");
}

#[test]
fn a_return_of_what_others_still_have_frees_nothing_until_all_are_gone() {
    let mut world = World::new();
    let key = world.connect();
    world.take(key, SIZE, false);
    world.make(key, Ok(()));
    world.return_slice(key);
    world.scrub(key, true);
    let (_, Reply::Refused(refused)) = world.answers.last().unwrap() else { panic!() };
    assert_eq!((refused.why.as_str(), world.held()), ("still used", SIZE));
    world.close(key);
    world.tick();
    assert!(world.returning.is_empty());
    world.end(key);
    world.scrub(key, true); // a child of that process has it
    assert_eq!(world.held(), SIZE);
    assert!(world.sessions.is_owed());
    world.tick();
    world.scrub(key, false);
    assert_eq!(world.held(), 0);
    assert!(world.sessions.sessions.is_empty());
}

/// Finding the processes that map it takes a look at every process of the host.
#[test]
fn a_return_of_what_others_still_have_is_looked_at_once_a_tick() {
    let mut world = World::new();
    let key = world.connect();
    world.take(key, SIZE, false);
    world.make(key, Ok(()));
    for _ in 0..3 {
        let before = world.answers.len();
        for said in 0..100 {
            world.return_slice(key);
            assert_eq!(world.returning.contains(&key), said == 0);
            world.scrub(key, true);
        }
        assert_eq!(world.answers.len() - before, 100);
        assert!(
            world
                .answers
                .iter()
                .all(|(_, reply)| matches!(reply, Reply::Refused(r) if r.why == "still used"))
        );
        world.tick();
    }
    world.return_slice(key);
    world.scrub(key, false);
    assert_eq!((world.answers.last().unwrap(), world.held()), (&(key, Reply::Returned), 0));
}

/// The policy counts bytes; the ledger knows alignment, and memory that is still mapped.
#[test]
fn a_request_for_a_place_that_is_none_yet_waits_on_and_is_first_when_there_is_one() {
    let mut world = World::new();
    let holder = world.connect();
    world.take(holder, SIZE / 4, false);
    world.make(holder, Ok(()));
    let (first, second) = (world.connect(), world.connect());
    world.take(first, SIZE / 2, true);
    world.make(first, Err(GrantFailure::Short));
    let (_, Reply::Waiting(waiting)) = world.answers.last().unwrap() else { panic!("{:?}", world.answers) };
    assert!(
        waiting.why.contains("50 does not fit in \"egm4\" now: the free memory is not so aligned"),
        "{waiting:?}"
    );
    assert_eq!(world.held(), SIZE / 4);
    world.serve();
    assert!(world.making.is_empty(), "not asked again and again");
    world.take(second, SIZE / 4, true);
    world.make(second, Ok(()));
    world.return_slice(holder);
    world.scrub(holder, false);
    assert_eq!(world.making, [(first, SIZE / 2)].into());
}

#[test]
fn a_request_that_does_not_wait_and_finds_no_place_is_refused_and_not_charged() {
    let mut world = World::new();
    let key = world.connect();
    world.take(key, SIZE, false);
    world.make(key, Err(GrantFailure::Short));
    assert!(matches!(world.answers.last(), Some((_, Reply::Refused(_)))));
    assert!(!world.sessions.is_waiting() && world.held() == 0);
}

#[derive(Debug, Clone)]
enum Step {
    Connect,
    Take(usize, u64, bool),
    Return(usize),
    Close(usize),
    End(usize),
    Make(usize, Result<(), GrantFailure>),
    Scrub(usize, bool),
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    let who = 0..32usize;
    let failed = GrantFailure::Failed("no".into());
    let outcome = prop_oneof![8 => Just(Ok(())), 1 => Just(Err(failed)), 1 => Just(Err(GrantFailure::Short))];
    prop_oneof![
        2 => Just(Step::Connect),
        4 => (who.clone(), 0..SIZE + 5, any::<bool>()).prop_map(|(who, size, wait)| Step::Take(who, size, wait)),
        2 => who.clone().prop_map(Step::Return),
        1 => who.clone().prop_map(Step::Close),
        1 => who.clone().prop_map(Step::End),
        4 => (who.clone(), outcome).prop_map(|(who, outcome)| Step::Make(who, outcome)),
        3 => (who, prop::bool::weighted(0.2)).prop_map(|(who, still)| Step::Scrub(who, still)),
        1 => Just(Step::Tick),
    ]
}

proptest! {
    /// Whatever clients do and in whatever order threads end: grants never exceed the region, nothing is returned that
    /// a process may still map, and once all clients are gone no state is left. (`World` checks most of it.)
    #[test]
    fn nothing_is_granted_twice_and_nothing_is_left_over(
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut world = World::new();
        let mut keys = Vec::new();
        for step in steps {
            let of = |who: usize| keys.get(who % keys.len().max(1)).copied();
            match step {
                Step::Connect if keys.len() < 32 => keys.push(world.connect()),
                Step::Connect => {}
                Step::Take(who, size, wait) => {
                    if let Some(key) = of(who).filter(|key| world.open.contains(key)) {
                        world.take(key, size, wait);
                    }
                }
                Step::Return(who) => {
                    if let Some(key) = of(who).filter(|key| world.open.contains(key)) {
                        world.return_slice(key);
                    }
                }
                Step::Close(who) => of(who).into_iter().for_each(|key| world.close(key)),
                Step::End(who) => of(who).into_iter().for_each(|key| world.end(key)),
                Step::Make(who, outcome) => {
                    of(who).into_iter().for_each(|key| world.make(key, outcome.clone()));
                }
                Step::Scrub(who, still) => of(who).into_iter().for_each(|key| world.scrub(key, still)),
                Step::Tick => world.tick(),
            }
        }
        for key in &keys {
            world.close(*key);
            world.end(*key);
        }
        for key in &keys {
            world.make(*key, Ok(()));
            world.scrub(*key, false);
        }
        world.tick();
        for key in &keys {
            world.scrub(*key, false);
        }
        prop_assert!(world.sessions.sessions.is_empty(), "{:?}", world.sessions);
        prop_assert!(!world.sessions.is_waiting() && world.given.is_empty());
        prop_assert_eq!(world.held(), 0);
    }
}
