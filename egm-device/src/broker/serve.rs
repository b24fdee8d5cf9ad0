//! The broker's event loop: sockets, processes and threads around [`Sessions`].
//!
//! One thread waits for all events and never for a single client. It reads clients one packet at a time, in turn, and
//! cuts off those that have no room for an answer. Opening and scrubbing take long and have one thread per slice. The
//! look at the regions' supplies waits for the ledger's lock, so it has a thread too; requests that depend on it wait
//! in [`SupplyChecks`].

mod accept;
mod claims;
mod leave;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::fs::Timespec;

use super::idle::IdleScrub;
use super::link::{Link, UnreturnedSlice, describe, watch};
use super::listen::{ServerError, listen, lock};
use super::packet::{self, Packet};
use super::peer;
use super::session::{Effect, GrantTask, Key, Sessions};
use super::source::{GrantFailure, GrantedSlice, Source};
use super::supply_checks::{PendingRequest, SupplyChecks};
use super::threads::{ThreadResult, Threads};
use super::wire::{self, MAX_PACKET, RefusalReply, Reply, Request};
use crate::carve::plan;
use crate::policy::{OrphanedSlice, OvertakeLimits, Policy, Queue, Supply};

/// Interval of looks for waiting clients: other processes may free memory without an event. Also the pause before the
/// broker accepts clients again after it ran out of descriptors.
const TICK: Duration = Duration::from_secs(1);
const TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Longest time that a slice waits for a scrub of idle memory in its region to stop.
const SCRUB_STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which a broker without requests looks for idle memory to scrub.
const IDLE_INTERVAL: Duration = Duration::from_secs(10);
const IDLE_TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Names in the epoll set: a connection has `2 * key`, its process one more, and keys begin with 1.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const END: u64 = u64::MAX;

/// A broker that listens.
pub struct Server {
    source: Arc<dyn Source>,
    sessions: Sessions,
    links: BTreeMap<Key, Link>,
    supply_checks: SupplyChecks,
    begun: Instant,
    ticked: Instant,
    is_paused: bool,
    epoll: OwnedFd,
    listener: OwnedFd,
    threads: Threads,
    idle: IdleWork,
    /// Slices to make once the scrub of idle memory has left their region, or after [`SCRUB_STOP_TIMEOUT`].
    later: Vec<(Instant, Key, GrantTask)>,
    path: PathBuf,
    /// Becomes readable when the broker must stop; `is_over` records that it did.
    end: Option<OwnedFd>,
    is_over: bool,
    /// Held while this broker listens: its holder may replace the socket.
    _lock: File,
}

/// Background work between requests.
enum IdleWork {
    /// No scrub runs; the end of the last one.
    Resting(Option<Instant>),
    /// Idle memory is scrubbed, until this stops it.
    Scrubbing(Arc<IdleScrub>),
}

