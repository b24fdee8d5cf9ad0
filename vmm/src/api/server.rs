//! The API's thread: one epoll set with the listener, the journal's descriptor and each client.
//!
//! It waits for no client: a connection buffers the bytes that its client does not take, and reads nothing meanwhile.

mod client;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::fs::Timespec;
use rustix::process::geteuid;
use vmm_sys_util::eventfd::EventFd;

use self::client::Client;
use super::answer::{Answer, Response, Status, stream_head};
use super::connection::{Connection, Limits};
use super::published::Published;
use super::routes;
use crate::error::{Blame, Remedy, Report};
use crate::eventfd::borrowed;
use crate::listener::Listener;
use crate::resources::ThreadError;

/// Most clients at a time.
const MOST_CLIENTS: usize = 16;
/// Those of them that only root may use, so that it can end a machine of a user that holds all others.
const OF_ROOT: usize = 4;
/// Most of them that read events: the others control the machine.
const MOST_READERS: usize = 8;
/// Requests of a client that are answered before others have their turn.
const ANSWERS: usize = 8;
/// Size of the stack in bytes. Its deepest path writes a plan as JSON.
const STACK: usize = 256 << 10;
/// The same in `egm-vmm serve`, which reads configurations; unused pages take no memory.
const STACK_OF_SERVE: usize = 1 << 20;
/// Time without new clients after the host had no descriptor for one.
const PAUSE: Duration = Duration::from_secs(1);

/// Names in the epoll set. Clients have the numbers from 2 on.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;

/// Why a machine has no API.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    #[error("cannot listen on API socket {}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot make the API's event descriptors")]
    Descriptors(#[source] io::Error),
    #[error("cannot serve the API")]
    Thread(#[source] ThreadError),
}

impl Report for ServerError {
    fn remedy(&self) -> Remedy {
        match self {
            // A process of the host listens there.
            Self::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse => Blame::Host
                .help("choose another --api PATH, or end the machine that listens there: egm-vmm list"),
            Self::Listen { .. } => Blame::Configuration
                .help("choose a path of at most 107 bytes for a new file, in a folder that you may write"),
            Self::Descriptors(_) => Blame::Host.help("raise the limit of open files: ulimit -n 65536"),
            Self::Thread(_) => Blame::Host.help(ThreadError::HELP),
        }
    }
}

fn cannot_listen(path: &Path, source: io::Error) -> ServerError {
    ServerError::Listen { path: path.to_owned(), source }
}

/// A machine's API. Dropping it sends the last events, closes all connections and removes the socket.
pub(crate) struct Server {
    is_over: Arc<AtomicBool>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<Result<Listener, Listener>>>,
}

impl Server {
    /// Serves `machine` at `path`, for this user and root.
    ///
    /// # Errors
    /// [`ServerError`].
    pub(crate) fn start(path: &Path, machine: Arc<Published>) -> Result<Self, ServerError> {
        Self::start_with(path, machine, Limits::USUAL)
    }

    /// Serves machines that come and go, at the socket of `listener`.
    ///
    /// # Errors
    /// [`ServerError`].
    pub(crate) fn serve(listener: Listener, machine: Arc<Published>) -> Result<Self, ServerError> {
        Self::begin(listener, machine, Limits::USUAL, STACK_OF_SERVE)
    }

    /// Listens at `path`, for this user and root, to requests with descriptors too.
    ///
    /// # Errors
    /// [`ServerError::Listen`].
    pub(crate) fn listen(path: &Path) -> Result<Listener, ServerError> {
        Listener::bind_for_descriptors(path).map_err(|source| cannot_listen(path, source))
    }

    fn start_with(path: &Path, machine: Arc<Published>, limits: Limits) -> Result<Self, ServerError> {
        let listener = Listener::bind(path).map_err(|source| cannot_listen(path, source))?;
        Self::begin(listener, machine, limits, STACK)
    }

    fn begin(
        listener: Listener,
        machine: Arc<Published>,
        limits: Limits,
        stack: usize,
    ) -> Result<Self, ServerError> {
        let wake = machine.journal().open().map_err(ServerError::Descriptors)?;
        let is_over = Arc::<AtomicBool>::default();
        let serving = Serving::new(listener, &wake, machine, limits).map_err(ServerError::Descriptors)?;
        let over = Arc::clone(&is_over);
        let thread = thread::Builder::new().name("api".to_owned()).stack_size(stack);
        let thread = thread.spawn(move || serving.run(&over));
        let thread = thread.map_err(|error| ServerError::Thread(error.into()))?;
        Ok(Self { is_over, wake, thread: Some(thread) })
    }

    /// Ends as a drop does, but keeps the socket: clients that come from now on wait in it. `None` if the API ended
    /// earlier.
    pub(crate) fn into_listener(mut self) -> Option<Listener> {
        self.end()
    }

    fn end(&mut self) -> Option<Listener> {
        self.is_over.store(true, Ordering::Release);
        let _ = self.wake.write(1);
        self.thread.take().and_then(|thread| thread.join().ok()).and_then(Result::ok)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.end());
    }
}

