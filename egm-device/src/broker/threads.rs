//! Long operations on threads of their own, and the channel for their results.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;

use rustix::event::{EventfdFlags, eventfd};

use super::link::Kept;
use super::session::Key;
use super::source::{Held, NotMade};
use crate::policy::{Left, Supply};

/// Result of a thread.
pub(super) enum Done {
    Made(Result<Box<dyn Held>, NotMade>),
    Returned(Result<(), Kept>),
    /// The regions' supplies, and what clients of earlier brokers may still have.
    Looked(Vec<Supply>, Vec<Left>),
    Tidied,
}

/// The channel for results of threads.
pub(super) struct Threads {
    done: mpsc::Receiver<(Key, Done)>,
    tell: mpsc::Sender<(Key, Done)>,
    wake: Arc<OwnedFd>,
}

impl Threads {
    pub(super) fn new() -> io::Result<Self> {
        let (tell, done) = mpsc::channel();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self { done, tell, wake })
    }

    /// Readable when a thread is done.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Results of threads since the last call.
    pub(super) fn done(&self) -> Vec<(Key, Done)> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.wake, &mut count); // nothing to read is nothing to do
        self.done.try_iter().collect()
    }

    /// Runs `work` on a thread. If none can start, the result of `failed` comes back.
    pub(super) fn start(
        &self,
        key: Key,
        work: impl FnOnce() -> Done + Send + 'static,
        failed: impl FnOnce(io::Error) -> Done,
    ) {
        self.start_with(key, (), |()| work(), |(), error| failed(error));
    }

    /// The same with a value for either of them: a thread that fails to start would drop it.
    pub(super) fn start_with<T: Send + 'static>(
        &self,
        key: Key,
        what: T,
        work: impl FnOnce(T) -> Done + Send + 'static,
        failed: impl FnOnce(T, io::Error) -> Done,
    ) {
        let tell = move |tell: &mpsc::Sender<_>, wake: &OwnedFd, done| {
            let _ = tell.send((key, done)); // the loop is gone: no receiver is left
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes()); // full: a wake-up is pending already
        };
        let (sender, wake) = (self.tell.clone(), self.wake.clone());
        let (give, take) = mpsc::sync_channel(1);
        let run = move || take.recv().map_or((), |what| tell(&sender, &wake, work(what)));
        match thread::Builder::new().name("broker-slice".into()).spawn(run) {
            Ok(_) => drop(give.send(what)), // there is room for one, and the thread waits for it
            Err(error) => tell(&self.tell, &self.wake, failed(what, error)),
        }
    }
}
