//! SIGTERM, SIGINT and SIGHUP end the machine in good order; one more ends the wait for its disks.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use super::exit::{ExitLatch, ExitReason};

/// One pipe a signal, written by the signal handler.
pub(super) struct Signals {
    exit: Arc<ExitLatch>,
    pipes: Vec<(i32, UnixStream)>,
}

impl Signals {
    pub(super) fn new(exit: Arc<ExitLatch>) -> io::Result<Self> {
        let pipe = |signal| {
            let (ours, handlers) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            signal_hook::low_level::pipe::register(signal, handlers)?;
            Ok((signal, ours))
        };
        let pipes =
            [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].into_iter().map(pipe).collect::<io::Result<_>>()?;
        Ok(Self { exit, pipes })
    }
}

impl MutEventSubscriber for Signals {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        for (signal, pipe) in &mut self.pipes {
            if pipe.as_raw_fd() == events.fd() && pipe.read(&mut [0; 16]).is_ok() {
                if self.exit.is_set() {
                    self.exit.hurry();
                }
                self.exit.set(ExitReason::Signal(*signal));
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for (_, pipe) in &self.pipes {
            let _ = ops.add(Events::new(pipe, EventSet::IN));
        }
    }
}
