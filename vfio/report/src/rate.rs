//! Speed and remaining time of an operation, and a limit on its speed. Pure: the caller passes the time in.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::show::size;

/// The speed shown is that of about the last [`MAX_SAMPLES`] × [`SPACING`]: 5 seconds.
const MAX_SAMPLES: usize = 20;
const SPACING: Duration = Duration::from_millis(250);

/// Speed and time left of an operation over `total` bytes, from its first report on.
#[derive(Debug, Clone)]
pub struct Rate {
    total: u64,
    samples: VecDeque<(Duration, u64)>,
    latest: (Duration, u64),
}

impl Rate {
    /// A rate without a report.
    #[must_use]
    pub const fn new(total: u64) -> Self {
        Self { total, samples: VecDeque::new(), latest: (Duration::ZERO, 0) }
    }

    /// Reports `done` bytes `at` a time. Workers report out of order: an older report is ignored.
    pub fn tell(&mut self, done: u64, at: Duration) {
        self.latest = (self.latest.0.max(at), self.latest.1.max(done.min(self.total)));
        if self.samples.back().is_none_or(|(newest, _)| self.latest.0.saturating_sub(*newest) >= SPACING) {
            self.samples.push_back(self.latest);
            if self.samples.len() > MAX_SAMPLES {
                self.samples.pop_front();
            }
        }
    }

    /// Bytes done.
    #[must_use]
    pub const fn done(&self) -> u64 {
        self.latest.1
    }

    /// Number of `cells` that are done: none only when no byte is, all only when all bytes are.
    #[must_use]
    pub fn cells(&self, cells: u32) -> u32 {
        let done = u128::from(cells).saturating_mul(u128::from(self.done()));
        let (filled, total) = (done.div_ceil(u128::from(self.total.max(1))), u128::from(self.total));
        let filled = u32::try_from(filled).unwrap_or(cells).min(cells);
        if u128::from(self.done()) < total { filled.min(cells.saturating_sub(1)) } else { filled }
    }

    /// Bytes in a second; `None` until there are two reports to compare.
    #[must_use]
    pub fn per_second(&self) -> Option<u64> {
        let (then, before) = *self.samples.front()?;
        let micros = self.latest.0.checked_sub(then)?.as_micros();
        let bytes = u128::from(self.latest.1.checked_sub(before)?);
        let speed = bytes.saturating_mul(1_000_000).checked_div(micros)?;
        u64::try_from(speed).ok().filter(|speed| *speed > 0)
    }

    /// Time until all is done, at this speed.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        let left = u128::from(self.total.saturating_sub(self.latest.1)).saturating_mul(1000);
        let millis = left.div_ceil(u128::from(self.per_second()?));
        u64::try_from(millis).ok().map(Duration::from_millis)
    }
}

impl fmt::Display for Rate {
    /// `12.5 GiB of 64 GiB, 21.3 GiB/s, 3 s left`; without what is not known yet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", size(self.done()), size(self.total))?;
        let (Some(speed), Some(left)) = (self.per_second(), self.left()) else { return Ok(()) };
        let tenths = (u128::from(speed) * 10 + (1 << 29)) >> 30;
        let seconds = left.as_millis().div_ceil(1000);
        let (left, unit) = if seconds < 120 { (seconds, "s") } else { (seconds.div_ceil(60), "min") };
        write!(f, ", {}.{} GiB/s, {left} {unit} left", tenths / 10, tenths % 10)
    }
}

/// A speed limit: a token bucket of one step's size, so that a step waits for the one before it.
#[derive(Debug, Clone)]
pub struct Pace {
    per_second: NonZeroU64,
    free_at: Duration,
}

impl Pace {
    /// At most `per_second` bytes in a second.
    #[must_use]
    pub const fn new(per_second: NonZeroU64) -> Self {
        Self { per_second, free_at: Duration::ZERO }
    }

    /// Time to wait, `now`, before a step of `bytes`. Unused time is not saved up.
    pub fn wait(&mut self, bytes: u64, now: Duration) -> Duration {
        let begin = self.free_at.max(now);
        let nanos =
            u128::from(bytes).saturating_mul(1_000_000_000).div_ceil(u128::from(self.per_second.get()));
        let step = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.free_at = begin.saturating_add(step);
        begin.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn speed_and_time_left_follow_from_the_last_seconds() {
        let mut rate = Rate::new(1000);
        assert_eq!((rate.per_second(), rate.left()), (None, None));
        rate.tell(0, Duration::ZERO);
        rate.tell(100, SECOND);
        assert_eq!((rate.per_second(), rate.left()), (Some(100), Some(9 * SECOND)));
        for n in 2..30 {
            rate.tell(100 + n, Duration::from_secs(n));
        }
        assert_eq!(rate.per_second(), Some(1));
        rate.tell(1000, 30 * SECOND);
        assert_eq!(rate.left(), Some(Duration::ZERO));
    }

    #[test]
    fn a_person_reads_what_is_done_how_fast_and_how_long() {
        let mut rate = Rate::new(64 << 30);
        assert_eq!(rate.to_string(), "0 B of 64 GiB");
        rate.tell(1 << 30, 9 * SECOND);
        assert_eq!(rate.to_string(), "1 GiB of 64 GiB");
        rate.tell(7 << 29, 10 * SECOND);
        assert_eq!(rate.to_string(), "3.5 GiB of 64 GiB, 2.5 GiB/s, 25 s left");
        rate.tell(4 << 30, 19 * SECOND);
        assert_eq!(rate.to_string(), "4 GiB of 64 GiB, 0.3 GiB/s, 4 min left");
    }

    #[test]
    fn a_worker_that_tells_late_does_not_turn_the_bar_back() {
        let mut rate = Rate::new(1000);
        rate.tell(0, Duration::ZERO);
        rate.tell(500, SECOND);
        rate.tell(400, SECOND / 2);
        assert_eq!((rate.done(), rate.per_second()), (500, Some(500)));
        rate.tell(u64::MAX, 2 * SECOND);
        assert_eq!(rate.done(), 1000);
    }

    #[test]
    fn the_ends_of_a_bar_are_its_ends() {
        let cells = |done, total| {
            let mut rate = Rate::new(total);
            rate.tell(done, SECOND);
            rate.cells(30)
        };
        assert_eq!((cells(0, 1 << 30), cells(1, 1 << 30), cells(1 << 30, 1 << 30)), (0, 1, 30));
        assert_eq!((cells((1 << 30) - 1, 1 << 30), cells(1 << 29, 1 << 30)), (29, 15));
        assert_eq!((cells(u64::MAX, u64::MAX), cells(0, 0)), (30, 0));
    }

    proptest! {
        #[test]
        fn no_one_ever_goes_faster_than_the_pace(
            per_second in 1u64..1 << 40, steps in prop::collection::vec((0u64..1 << 30, 0u64..10_000), 1..50),
        ) {
            let mut pace = Pace::new(NonZeroU64::new(per_second).unwrap());
            let (mut now, mut bytes) = (Duration::ZERO, 0u64);
            for (step, pause) in steps {
                now += pace.wait(step, now);
                // Before this step, all earlier bytes had the time that they are due.
                prop_assert!(now.as_secs_f64() * per_second as f64 >= bytes as f64 * 0.999_999);
                bytes += step;
                now += Duration::from_millis(pause);
            }
        }
    }
}
