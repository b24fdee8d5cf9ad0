//! The time of the next check of the error block: no event reports that the guest has read it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use vmm_sys_util::timerfd::TimerFd;

/// First wait, in which a running guest reads a record.
const SOON: Duration = Duration::from_millis(10);
/// Longest wait: a guest that does not read is interrupted this often.
const LATE: Duration = Duration::from_secs(10);

/// A timer that expires soon while the guest reads, and ever later while it does not.
pub(super) struct Again {
    timer: TimerFd,
    /// Set until its expiration was handled. The timer itself is clear earlier. Setting it then would cancel an
    /// expiration that the event loop has received already.
    is_set: bool,
    wait: Duration,
}

impl Again {
    /// A timer that is not set.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: TimerFd::new().map_err(io::Error::from)?, is_set: false, wait: SOON })
    }

    /// Starts its present wait, unless it is set.
    pub(super) fn set(&mut self) {
        if !self.is_set {
            self.is_set = self.timer.reset(self.wait, None).is_ok();
        }
    }

    /// After an expiration, at which the guest was found to have `read` or not.
    pub(super) fn expired(&mut self, read: bool) {
        self.is_set = false;
        self.wait = if read { SOON } else { self.wait.saturating_mul(2).min(LATE) };
    }

    /// Takes the expiration from the kernel.
    pub(super) fn take(&mut self) {
        let _ = self.timer.wait();
    }
}

impl AsRawFd for Again {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_reads_is_looked_at_soon_and_another_one_ever_later() {
        let mut again = Again::new().unwrap();
        again.set();
        assert!(again.is_set);
        again.set();
        again.take();
        let waits = [false, false, true, false].map(|read| {
            again.expired(read);
            again.wait / SOON.as_millis().try_into().unwrap()
        });
        assert_eq!(waits.map(|wait| wait.as_millis()), [2, 4, 1, 2]);
        (0..40).for_each(|_| again.expired(false));
        assert_eq!(again.wait, LATE);
    }
}
