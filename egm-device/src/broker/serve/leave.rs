//! Orderly shutdown of a broker.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::{END, IdleWork, Server};
use crate::broker::ServerError;
use crate::broker::link::watch;

impl Server {
    /// Makes [`Server::run`] end once `end` is readable, such as the pipe of a signal.
    pub(crate) fn end_at(&mut self, end: OwnedFd) -> Result<(), ServerError> {
        watch(&self.epoll, end.as_fd(), END).map_err(ServerError::Wait)?;
        self.end = Some(end);
        Ok(())
    }

    /// Removes the socket, disconnects clients, and signals threads to stop without waiting for them. Like a killed
    /// broker, it reports no slice as free: that takes proof that no process maps it.
    pub(super) fn leave(&mut self) {
        // The lock beside it is still this broker's, so it is not the socket of the next one.
        let _ = std::fs::remove_file(&self.path);
        if let IdleWork::Scrubbing(scrub) = &self.idle {
            scrub.stop();
        }
        for link in self.links.values_mut() {
            link.cancel.store(true, Ordering::Relaxed);
            link.socket = None;
        }
    }
}
