//! What a person at a terminal sees while memory is scrubbed.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::ledger::Progress;
use crate::show::size;

/// How often the line is drawn.
const TICK: u64 = 200;

/// Runs `long` with somebody who draws its progress.
pub(super) fn with_line<T>(long: impl FnOnce(&(dyn Fn(Progress) + Sync)) -> T) -> T {
    let line = Line::new();
    long(&|progress| line.draw(progress))
}

/// A line on standard error that is drawn over; nothing where nobody looks.
#[derive(Debug)]
struct Line {
    begun: Instant,
    shown: bool,
    /// When it was drawn last, in milliseconds since the beginning.
    drawn: AtomicU64,
}

impl Line {
    fn new() -> Self {
        Self { begun: Instant::now(), shown: io::stderr().is_terminal(), drawn: AtomicU64::new(0) }
    }

    /// Draws `progress`, if the last drawing is a while ago.
    fn draw(&self, progress: Progress) {
        let elapsed = self.begun.elapsed();
        let now = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let last = self.drawn.load(Ordering::Relaxed);
        let due = now >= last.saturating_add(TICK);
        if self.shown
            && due
            && self.drawn.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            eprint!("\r\x1b[K{}", text(progress, elapsed));
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.shown && *self.drawn.get_mut() > 0 {
            eprint!("\r\x1b[K");
        }
    }
}

fn text(progress: Progress, elapsed: Duration) -> String {
    match progress {
        Progress::Opening(waited) => {
            format!("the kernel opens the device and zeroes it: {} s", waited.as_secs())
        }
        Progress::Scrubbing { done, of } => {
            let millis = elapsed.as_millis().max(1);
            let speed = u64::try_from(u128::from(done) * 1000 / millis).unwrap_or(u64::MAX).max(1);
            let left = of.saturating_sub(done) / speed;
            let percent = done.saturating_mul(100) / of.max(1);
            format!("scrubbing: {percent} % of {}, {}/s, {left} s left", size(of), size(speed >> 20 << 20))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_tells_its_share_its_speed_and_the_time_left() {
        let half = Progress::Scrubbing { done: 2 << 30, of: 4 << 30 };
        let line = text(half, Duration::from_secs(2));
        assert_eq!(line, "scrubbing: 50 % of 4 GiB, 1 GiB/s, 2 s left");
        assert!(text(Progress::Scrubbing { done: 0, of: 0 }, Duration::ZERO).contains("0 %"));
    }
}
