//! State machine of the broker's sessions: events in, effects out. No socket, no clock, no descriptor.
//!
//! ```text
//!            take            picked            made               return, or: closed and ended
//!   Idle ──────────► Waiting ──────► Making ──────────► Holding ──────────────────────────────► Returning ──► Idle
//!     ▲                 │ ▲  no place   │ │                ▲        still in use elsewhere           │
//!     │                 │ └─────────────┘ │                └─────────────────────────────────────────┘
//!     └─────────────────┴─────────────────┘
//!          closed              failed, or no longer wanted (► Returning)
//! ```
//! A session is forgotten when its connection is closed and it is idle. A connection has one slice in its life.
//! A process that inherits it later, perhaps with fewer rights than the opener, gets an answer and is disconnected.

use std::collections::BTreeMap;
use std::time::Duration;

use super::judge::{Judgement, judge};
use super::refusal::{self, ReturnFailure};
use super::source::GrantFailure;
use super::wire::{RefusalReply, Reply, Request, SliceRequest};
use crate::owner::Owner;
use crate::policy::{
    Charge, OrphanedSlice, Peer, PickedRequest, Queue, Refusal, RefusalReason, Supply, Ticket,
};

/// Limit of connections per user. A closed connection counts until its slice is back.
const MAX_OF_USER: usize = 64;

/// Limit of connections of all users.
const MAX: usize = 1024;

/// Names a connection for as long as the broker runs.
pub(super) type Key = u64;

/// An action for the event loop.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Send the reply; a client that has no room for it is cut off.
    Send(Key, Reply),
    /// Close the connection: nothing more is read from it.
    Close(Key),
    /// Make a slice on a thread, which ends with [`Sessions::made`].
    Make(Key, GrantTask),
    /// Return the slice on a thread, which ends with [`Sessions::returned`].
    Return(Key),
    /// Record bytes of the slice that its client found bad, before the slice is returned.
    Bad(Key, Vec<(u64, u64)>),
    /// Drop the link: nothing is left of the session.
    Forget(Key),
}

/// A slice to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GrantTask {
    pub(super) region: String,
    pub(super) size: u64,
    pub(super) align: u64,
    pub(super) owner: Owner,
    pub(super) charge: Charge,
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
    /// Whether a slice of this connection was made.
    spent: bool,
    /// Refusal of a return while other processes have the memory. Kept until [`Sessions::tick`]: the check is slow.
    answered: Option<RefusalReply>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Idle,
    Waiting(Ticket, RequestOptions),
    Making(PickedRequest, RequestOptions),
    Holding(PickedRequest),
    Returning(PickedRequest),
}

/// The part of a request that the queue does not keep.
#[derive(Debug, Clone, Copy)]
struct RequestOptions {
    align: u64,
    wait: bool,
    /// Whether [`Reply::Waiting`] was sent.
    is_notified: bool,
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

    /// Whether a session waits for bytes, which other processes may free without notice to the broker.
    pub(super) fn is_waiting(&self) -> bool {
        !self.queue.waiting().is_empty()
    }

    /// Whether no session waits and no slice is being made or returned.
    pub(super) fn is_quiet(&self) -> bool {
        self.sessions.values().all(|session| matches!(session.stage, Stage::Idle | Stage::Holding(..)))
    }

    /// Registers a connection and returns its key.
    ///
    /// # Errors
    /// The refusal for a peer that no rule covers or that has too many connections.
    pub(super) fn connected(&mut self, peer: Peer, pid: u32, started: u64) -> Result<Key, RefusalReply> {
        let uid = peer.uid;
        let refuse = |why: String| Err(RefusalReply::because(why));
        if !self.queue.policy().names(&peer) {
            return refuse(format!("the policy has no rule for user {uid}: an operator can add one"));
        }
        let most = if egm_address::fault!("connections-unbounded") { MAX } else { MAX_OF_USER };
        if self.sessions.values().filter(|session| session.peer.uid == uid).count() >= most {
            return refuse(format!("user {uid} has {MAX_OF_USER} connections, the most: close one"));
        }
        if self.sessions.len() >= MAX {
            return refuse(format!("the broker has {MAX} connections, the most: try again"));
        }
        let owner = Owner { name: String::new(), uid, pid, started, domain: None };
        let key = self.next;
        self.next = self.next.saturating_add(1);
        let (answered, spent, stage) = (None, false, Stage::Idle);
        self.sessions.insert(key, Session { peer, owner, open: true, alive: true, spent, answered, stage });
        Ok(key)
    }