impl Server {
    /// Listens at `path`. Every user may connect; the policy decides. Replaces a socket that an ended broker left.
    pub fn listen(path: &Path, policy: Policy, source: Arc<dyn Source>) -> Result<Self, ServerError> {
        let error = |source| ServerError::Listen { path: path.to_owned(), source };
        let lock = lock(path)?;
        let listener = listen(path).map_err(error)?;
        // Where the kernel cannot, a client's own descriptors can hold up the loop (docs/limits.md).
        peer::refuse_descriptors(listener.as_fd());
        let threads = Threads::new().map_err(error)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| error(e.into()))?;
        watch(&epoll, listener.as_fd(), LISTENER).map_err(error)?;
        watch(&epoll, threads.wake(), WAKE).map_err(error)?;
        Ok(Self {
            source,
            sessions: Sessions::new(Queue::new(policy, OvertakeLimits::default())),
            links: BTreeMap::new(),
            supply_checks: SupplyChecks::default(),
            begun: Instant::now(),
            ticked: Instant::now(),
            is_paused: false,
            epoll,
            listener,
            threads,
            idle: IdleWork::Resting(None),
            later: Vec::new(),
            path: path.to_owned(),
            end: None,
            is_over: false,
            _lock: lock,
        })
    }

    /// Serves until the descriptor of `Server::end_at` is readable or waiting fails. A killed broker loses nothing:
    /// its slices are dirty, and the kernel still reports those of live clients as in use.
    pub fn run(&mut self) -> Result<(), ServerError> {
        while !self.is_over {
            self.turn().map_err(ServerError::Wait)?;
        }
        self.leave();
        Ok(())
    }

    fn turn(&mut self) -> io::Result<()> {
        self.begin_idle_scrub();
        let ticks =
            self.is_paused || self.sessions.is_waiting() || self.sessions.is_owed() || !self.later.is_empty();
        let timeout = match self.idle {
            _ if ticks => Some(TIMEOUT),
            IdleWork::Resting(_) => Some(IDLE_TIMEOUT),
            IdleWork::Scrubbing(_) => None,
        };
        let mut events = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            waited => waited?,
        };
        // By the clock and not by silence, which busy clients could prevent.
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            self.resume()?;
            self.supply_checks.serve(self.sessions.is_waiting());
            let effects = self.sessions.tick();
            self.apply(effects);
        }
        for event in &events {
            match event.data.u64() {
                LISTENER => self.accept()?,
                WAKE => self.threads_done(),
                END => self.is_over = true,
                name if name.is_multiple_of(2) => self.read(name / 2),
                name => self.process_ended(name / 2),
            }
        }
        self.make_late(SCRUB_STOP_TIMEOUT);
        self.look();
        Ok(())
    }

    fn read(&mut self, key: Key) {
        let Some(socket) = self.links.get(&key).and_then(|link| link.socket.as_ref()) else { return };
        let mut buffer = [0; MAX_PACKET];
        let parsed = match packet::receive(socket.as_fd(), &mut buffer) {
            Ok(Packet::Whole(packet)) => wire::parse(packet),
            Ok(Packet::TooLong) => Err(format!("a packet has {MAX_PACKET} bytes at most")),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Ok(Packet::End) | Err(_) => return self.close(key),
        };
        match parsed {
            Ok(request @ (Request::Return | Request::Bad(_))) => {
                let effects = self.sessions.request(key, request, self.begun.elapsed(), &[]);
                self.apply(effects);
            }
            // Nothing more is read from it until it has its answer.
            Ok(request) => match epoll::delete(&self.epoll, socket) {
                Ok(()) => self.supply_checks.ask(PendingRequest::Request(key, request)),
                Err(_) => self.close(key),
            },
            Err(why) => {
                self.send(key, &Reply::Refused(RefusalReply::because(why)));
                self.close(key);
            }
        }
    }

    fn process_ended(&mut self, key: Key) {
        if let Some(link) = self.links.get_mut(&key) {
            link.process = None; // which takes it out of the epoll set
        }
        let effects = self.sessions.ended(key);
        self.apply(effects);
    }

    fn threads_done(&mut self) {
        let done = self.threads.done();
        if done.iter().any(|(_, done)| matches!(done, ThreadResult::Made(_) | ThreadResult::Returned(_))) {
            self.supply_checks.changed();
            self.supply_checks.serve(self.sessions.is_waiting());
        }
        for (key, done) in done {
            let effects = match done {
                ThreadResult::Made(Err(GrantFailure::Short)) => {
                    self.supply_checks.ask(PendingRequest::Short(key));
                    Vec::new()
                }
                ThreadResult::Made(made) => self.made(key, made),
                ThreadResult::Returned(returned) => self.returned(key, returned),
                ThreadResult::Looked(supplies, left) => self.looked(&supplies, &left),
                ThreadResult::IdleScrubDone => self.idle_scrub_done(),
            };
            self.apply(effects);
        }
    }

    /// Starts a look at the regions on a thread, if any request waits for it.
    fn look(&mut self) {
        if self.supply_checks.begin() {
            let source = self.source.clone();
            let nothing = || ThreadResult::Looked(Vec::new(), Vec::new());
            // Without the accounts of earlier brokers, no supply: a quota could be exceeded.
            let look = move || {
                let supplies = source.supplies();
                source.orphaned().map_or_else(nothing, |left| ThreadResult::Looked(supplies, left))
            };
            self.threads.start(0, look, move |_| nothing());
        }
    }

    /// Decides the requests that waited for the look, then serves waiting clients that now have room.
    fn looked(&mut self, supplies: &[Supply], left: &[OrphanedSlice]) -> Vec<Effect> {
        let Some(asks) = self.supply_checks.over() else { return Vec::new() };
        self.sessions.set_orphaned(left, supplies);
        for ask in asks {
            let now = self.begun.elapsed();
            let listens =
                |key| self.links.get(&key).is_some_and(|link| link.listen(&self.epoll, key).is_ok());
            let effects = match ask {
                PendingRequest::Short(key) => {
                    self.sessions.made(key, Err(GrantFailure::Short), now, supplies)
                }
                PendingRequest::Request(key, request) if listens(key) => {
                    self.asked(key, &request);
                    self.sessions.request(key, request, now, supplies)
                }
                PendingRequest::Request(key, _) => self.sessions.closed(key),
            };
            self.apply(effects);
        }
        self.sessions.serve(self.begun.elapsed(), supplies)
    }

    fn made(&mut self, key: Key, made: Result<Box<dyn GrantedSlice>, GrantFailure>) -> Vec<Effect> {
        let outcome = made.map(|lease| {
            let sent = self.hand_over(key, lease.as_ref());
            if let Some(link) = self.links.get_mut(&key) {
                link.lease = Some(lease);
            }
            if sent.is_err() {
                self.close(key); // no process has the slice: it goes back at once
            }
        });
        self.sessions.made(key, outcome, self.begun.elapsed(), &[])
    }

    fn returned(&mut self, key: Key, returned: Result<(), UnreturnedSlice>) -> Vec<Effect> {
        let Some(link) = self.links.get_mut(&key) else { return Vec::new() };
        let outcome = returned.map_err(|kept| link.keep_lease(kept));
        self.sessions.returned(key, outcome, self.begun.elapsed())
    }

    /// Sends a slice to its client.
    fn hand_over(&self, key: Key, lease: &dyn GrantedSlice) -> io::Result<()> {
        let socket = self.links.get(&key).and_then(|link| link.socket.as_ref());
        let socket = socket.ok_or(io::ErrorKind::NotConnected)?;
        let (memory, region) = (lease.hand_out()?, describe(lease)?);
        let reply = Reply::Granted { slice: lease.slice().clone(), offset: lease.backing().offset() };
        packet::send(socket.as_fd(), &wire::encode(&reply), &[memory.as_fd(), region.as_fd()])
    }

    fn close(&mut self, key: Key) {
        let effects = self.sessions.closed(key);
        self.apply(effects);
    }

    fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(key, reply) => self.send(key, &reply),
                Effect::Close(key) => {
                    if let Some(link) = self.links.get_mut(&key) {
                        link.socket = None;
                        link.cancel.store(true, Ordering::Relaxed);
                    }
                }
                Effect::Make(key, task) => self.make(key, task),
                Effect::Return(key) => self.return_slice(key),
                Effect::Bad(key, spans) => self.claim(key, &spans),
                Effect::Forget(key) => drop(self.links.remove(&key)),
            }
        }
    }

    /// Sends a reply. Cuts off a client that has no room for it or has hung up.
    fn send(&mut self, key: Key, reply: &Reply) {
        let Some(link) = self.links.get(&key) else { return };
        if let Reply::Refused(refused) = reply {
            self.source.audit().write(&link.refusal(refused));
        }
        let Some(socket) = link.socket.as_ref() else { return };
        if packet::send(socket.as_fd(), &wire::encode(reply), &[]).is_err() {
            self.close(key);
        }
    }

    /// Starts a scrub of idle memory on a thread while all sessions are quiet.
    fn begin_idle_scrub(&mut self) {
        let IdleWork::Resting(since) = self.idle else { return };
        if since.is_none_or(|at| at.elapsed() >= IDLE_INTERVAL) && self.sessions.is_quiet() {
            let (source, scrub) = (self.source.clone(), Arc::<IdleScrub>::default());
            self.idle = IdleWork::Scrubbing(scrub.clone());
            let work = move || {
                source.scrub_idle(&scrub);
                ThreadResult::IdleScrubDone
            };
            self.threads.start(0, work, |_| ThreadResult::IdleScrubDone);
        }
    }

    fn idle_scrub_done(&mut self) -> Vec<Effect> {
        self.idle = IdleWork::Resting(Some(Instant::now()));
        self.make_late(Duration::ZERO);
        Vec::new()
    }

    /// Makes the slices that have `waited` or longer.
    fn make_late(&mut self, waited: Duration) {
        let is_due = |(since, ..): &mut (Instant, Key, GrantTask)| since.elapsed() >= waited;
        for (_, key, task) in self.later.extract_if(.., is_due).collect::<Vec<_>>() {
            self.make_now(key, task);
        }
    }

    fn make(&mut self, key: Key, task: GrantTask) {
        // The scrub may be stuck in the kernel: slices of other regions do not wait for it.
        match &self.idle {
            IdleWork::Scrubbing(scrub) if scrub.stop_for(&task.region) => {
                self.later.push((Instant::now(), key, task));
            }
            _ => self.make_now(key, task),
        }
    }

    fn make_now(&self, key: Key, task: GrantTask) {
        let Some(link) = self.links.get(&key) else { return };
        let (source, cancel) = (self.source.clone(), link.cancel.clone());
        self.threads.start(
            key,
            move || ThreadResult::Made(make(source.as_ref(), &task, &cancel)),
            |error| ThreadResult::Made(Err(GrantFailure::Failed(error.to_string()))),
        );
    }

    fn return_slice(&mut self, key: Key) {
        let Some(slice) = self.links.get_mut(&key).and_then(Link::take_lease) else { return };
        self.threads.start_with(
            key,
            slice,
            |slice| ThreadResult::Returned(slice.return_slice()),
            |slice, error| ThreadResult::Returned(Err(slice.without_thread(&error))),
        );
    }
}

fn make(
    source: &dyn Source,
    task: &GrantTask,
    cancel: &AtomicBool,
) -> Result<Box<dyn GrantedSlice>, GrantFailure> {
    let request = plan::Request { align: task.align, ..plan::Request::new(task.size, task.owner.clone()) };
    let held = source.grant(&task.region, &request, cancel)?;
    held.charge(&task.charge).map(|()| held)
}