struct Serving {
    epoll: OwnedFd,
    listener: Listener,
    wake: Arc<EventFd>,
    machine: Arc<Published>,
    limits: Limits,
    /// The user of this process at the start, which may connect, as root may.
    owner: u32,
    clients: BTreeMap<u64, Client>,
    next: u64,
    /// When the listener returns to the epoll set, after [`PAUSE`].
    resume: Option<Instant>,
}

impl Serving {
    fn new(
        listener: Listener,
        wake: &Arc<EventFd>,
        machine: Arc<Published>,
        limits: Limits,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (wake, owner) = (Arc::clone(wake), geteuid().as_raw());
        let (clients, next, resume) = (BTreeMap::new(), WAKE.saturating_add(1), None);
        let serving = Self { epoll, listener, wake, machine, limits, owner, clients, next, resume };
        watch(&serving.epoll, serving.listener.as_fd(), LISTENER, EventFlags::IN)?;
        watch(&serving.epoll, borrowed(&serving.wake), WAKE, EventFlags::IN)?;
        Ok(serving)
    }

    /// Serves until `is_over`, and returns the socket.
    ///
    /// # Errors
    /// The socket of an API that ended before; it refuses clients. In a sandbox this thread may not remove its file.
    fn run(mut self, is_over: &AtomicBool) -> Result<Listener, Listener> {
        while !is_over.load(Ordering::Acquire) {
            if let Err(error) = self.turn() {
                tracing::warn!("the API ends, and the machine goes on: cannot wait for clients: {error}");
                self.machine.abandon();
                let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
                return Err(self.listener);
            }
        }
        let now = Instant::now();
        self.answer_pending(true, now);
        self.serve_streams(now); // the last events, as far as clients take them at once
        Ok(self.listener)
    }

    fn turn(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(MOST_CLIENTS + 2); // with the listener and the journal
        let mut has_new = false;
        let limit = self.deadline().map(|end| end.saturating_duration_since(Instant::now()));
        let limit = limit.map(round_up).and_then(|limit| Timespec::try_from(limit).ok());
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let now = Instant::now();
        self.resume(now)?;
        for event in &events {
            match event.data.u64() {
                LISTENER => has_new = true,
                WAKE => {
                    let _ = self.wake.read();
                    self.answer_pending(false, now);
                    self.serve_streams(now);
                }
                key => self.serve(key, event.flags, now),
            }
        }
        self.clients.values_mut().for_each(|client| client.connection.expire(now));
        self.clients.retain(|_, client| !client.connection.is_over());
        // Last: a client with a request that is there already keeps its place, and one that has left gives its place up.
        if has_new { self.accept(now) } else { Ok(()) }
    }

    /// The next time at which something is due without an event. An idle API has none.
    fn deadline(&self) -> Option<Instant> {
        let clients = self.clients.values().filter_map(|client| client.connection.deadline());
        clients.chain(self.resume).min()
    }

    fn resume(&mut self, now: Instant) -> io::Result<()> {
        match self.resume.take_if(|at| *at <= now) {
            Some(_) => watch(&self.epoll, self.listener.as_fd(), LISTENER, EventFlags::IN),
            None => Ok(()),
        }
    }

