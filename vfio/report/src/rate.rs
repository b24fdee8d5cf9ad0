//! A limit on the speed of an operation. Pure: the caller passes the time in.

use std::num::NonZeroU64;
use std::time::Duration;

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

    proptest! {
        #[test]
        fn no_step_is_faster_than_the_pace(
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
