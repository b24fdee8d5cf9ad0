//! Whether the server is still there, and who wants to know when it is not.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown;

/// A thread that sleeps until the server closes the connection, so that a server that dies is noticed when nobody asks it
/// anything. Dropping this ends the connection and the thread.
pub(super) struct Lost {
    told: Arc<Told>,
    socket: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Told(Mutex<State>);

#[derive(Default)]
struct State {
    lost: bool,
    trigger: Option<OwnedFd>,
}

impl State {
    fn fire(&self) {
        if let (true, Some(trigger)) = (self.lost, &self.trigger) {
            // An eventfd that is full has been told before.
            let _ = rustix::io::write(trigger, &1_u64.to_ne_bytes());
        }
    }
}

impl Told {
    fn state(&self) -> MutexGuard<'_, State> {
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
    /// Watches `socket`.
    pub(super) fn watch(socket: OwnedFd) -> io::Result<Self> {
        let (told, socket) = (Arc::new(Told::default()), Arc::new(socket));
        let (tell, watched) = (Arc::clone(&told), Arc::clone(&socket));
        let thread = std::thread::Builder::new().name("vfio-user".to_owned()).spawn(move || {
            // Nothing is read here: the end is an event of its own.
            let ends = PollFlags::RDHUP;
            while poll(&mut [PollFd::new(&watched, ends)], None) == Err(rustix::io::Errno::INTR) {}
            tell.announce();
        })?;
        Ok(Self { told, socket, thread: Some(thread) })
    }

    /// The server is lost: whoever is connected is told, once.
    pub(super) fn announce(&self) {
        self.told.announce();
    }

    /// Tells `trigger` from now on, and at once when it has happened already.
    pub(super) fn connect(&self, trigger: Option<OwnedFd>) {
        let mut state = self.told.state();
        state.trigger = trigger;
        state.fire();
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        // We leave by ourselves: that is no event.
        self.connect(None);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and if it had, there would be nothing to do here.
            let _ = thread.join();
        }
    }
}
