//! Host programs that have connected and not yet requested a port: a few, for a short time.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use vmm_sys_util::timerfd::TimerFd;

/// Most at a time.
pub(super) const MAX_GREETINGS: usize = 64;
/// Longest duration of a greeting: it is one short line.
const GREETING_TIME: Duration = Duration::from_secs(5);

/// Slots that greet, first come first. As a descriptor: readable when the first has had its time.
pub(super) struct Greetings {
    slots: VecDeque<(Instant, usize)>,
    timer: TimerFd,
}

impl Greetings {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { slots: VecDeque::new(), timer: TimerFd::new()? })
    }

    /// `slot` greets from `now` on.
    pub(super) fn begin(&mut self, slot: usize, now: Instant) {
        self.slots.push_back((now.checked_add(GREETING_TIME).unwrap_or(now), slot));
    }

    /// `slot` greets no longer.
    pub(super) fn end(&mut self, slot: usize) {
        self.slots.retain(|(_, greeting)| *greeting != slot);
    }

    /// Takes one that has had its time by `now` or that there is no room for; sets the timer for the next when there
    /// is none.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<usize> {
        let (until, slot) = *self.slots.front()?;
        if until <= now || self.slots.len() > MAX_GREETINGS {
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

impl AsRawFd for Greetings {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::wait_readable;

    #[test]
    fn a_greeting_has_its_time_and_no_more() {
        let (mut greetings, start) = (Greetings::new().unwrap(), Instant::now());
        greetings.begin(7, start);
        greetings.begin(8, start + GREETING_TIME);
        assert_eq!(greetings.overdue(start + GREETING_TIME - Duration::from_nanos(1)), None);
        wait_readable(&greetings); // a nanosecond, and for ever when the timer is not set
        assert_eq!(greetings.overdue(start + GREETING_TIME), Some(7));
        assert_eq!(greetings.overdue(start + GREETING_TIME), None);
        greetings.end(8);
        assert_eq!(greetings.overdue(start + 3 * GREETING_TIME), None);
    }

    #[test]
    fn the_first_makes_way_when_there_are_too_many() {
        let (mut greetings, start) = (Greetings::new().unwrap(), Instant::now());
        for slot in 0..=MAX_GREETINGS {
            assert_eq!(greetings.overdue(start), None);
            greetings.begin(slot, start);
        }
        assert_eq!((greetings.overdue(start), greetings.overdue(start)), (Some(0), None));
    }
}
