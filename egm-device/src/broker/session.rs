//! Who is connected, who waits, who holds: events in, effects out. No socket, no clock, no descriptor.
//!
//! ```text
//!            take            picked            made               return, or: closed and ended
//!   Idle ──────────► Waiting ──────► Making ──────────► Holding ──────────────────────────────► Returning ──► Idle
//!     ▲                 │ closed        │ failed, or nobody wants it any more (► Returning)
//!     └─────────────────┴───────────────┘
//! ```
//! A session is forgotten when its connection is closed and it is idle.

use std::collections::BTreeMap;
use std::time::Duration;

use super::wire::{Refused, Reply, Request, Take};
use crate::owner::Owner;
use crate::policy::{Ask, Decision, Free, Peer, Pick, Policy, Queue, Refusal, Supply, Tenant, Ticket, Why};

/// Connections of one user at most, those counted whose slice is not back yet.
const MAX_OF_USER: usize = 64;

/// Connections of all users at most.
const MAX: usize = 1024;

/// Names a connection for as long as the broker runs.
pub(super) type Key = u64;

/// What is to be done outside.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// A client that has no room for it is cut off.
    Send(Key, Reply),
    /// Nothing more is read from it.
    Close(Key),
    /// A slice is made, on a thread; [`Sessions::made`] ends it.
    Make(Key, Job),
    /// The slice is given back, on a thread; [`Sessions::returned`] ends it.
    GiveBack(Key),
    /// Nothing is left of it.
    Forget(Key),
}

/// A slice to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) region: String,
    pub(super) size: u64,
    pub(super) align: u64,
    pub(super) owner: Owner,
}

#[derive(Debug)]
struct Session {
    peer: Peer,
    /// The process; its name is that of the last request.
    owner: Owner,
    /// Whether the connection is open.
    open: bool,
    /// Whether the process lives.
    alive: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Idle,
    Waiting { ticket: Ticket, align: u64 },
    Making(Pick),
    Holding(Pick),
    Returning(Pick),
}

/// All connections, the policy and the queue.
#[derive(Debug)]
pub(super) struct Sessions {
    queue: Queue,
    sessions: BTreeMap<Key, Session>,
    next: Key,
}

impl Sessions {
    pub(super) const fn new(queue: Queue) -> Self {
        Self { queue, sessions: BTreeMap::new(), next: 1 }
    }

    /// Whether anybody waits for bytes that others may free without a word to us.
    pub(super) fn is_waiting(&self) -> bool {
        !self.queue.waiting().is_empty()
    }

    /// Somebody connects: the name of the connection, or why not.
    ///
    /// # Errors
    /// The answer for a peer that no rule knows or that has too many connections.
    pub(super) fn connected(&mut self, peer: Peer, pid: u32, started: u64) -> Result<Key, Reply> {
        let uid = peer.uid;
        let refuse = |why: String| Err(Reply::Refused(Refused::because(why)));
        if !self.queue.policy().knows(&peer) {
            return refuse(format!("the policy has no rule for user {uid}: an operator can add one"));
        }
        if self.sessions.values().filter(|session| session.peer.uid == uid).count() >= MAX_OF_USER {
            return refuse(format!("user {uid} has {MAX_OF_USER} connections, the most: close one"));
        }
        if self.sessions.len() >= MAX {
            return refuse(format!("the broker has {MAX} connections, the most: try again"));
        }
        let owner = Owner { name: String::new(), uid, pid, started };
        let key = self.next;
        self.next = self.next.saturating_add(1);
        self.sessions.insert(key, Session { peer, owner, open: true, alive: true, stage: Stage::Idle });
        Ok(key)
    }

