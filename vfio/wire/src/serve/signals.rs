//! Writes to eventfds on a thread, so that a client's eventfd blocks no other.
//!
//! The description of an eventfd is the client's too: it can fill the counter and make writes wait, at any moment. A write is
//! made non-blocking first, but the client may be quicker. So a thread of the client's writes, and the caller waits for it for
//! [`TIMEOUT`] once; while the thread hangs, no caller waits for it, and what does not fit its queue is lost, as in a full
//! counter.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// How long to wait for a write: far longer than a write that does not block takes, and short for the caller.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum number of writes in the queue.
const QUEUE: usize = 256;

/// An eventfd to write, and where to acknowledge it.
type Signal = (Arc<OwnedFd>, Sender<()>);

/// The thread of one client, started by its first signal.
#[derive(Debug, Default)]
pub(super) struct Signals {
    queue: Option<SyncSender<Signal>>,
    /// The last write that was not acknowledged in time.
    late: Option<Receiver<()>>,
}

impl Signals {
    /// Adds 1 to the counter; returns when that is done, or [`TIMEOUT`] is over.
    pub(super) fn write(&mut self, eventfd: &Arc<OwnedFd>) {
        let (done, acknowledged) = channel();
        let Some(queue) = self.queue() else { return };
        if queue.try_send((Arc::clone(eventfd), done)).is_err() {
            return;
        }
        let hangs = self.late.as_ref().is_some_and(|late| late.try_recv().is_err());
        if !hangs {
            self.late = acknowledged.recv_timeout(TIMEOUT).is_err().then_some(acknowledged);
        }
    }

    fn queue(&mut self) -> Option<SyncSender<Signal>> {
        if self.queue.is_none() {
            let (queue, signals) = sync_channel(QUEUE);
            // Not joined: it ends with its queue, or hangs until the process ends.
            let thread = thread::Builder::new().name("signals".to_owned()).spawn(move || run(&signals));
            self.queue = thread.is_ok().then_some(queue);
        }
        self.queue.clone()
    }
}

fn run(signals: &Receiver<Signal>) {
    for (eventfd, done) in signals {
        let _ = rustix::io::ioctl_fionbio(&eventfd, true);
        // A full counter is the client's own loss.
        let _ = rustix::io::write(&eventfd, &1_u64.to_ne_bytes());
        drop(eventfd);
        // The caller may have gone on.
        let _ = done.send(());
    }
}