    /// Accepts or refuses one client.
    fn accept(&mut self, now: Instant) -> io::Result<()> {
        let stream = match self.listener.accept() {
            Ok(Some(stream)) => stream,
            Ok(None) => return Ok(()),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) =>
            {
                return Ok(());
            }
            // epoll would report the same client again and again.
            Err(_) => {
                self.resume = now.checked_add(PAUSE);
                return Ok(epoll::delete(&self.epoll, &self.listener)?);
            }
        };
        let user = egm_device::broker::user_of(stream.as_fd());
        let Some(user) = user.ok().filter(|user| may_use(*user, self.owner)) else {
            let what = "this user may not use the API";
            refuse(
                &stream,
                Status::Forbidden,
                what,
                "connect as the user that started the machine, or as root",
            );
            return Ok(());
        };
        if !self.make_room(user) {
            refuse(
                &stream,
                Status::ServiceUnavailable,
                "the API has as many clients as it takes",
                "close a connection, and try again",
            );
            return Ok(());
        }
        let key = self.next;
        self.next = self.next.saturating_add(1);
        let (connection, interest) = (Connection::new(self.limits, now), EventFlags::IN);
        if watch(&self.epoll, stream.as_fd(), key, interest).is_ok() {
            self.clients.insert(key, Client::new(stream, user, connection, interest));
        }
        Ok(())
    }

    /// Makes room for a client of `user`: closes connections of this user that have been idle longest, and for root those of
    /// any user. Returns whether there is room.
    fn make_room(&mut self, user: u32) -> bool {
        while self.clients.len() >= places(user) {
            let own = self.clients.iter().filter(|(_, client)| user == 0 || client.user == user);
            let idle = own.filter_map(|(key, client)| Some((client.connection.idle_since()?, *key)));
            let Some((_, longest)) = idle.min() else { return false };
            self.clients.remove(&longest);
        }
        true
    }

    /// Reads, answers and writes as far as client `key` lets it.
    fn serve(&mut self, key: u64, flags: EventFlags, now: Instant) {
        let readers = self.clients.values().filter(|client| client.connection.is_stream()).count();
        let Some(client) = self.clients.get_mut(&key) else { return };
        if client.connection.is_waiting() {
            // It is neither read nor written, so nothing else detects its end.
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                client.connection.fail();
            }
            return;
        }
        if !client.is_behind {
            client.read(now);
        }
        client.write(now);
        client.is_behind = true;
        for _ in 0..ANSWERS {
            let Some(request) = client.connection.next_request(now) else {
                client.is_behind = false;
                break;
            };
            let response = match routes::respond(&request, &self.machine) {
                Response::Events(..) if readers >= MOST_READERS => Response::Answer(Answer::failure(
                    Status::ServiceUnavailable,
                    "the API has 8 readers of events",
                    "close one of them, or use the query follow=0",
                )),
                response => response,
            };
            match response {
                Response::Answer(answer) => client.connection.answer(&answer, request.keeps_alive, now),
                Response::Events(format, media) => {
                    client.connection.begin_stream(&stream_head(media), format)
                }
                Response::Later(awaited) => client.wait(awaited, request.keeps_alive),
            }
            client.write(now);
        }
        client.write(now); // an interim answer, or a refusal
        client.feed(&self.machine, now);
        client.update(&self.epoll, key);
    }

    /// Answers the waiting clients with an answer that is due. `is_last`: the machine has ended, and this API does.
    fn answer_pending(&mut self, is_last: bool, now: Instant) {
        let waiting = self.clients.iter_mut().filter(|(_, client)| client.connection.is_waiting());
        let mut waiting = waiting.peekable();
        if waiting.peek().is_none() {
            return;
        }
        let state = self.machine.state();
        for (key, client) in waiting {
            client.answer_pending(&state, is_last, now);
            client.update(&self.epoll, *key);
        }
    }

    /// Sends new events to their readers.
    fn serve_streams(&mut self, now: Instant) {
        for (key, client) in &mut self.clients {
            client.feed(&self.machine, now);
            client.update(&self.epoll, *key);
        }
    }
}

/// Whether `user` may use the API of a machine of `owner`.
fn may_use(user: u32, owner: u32) -> bool {
    user == owner || user == 0 || egm_address::fault!("api-for-every-user")
}

/// Number of clients at which the next one of `user` is refused.
const fn places(user: u32) -> usize {
    if user == 0 { MOST_CLIENTS } else { MOST_CLIENTS.saturating_sub(OF_ROOT) }
}

/// Answers a client that is not served, as far as it takes the answer at once.
fn refuse(stream: &UnixStream, status: Status, what: &str, remedy: &str) {
    let _ = rustix::io::write(stream, &Answer::failure(status, what, remedy).bytes(false));
}

/// epoll counts whole milliseconds: a deadline is over when the wait for it is.
fn round_up(limit: Duration) -> Duration {
    limit.saturating_add(Duration::from_millis(1))
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, name: u64, interest: EventFlags) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, epoll::EventData::new_u64(name), interest)?)
}

#[cfg(test)]
mod tests;