    /// A client says something.
    pub(super) fn request(
        &mut self,
        key: Key,
        request: Request,
        now: Duration,
        supplies: &[Supply],
    ) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        let early = |why: &str| vec![Effect::Send(key, Reply::Refused(Refused::because(why)))];
        match (request, &session.stage) {
            (Request::Free, _) => {
                let free = self.queue.policy().free_for(&session.peer, self.queue.accounts(), supplies);
                vec![Effect::Send(key, Reply::Free(free.into()))]
            }
            (Request::Take(take), Stage::Idle) => self.take(key, &take, now, supplies),
            (Request::Take(_), _) => early("a connection has one slice: open another for another"),
            (Request::Return, Stage::Holding(pick)) => {
                session.stage = Stage::Returning(pick.clone());
                vec![Effect::GiveBack(key)]
            }
            (Request::Return, _) => early("this connection has no slice to return"),
        }
    }

    fn take(&mut self, key: Key, take: &Take, now: Duration, supplies: &[Supply]) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        session.owner.name.clone_from(&take.name);
        let (places, refusal) = judge(&self.queue, &session.peer, take, supplies);
        if places.is_empty() {
            return vec![Effect::Send(key, Reply::Refused(refusal.into()))];
        }
        let ticket = self.queue.arrive(now, take.size, places);
        session.stage = Stage::Waiting { ticket, align: take.align };
        let mut effects = self.serve(now, supplies);
        let Some(session) = self.sessions.get_mut(&key) else { return effects };
        if matches!(session.stage, Stage::Waiting { .. }) {
            let reply = if take.wait { Reply::Waiting } else { Reply::Refused };
            effects.push(Effect::Send(key, reply(refusal.into())));
            if !take.wait {
                self.queue.leave(ticket);
                session.stage = Stage::Idle;
            }
        }
        effects
    }

    /// Lets those who wait have what there is room for.
    pub(super) fn serve(&mut self, now: Duration, supplies: &[Supply]) -> Vec<Effect> {
        let mut effects = Vec::new();
        let mut supplies = supplies.to_vec();
        // The ledger may not have heard yet of what is being made: it is taken off, at worst twice for a while.
        for session in self.sessions.values() {
            if let Stage::Making(pick) = &session.stage {
                take_off(&mut supplies, pick);
            }
        }
        while let Some(pick) = self.queue.next(now, &supplies) {
            take_off(&mut supplies, &pick);
            let of_ticket = |session: &Session| match session.stage {
                Stage::Waiting { ticket, align } if ticket == pick.ticket => Some(align),
                _ => None,
            };
            let found = self.sessions.iter_mut().find_map(|(key, s)| Some((*key, of_ticket(s)?, s)));
            let Some((key, align, session)) = found else { continue };
            let (region, size, owner) = (pick.region.clone(), pick.size, session.owner.clone());
            session.stage = Stage::Making(pick);
            effects.push(Effect::Make(key, Job { region, size, align, owner }));
        }
        effects
    }

    /// A slice was made and sent (`Ok`), or could not be made. Whoever waits is to be served afterwards.
    pub(super) fn made(&mut self, key: Key, outcome: Result<(), String>, now: Duration) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        let Stage::Making(pick) = &session.stage else { return Vec::new() };
        let pick = pick.clone();
        match outcome {
            Ok(()) if session.open => {
                session.stage = Stage::Holding(pick);
                Vec::new()
            }
            Ok(()) => {
                session.stage = Stage::Returning(pick);
                vec![Effect::GiveBack(key)]
            }
            Err(error) => {
                self.queue.give_back(now, pick.tenant, &pick.region, pick.size);
                session.stage = Stage::Idle;
                // The text names owners and devices: for operators.
                let why = match session.peer.uid {
                    0 => error.lines().map(str::trim).collect::<Vec<_>>().join("; "),
                    _ => {
                        "the host could not make the slice: ask an operator, or for another region".to_owned()
                    }
                };
                let why = why.chars().take(1024).collect::<String>();
                let mut effects = vec![Effect::Send(key, Reply::Refused(Refused::because(why)))];
                effects.extend(self.forget(key));
                effects
            }
        }
    }

    /// A slice is back. Whoever waits is to be served afterwards.
    pub(super) fn returned(&mut self, key: Key, now: Duration) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        let Stage::Returning(pick) = &session.stage else { return Vec::new() };
        self.queue.give_back(now, pick.tenant, &pick.region, pick.size);
        session.stage = Stage::Idle;
        let mut effects = vec![Effect::Send(key, Reply::Returned)];
        effects.extend(self.forget(key));
        effects
    }

    /// The connection is closed, or cut off.
    pub(super) fn closed(&mut self, key: Key) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        session.open = false;
        if let Stage::Waiting { ticket, .. } = session.stage {
            self.queue.leave(ticket);
            session.stage = Stage::Idle;
        }
        let mut effects = vec![Effect::Close(key)];
        effects.extend(self.gone(key));
        effects
    }

    /// The process that made the connection has ended.
    pub(super) fn ended(&mut self, key: Key) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        session.alive = false;
        self.gone(key)
    }

    fn gone(&mut self, key: Key) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        match &session.stage {
            Stage::Holding(pick) if !session.open && !session.alive => {
                session.stage = Stage::Returning(pick.clone());
                vec![Effect::GiveBack(key)]
            }
            _ => self.forget(key),
        }
    }

    /// Forgets a session of which nothing is left.
    fn forget(&mut self, key: Key) -> Vec<Effect> {
        let over = |session: &Session| !session.open && matches!(session.stage, Stage::Idle);
        if self.sessions.get(&key).is_some_and(over) {
            self.sessions.remove(&key);
            return vec![Effect::Forget(key)];
        }
        Vec::new()
    }
}

/// Regions in which `peer` may have what it asks for, sooner or later, each with the tenant it is there; and what is said
/// where that is not now.
fn judge(queue: &Queue, peer: &Peer, take: &Take, supplies: &[Supply]) -> (Vec<(String, Tenant)>, Refusal) {
    let (policy, accounts) = (queue.policy(), queue.accounts());
    let ask = Ask { size: take.size, class: take.class.as_deref() };
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

/// What is said when there is room, or no such region.
fn otherwise(policy: &Policy, first: Option<&(String, Tenant)>, take: &Take, free: Free) -> Refusal {
    match first {
        Some((region, tenant)) => {
            let rule = policy.rule(*tenant).map(|rule| rule.name.clone());
            Refusal { rule, why: Why::OthersFirst { region: region.clone() }, free }
        }
        None => Refusal { rule: None, why: Why::NoRegion { names: take.regions.join(", ") }, free },
    }
}

fn take_off(supplies: &mut [Supply], pick: &Pick) {
    for supply in supplies.iter_mut().filter(|supply| supply.region == pick.region) {
        supply.free = supply.free.saturating_sub(pick.size);
        supply.largest = supply.largest.min(supply.free);
    }
}

#[cfg(test)]
mod tests;
