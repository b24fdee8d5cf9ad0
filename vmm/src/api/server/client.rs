//! One client of the API's thread: its socket and its connection.

use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::cmsg_space;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::api::answer::Awaited;
use crate::api::connection::{Connection, MAX_PASSED};
use crate::api::life;
use crate::api::published::{KnownState, Published};
use crate::passed::{self, Received};

/// Bytes that are read from a client before others have their turn.
const AT_ONCE: usize = 16 << 10;
/// Events that a reader gets before others have their turn.
const BATCH: usize = 64;

/// A client, and what it waits for.
pub(super) struct Client {
    pub(super) stream: UnixStream,
    pub(super) user: u32,
    pub(super) connection: Connection,
    /// The events that the epoll set waits for.
    pub(super) interest: EventFlags,
    /// Whether it may have sent another whole request already.
    pub(super) is_behind: bool,
    pending: Option<Pending>,
}

/// A request that is answered later.
struct Pending {
    awaited: Awaited,
    keeps_alive: bool,
}

impl Client {
    pub(super) const fn new(
        stream: UnixStream,
        user: u32,
        connection: Connection,
        interest: EventFlags,
    ) -> Self {
        Self { stream, user, connection, interest, is_behind: false, pending: None }
    }

    /// Answers its request when `awaited` has happened.
    pub(super) fn wait(&mut self, awaited: Awaited, keeps_alive: bool) {
        self.pending = Some(Pending { awaited, keeps_alive });
        self.is_behind = false; // until then it is neither read nor written
        self.connection.wait();
    }

    /// Answers the request that it waits for, if that is due. The connection ends after an answer that `is_last`.
    pub(super) fn answer_pending(&mut self, state: &KnownState, is_last: bool, now: Instant) {
        let outcome = |pending: &Pending| life::outcome(&pending.awaited, state, is_last);
        let Some(answer) = self.pending.as_ref().and_then(outcome) else { return };
        let keeps_alive = self.pending.take().is_some_and(|pending| pending.keeps_alive) && !is_last;
        self.connection.answer(&answer, keeps_alive, now);
        self.is_behind = true; // it may have sent further requests meanwhile
        self.write(now);
    }

    pub(super) fn read(&mut self, now: Instant) {
        let mut buffer = [0; AT_ONCE];
        let room = self.connection.room().min(AT_ONCE);
        let Some(buffer) = buffer.get_mut(..room).filter(|buffer| !buffer.is_empty()) else { return };
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_PASSED))];
        match passed::receive(&self.stream, buffer, &mut space, RecvFlags::empty()) {
            Ok(Received { bytes, descriptors, is_whole }) => {
                self.connection.receive_descriptors(descriptors, is_whole);
                match bytes {
                    0 => self.connection.end_of_input(now),
                    count => self.connection.receive(buffer.get(..count).unwrap_or_default(), now),
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.connection.fail(),
        }
    }

    pub(super) fn write(&mut self, now: Instant) {
        while !self.connection.output().is_empty() {
            match (&self.stream).write(self.connection.output()) {
                Ok(count) => {
                    if self.connection.sent(count, now) {
                        let _ = self.stream.shutdown(Shutdown::Write);
                    }
                }
                Err(error) if is_later(&error) => return,
                Err(_) => return self.connection.fail(),
            }
        }
    }

    /// Sends new events to a reader that has taken all earlier ones.
    pub(super) fn feed(&mut self, machine: &Published, now: Instant) {
        while let Some(stream) = self.connection.drained_stream() {
            let batch = machine.journal().read(&mut stream.cursor, BATCH);
            if batch.is_empty() {
                return;
            }
            let bytes = batch.encode(stream.format);
            self.connection.push(&bytes);
            self.write(now);
        }
    }

    /// Sets the epoll events that its connection needs next.
    pub(super) fn update(&mut self, epoll: &OwnedFd, key: u64) {
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, self.connection.room() > 0 && !self.is_behind);
        interest.set(EventFlags::OUT, !self.connection.output().is_empty() || self.is_behind);
        if interest != self.interest {
            let data = epoll::EventData::new_u64(key);
            match epoll::modify(epoll, &self.stream, data, interest) {
                Ok(()) => self.interest = interest,
                Err(_) => self.connection.fail(),
            }
        }
    }
}

/// Whether the call is to be repeated when the descriptor is ready.
fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
