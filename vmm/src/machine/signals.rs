//! SIGTERM, SIGINT and SIGHUP end the machine in good order; one more ends the wait for its disks.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use signal_hook::SigId;

use super::exit::{ExitLatch, ExitReason};

/// What the machine hears until it is dropped; then these signals do nothing.
pub(super) struct Signals {
    exit: Arc<ExitLatch>,
    heard: Vec<Heard>,
}

/// A signal, and the pipe that its handler writes.
struct Heard {
    signal: i32,
    pipe: UnixStream,
    handler: SigId,
}

impl Heard {
    fn new(signal: i32) -> io::Result<Self> {
        let (pipe, theirs) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        let handler = signal_hook::low_level::pipe::register(signal, theirs)?;
        Ok(Self { signal, pipe, handler })
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        signal_hook::low_level::unregister(self.handler); // which has the other end of the pipe
    }
}

impl Signals {
    pub(super) fn new(exit: Arc<ExitLatch>) -> io::Result<Self> {
        let heard = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].into_iter().map(Heard::new);
        Ok(Self { exit, heard: heard.collect::<io::Result<_>>()? })
    }
}

impl MutEventSubscriber for Signals {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        for Heard { signal, pipe, .. } in &mut self.heard {
            if pipe.as_raw_fd() == events.fd() && pipe.read(&mut [0; 16]).is_ok() {
                if self.exit.is_set() {
                    self.exit.hurry();
                }
                self.exit.set(ExitReason::Signal(*signal));
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for heard in &self.heard {
            let _ = ops.add(Events::new(&heard.pipe, EventSet::IN));
        }
    }
}
