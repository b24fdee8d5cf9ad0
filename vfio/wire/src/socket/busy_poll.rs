//! Choice between polling and sleeping for a message.

use std::time::Duration;

/// How long to poll for a message before sleeping until it comes.
///
/// Sleeping and waking costs tens of microseconds, so a side that expects an answer at once polls for a short while. If
/// that fails (the peer is silent, or needs the processor that we keep busy), we sleep at once, for twice as many quick
/// answers as the last time, before we poll again: a quiet connection costs nothing, and a machine without a spare
/// processor next to nothing.
#[derive(Debug, Clone, Copy)]
pub struct BusyPoll {
    most: Duration,
    /// Quick answers to sleep for before the next poll.
    left: u32,
    /// Initial value of `left`.
    rest: u32,
}

/// Most quick answers that are slept for.
const LONGEST_REST: u32 = 1024;

impl BusyPoll {
    /// Never polls: sleeps until a message comes.
    pub const NONE: Self = Self::of(Duration::ZERO);

    /// Polls for `most` at longest: 50 µs is several times as long as a peer takes that is awake.
    #[must_use]
    pub const fn of(most: Duration) -> Self {
        Self { most, left: 0, rest: 1 }
    }

    /// How long to poll.
    pub(super) fn longest(&self) -> Duration {
        self.most
    }

    /// Whether to poll now.
    pub(super) fn is_on(&self) -> bool {
        self.left == 0 && !self.most.is_zero()
    }

    /// Records a poll, and whether a message came during it.
    pub(super) fn polled(&mut self, came: bool) {
        if came {
            self.rest = (self.rest >> 1).max(1);
        } else {
            self.left = self.rest;
            self.rest = self.rest.saturating_mul(2).min(LONGEST_REST);
        }
    }

    /// Records a sleep, and its length.
    pub(super) fn slept(&mut self, waited: Duration) {
        if waited <= self.most {
            self.left = self.left.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_ends_where_it_was_in_vain_and_is_tried_again_after_quick_answers() {
        let most = Duration::from_micros(50);
        let (quick, slow) = (Duration::from_micros(20), Duration::from_millis(3));
        let mut poll = BusyPoll::of(most);
        // How many quick answers it takes until it polls again, when each poll is in vain.
        let rests = |poll: &mut BusyPoll| {
            poll.polled(false);
            poll.slept(slow);
            (1..).find(|_| {
                poll.slept(quick);
                poll.is_on()
            })
        };
        let rests: Vec<_> = (0..12).map(|_| rests(&mut poll).unwrap()).collect();
        assert_eq!(rests, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
        // Polls that succeed shorten the pause again.
        (0..10).for_each(|_| poll.polled(true));
        poll.polled(false);
        poll.slept(quick);
        assert!(poll.is_on() && !BusyPoll::NONE.is_on());
    }
}
