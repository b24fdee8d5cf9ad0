//! Detection of a lost server, and the eventfd that signals it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown;

/// A thread that sleeps until the server closes the connection, so that a server's death is noticed even without a
/// request. Dropping this ends the connection and the thread.
pub(super) struct Lost {
    signal: Arc<Signal>,
    socket: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Signal(Mutex<Trigger>);

#[derive(Default)]
struct Trigger {
    lost: bool,
    trigger: Option<OwnedFd>,
}

impl Trigger {
    fn fire(&self) {
        if let (true, Some(trigger)) = (self.lost, &self.trigger) {
            // A full eventfd was signalled before.
            let _ = rustix::io::write(trigger, &1_u64.to_ne_bytes());
        }
    }
}

impl Signal {
    fn state(&self) -> MutexGuard<'_, Trigger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        let mut state = self.state();
        if !state.lost {
            state.lost = true;
            state.fire();
        }
    }
}

impl Lost {
    /// Starts the thread that watches `socket`.
    pub(super) fn watch(socket: OwnedFd) -> io::Result<Self> {
        let (signal, socket) = (Arc::new(Signal::default()), Arc::new(socket));
        let (lost, watched) = (Arc::clone(&signal), Arc::clone(&socket));
        let thread = std::thread::Builder::new().name("vfio-user".to_owned()).spawn(move || {
            // Nothing is read here: the end is an event of its own.
            let ends = PollFlags::RDHUP;
            while poll(&mut [PollFd::new(&watched, ends)], None) == Err(rustix::io::Errno::INTR) {}
            lost.announce();
        })?;
        Ok(Self { signal, socket, thread: Some(thread) })
    }

    /// Marks the server as lost and signals the connected trigger, once.
    pub(super) fn announce(&self) {
        self.signal.announce();
    }

    /// Connects `trigger`, and signals it at once if the server is lost already.
    pub(super) fn connect(&self, trigger: Option<OwnedFd>) {
        let mut state = self.signal.state();
        state.trigger = trigger;
        state.fire();
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        // Our own disconnect must not signal the trigger.
        self.connect(None);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and if it had, there would be nothing to do here.
            let _ = thread.join();
        }
    }
}