    pub(super) fn request(
        &mut self,
        key: Key,
        request: Request,
        now: Duration,
        supplies: &[Supply],
    ) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        let early = |why: &str| vec![Effect::Send(key, Reply::Refused(RefusalReply::because(why)))];
        match (request, &session.stage) {
            (_, Stage::Idle) if session.spent => {
                let mut effects = early("this connection has returned its slice: open another");
                effects.extend(self.closed(key));
                effects
            }
            (Request::Free, _) => {
                let free = self.queue.policy().free_for(&session.peer, self.queue.accounts(), supplies);
                vec![Effect::Send(key, Reply::Free(free.into()))]
            }
            (Request::Take(take), Stage::Idle) => self.take(key, &take, now, supplies),
            (Request::Take(_), _) => early("a connection has one slice: open another for another"),
            (Request::Return, Stage::Holding(pick)) => {
                if let Some(refused) = &session.answered {
                    return vec![Effect::Send(key, Reply::Refused(refused.clone()))];
                }
                session.stage = Stage::Returning(pick.clone());
                vec![Effect::Return(key)]
            }
            (Request::Return, _) => early("this connection has no slice to return"),
            (Request::Bad(spans), Stage::Holding(..)) => vec![Effect::Bad(key, spans)],
            (Request::Bad(_), _) => early("this connection has no slice that could go bad"),
        }
    }

    fn take(&mut self, key: Key, take: &SliceRequest, now: Duration, supplies: &[Supply]) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        session.owner.name.clone_from(&take.name);
        let Judgement { candidates, refusal } = judge(&self.queue, &session.peer, take, supplies);
        if candidates.is_empty() {
            return vec![Effect::Send(key, Reply::Refused(refusal.into()))];
        }
        let ticket = self.queue.arrive(now, take.size, candidates);
        session.stage =
            Stage::Waiting(ticket, RequestOptions { align: take.align, wait: take.wait, is_notified: false });
        self.serve_or_reply(key, refusal, now, supplies)
    }

    /// Serves waiting sessions. If `key` still waits, it gets the reason once, or a refusal if it asked not to wait.
    fn serve_or_reply(
        &mut self,
        key: Key,
        refusal: Refusal,
        now: Duration,
        supplies: &[Supply],
    ) -> Vec<Effect> {
        let mut effects = self.serve(now, supplies);
        let Some(session) = self.sessions.get_mut(&key) else { return effects };
        let Stage::Waiting(ticket, options) = &mut session.stage else { return effects };
        let reply = match options {
            RequestOptions { wait: true, is_notified: true, .. } => return effects,
            RequestOptions { wait: true, is_notified, .. } => {
                *is_notified = true;
                Reply::Waiting
            }
            RequestOptions { wait: false, .. } => {
                self.queue.leave(*ticket);
                session.stage = Stage::Idle;
                Reply::Refused
            }
        };
        effects.push(Effect::Send(key, reply(refusal.into())));
        effects
    }

    /// Counts slices that clients of earlier brokers may still have.
    pub(super) fn set_orphaned(&mut self, left: &[OrphanedSlice], supplies: &[Supply]) {
        self.queue.set_orphaned(left, supplies);
    }

    /// Starts a slice for each waiting session that the supplies have room for.
    pub(super) fn serve(&mut self, now: Duration, supplies: &[Supply]) -> Vec<Effect> {
        let mut effects = Vec::new();
        let mut supplies = supplies.to_vec();
        // The ledger may not count slices in the making yet. Subtract them; some count twice for a short time.
        for session in self.sessions.values() {
            if let Stage::Making(pick, _) = &session.stage {
                take_off(&mut supplies, pick);
            }
        }
        while let Some(pick) = self.queue.next(now, &supplies) {
            take_off(&mut supplies, &pick);
            let of_ticket = |session: &Session| match session.stage {
                Stage::Waiting(ticket, options) if ticket == pick.ticket => Some(options),
                _ => None,
            };
            let found = self.sessions.iter_mut().find_map(|(key, s)| Some((*key, of_ticket(s)?, s)));
            let Some((key, options, session)) = found else { continue };
            let domain = self.queue.policy().rule(pick.tenant).and_then(|rule| rule.trust_domain.clone());
            let owner = session.owner.clone().in_domain(domain);
            let (region, size, charge) =
                (pick.region.clone(), pick.size, self.queue.policy().charge(pick.tenant));
            session.stage = Stage::Making(pick, options);
            effects.push(Effect::Make(key, GrantTask { region, size, align: options.align, owner, charge }));
        }
        effects
    }

    /// Handles a slice that was made and sent (`Ok`), or could not be made. [`Sessions::serve`] must follow.
    pub(super) fn made(
        &mut self,
        key: Key,
        outcome: Result<(), GrantFailure>,
        now: Duration,
        supplies: &[Supply],
    ) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        let Stage::Making(pick, options) = &session.stage else { return Vec::new() };
        let (pick, options) = (pick.clone(), *options);
        session.spent = outcome.is_ok() && !egm_address::fault!("connection-never-spent");
        match outcome {
            Ok(()) if session.open => {
                session.stage = Stage::Holding(pick);
                Vec::new()
            }
            Ok(()) => {
                session.stage = Stage::Returning(pick);
                vec![Effect::Return(key)]
            }
            Err(GrantFailure::Short) if session.open => {
                session.stage = Stage::Waiting(pick.ticket, options);
                let peer = session.peer.clone();
                let refusal = self.no_place(&peer, pick, now, supplies);
                self.serve_or_reply(key, refusal, now, supplies)
            }
            Err(error) => {
                self.queue.credit(now, pick.tenant, &pick.region, pick.size);
                session.stage = Stage::Idle;
                let refused = refusal::grant_failed(&session.peer, &error);
                let mut effects = vec![Effect::Send(key, Reply::Refused(refused))];
                effects.extend(self.forget(key));
                effects
            }
        }
    }

    /// Returns a pick that the ledger has no place for to the queue; returns the refusal for its client.
    fn no_place(&mut self, peer: &Peer, pick: PickedRequest, now: Duration, supplies: &[Supply]) -> Refusal {
        let rule = self.queue.policy().rule(pick.tenant).map(|rule| rule.name.clone());
        let why = RefusalReason::NoPlacement { size: pick.size, region: pick.region.clone() };
        self.queue.put_back(now, pick);
        Refusal { rule, why, free: self.queue.policy().free_for(peer, self.queue.accounts(), supplies) }
    }

    /// Handles a slice that was returned, or stays with its client. [`Sessions::serve`] must follow.
    pub(super) fn returned(
        &mut self,
        key: Key,
        outcome: Result<(), ReturnFailure>,
        now: Duration,
    ) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        let Stage::Returning(pick) = &session.stage else { return Vec::new() };
        if let Err(why) = outcome {
            session.stage = Stage::Holding(pick.clone());
            let refused = why.refused(&session.peer);
            session.answered = matches!(why, ReturnFailure::Used(_)).then(|| refused.clone());
            return vec![Effect::Send(key, Reply::Refused(refused))];
        }
        session.answered = None;
        if !egm_address::fault!("lease-not-released") {
            self.queue.credit(now, pick.tenant, &pick.region, pick.size);
        }
        session.stage = Stage::Idle;
        let mut effects = vec![Effect::Send(key, Reply::Returned)];
        effects.extend(self.forget(key));
        effects
    }

    /// Whether a slice is still held although its client is gone.
    pub(super) fn is_owed(&self) -> bool {
        self.sessions.values().any(Session::is_owed)
    }

    /// Handles the passing of about one second: drops cached refusals, and retries returns that are owed.
    pub(super) fn tick(&mut self) -> Vec<Effect> {
        self.sessions.values_mut().for_each(|session| session.answered = None);
        let owed: Vec<Key> = self.sessions.iter().filter(|(_, s)| s.is_owed()).map(|(key, _)| *key).collect();
        owed.into_iter().flat_map(|key| self.client_gone(key)).collect()
    }

    /// Handles a connection that is closed, or cut off.
    pub(super) fn closed(&mut self, key: Key) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        session.open = false;
        if let Stage::Waiting(ticket, _) = session.stage {
            self.queue.leave(ticket);
            session.stage = Stage::Idle;
        }
        let mut effects = vec![Effect::Close(key)];
        effects.extend(self.client_gone(key));
        effects
    }

    /// Handles the end of the process that made the connection.
    pub(super) fn ended(&mut self, key: Key) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        session.alive = false;
        self.client_gone(key)
    }

    fn client_gone(&mut self, key: Key) -> Vec<Effect> {
        let Some(session) = self.sessions.get_mut(&key) else { return Vec::new() };
        match &session.stage {
            Stage::Holding(pick) if !session.open && !session.alive => {
                session.stage = Stage::Returning(pick.clone());
                vec![Effect::Return(key)]
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

impl Session {
    /// Whether it holds a slice although its connection is closed and its process has ended.
    const fn is_owed(&self) -> bool {
        !self.open && !self.alive && matches!(self.stage, Stage::Holding(..))
    }
}

fn take_off(supplies: &mut [Supply], pick: &PickedRequest) {
    for supply in supplies.iter_mut().filter(|supply| supply.region == pick.region) {
        supply.free = supply.free.saturating_sub(pick.size);
        supply.largest = supply.largest.min(supply.free);
    }
}

#[cfg(test)]
mod tests;
