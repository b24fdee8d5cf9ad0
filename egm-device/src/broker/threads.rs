//! Long operations on threads of their own, and the channel for their results.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;

use rustix::event::{EventfdFlags, eventfd};

use super::link::UnreturnedSlice;
use super::session::Key;
use super::source::{GrantFailure, GrantedSlice};
use crate::policy::{OrphanedSlice, Supply};

pub(super) enum ThreadResult {
    Made(Result<Box<dyn GrantedSlice>, GrantFailure>),
    Returned(Result<(), UnreturnedSlice>),
    /// The regions' supplies, and what clients of earlier brokers may still have.
    Looked(Vec<Supply>, Vec<OrphanedSlice>),
    IdleScrubDone,
}

/// The channel for results of threads.
pub(super) struct Threads {
    done: mpsc::Receiver<(Key, ThreadResult)>,
    sender: mpsc::Sender<(Key, ThreadResult)>,
    wake: Arc<OwnedFd>,
}

impl Threads {
    pub(super) fn new() -> io::Result<Self> {
        let (sender, done) = mpsc::channel();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self { done, sender, wake })
    }

    /// Readable when a thread is done.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Results of threads since the last call.
    pub(super) fn done(&self) -> Vec<(Key, ThreadResult)> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.wake, &mut count); // nothing to read is nothing to do
        self.done.try_iter().collect()
    }

    /// Runs `work` on a thread. If none can start, the result of `failed` comes back.
    pub(super) fn start(
        &self,
        key: Key,
        work: impl FnOnce() -> ThreadResult + Send + 'static,
        failed: impl FnOnce(io::Error) -> ThreadResult,
    ) {
        self.start_with(key, (), |()| work(), |(), error| failed(error));
    }

    /// The same with a value for `work`, or else for `failed`: a thread that fails to start would drop it.
    pub(super) fn start_with<T: Send + 'static>(
        &self,
        key: Key,
        what: T,
        work: impl FnOnce(T) -> ThreadResult + Send + 'static,
        failed: impl FnOnce(T, io::Error) -> ThreadResult,
    ) {
        let (sender, wake) = (self.sender.clone(), self.wake.clone());
        let (give, take) = mpsc::sync_channel(1);
        let run = move || take.recv().map_or((), |what| deliver(&sender, &wake, key, work(what)));
        match thread::Builder::new().name("broker-slice".into()).spawn(run) {
            Ok(_) => drop(give.send(what)), // there is room for one, and the thread waits for it
            Err(error) => deliver(&self.sender, &self.wake, key, failed(what, error)),
        }
    }
}

/// Queues the result of a thread and wakes the event loop.
fn deliver(sender: &mpsc::Sender<(Key, ThreadResult)>, wake: &OwnedFd, key: Key, result: ThreadResult) {
    let _ = sender.send((key, result)); // the loop is gone: no receiver is left
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes()); // full: a wake-up is pending already
}
