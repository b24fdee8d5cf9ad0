//! Host programs that have connected and not yet requested a port: a few, for a short time.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use vmm_sys_util::timerfd::TimerFd;

/// Most at a time.
pub(super) const MAX_HANDSHAKES: usize = 64;
/// Longest duration of a handshake: it is one short line.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Slots in a handshake, first come first. As a descriptor: readable when the first is overdue.
pub(super) struct Handshakes {
    slots: VecDeque<(Instant, usize)>,
    timer: TimerFd,
}

impl Handshakes {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { slots: VecDeque::new(), timer: TimerFd::new()? })
    }

    /// The handshake of `slot` begins at `now`.
    pub(super) fn begin(&mut self, slot: usize, now: Instant) {
        self.slots.push_back((now.checked_add(HANDSHAKE_TIMEOUT).unwrap_or(now), slot));
    }

    /// The handshake of `slot` has ended.
    pub(super) fn end(&mut self, slot: usize) {
        self.slots.retain(|(_, handshake)| *handshake != slot);
    }

    /// Takes one that has had its time by `now` or that there is no room for; sets the timer for the next when there
    /// is none.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<usize> {
        let (until, slot) = *self.slots.front()?;
        if until <= now || self.slots.len() > MAX_HANDSHAKES {
            self.slots.pop_front();
            return Some(slot);
        }
        let _ = self.timer.reset(until.saturating_duration_since(now), None); // on failure, later connections end it
        None
    }

    pub(super) fn clear(&mut self) {
        self.slots.clear();
    }
}

impl AsRawFd for Handshakes {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::wait_readable;

    #[test]
    fn a_handshake_has_its_time_and_no_more() {
        let (mut handshakes, start) = (Handshakes::new().unwrap(), Instant::now());
        handshakes.begin(7, start);
        handshakes.begin(8, start + HANDSHAKE_TIMEOUT);
        assert_eq!(handshakes.overdue(start + HANDSHAKE_TIMEOUT - Duration::from_nanos(1)), None);
        wait_readable(&handshakes); // a nanosecond, and for ever when the timer is not set
        assert_eq!(handshakes.overdue(start + HANDSHAKE_TIMEOUT), Some(7));
        assert_eq!(handshakes.overdue(start + HANDSHAKE_TIMEOUT), None);
        handshakes.end(8);
        assert_eq!(handshakes.overdue(start + 3 * HANDSHAKE_TIMEOUT), None);
    }

    #[test]
    fn the_first_makes_way_when_there_are_too_many() {
        let (mut handshakes, start) = (Handshakes::new().unwrap(), Instant::now());
        for slot in 0..=MAX_HANDSHAKES {
            assert_eq!(handshakes.overdue(start), None);
            handshakes.begin(slot, start);
        }
        assert_eq!((handshakes.overdue(start), handshakes.overdue(start)), (Some(0), None));
    }
}
