//! What a person at a terminal sees while memory is scrubbed.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::ledger::Progress;
use crate::rate::Rate;

/// How often the line is drawn.
const TICK: Duration = Duration::from_millis(200);

/// Runs `long` with somebody who draws its progress.
pub(super) fn with_line<T>(long: impl FnOnce(&(dyn Fn(Progress) + Sync)) -> T) -> T {
    let line = Line { begun: Instant::now(), shown: io::stderr().is_terminal().then(Mutex::default) };
    long(&|progress| line.draw(progress))
}

/// A line on standard error that is drawn over.
#[derive(Debug)]
struct Line {
    begun: Instant,
    /// `None` where nobody looks.
    shown: Option<Mutex<Shown>>,
}

#[derive(Debug, Default)]
struct Shown {
    rate: Option<Rate>,
    /// When it was drawn last, since the beginning.
    drawn: Option<Duration>,
}

impl Line {
    fn draw(&self, progress: Progress) {
        let shown = self.shown.as_ref().and_then(|shown| shown.lock().ok());
        if let Some(text) = shown.and_then(|mut shown| shown.next(progress, self.begun.elapsed())) {
            eprint!("\r\x1b[K{text}");
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let shown = self.shown.as_mut().and_then(|shown| shown.get_mut().ok());
        if shown.is_some_and(|shown| shown.drawn.is_some()) {
            eprint!("\r\x1b[K");
        }
    }
}

impl Shown {
    /// The line that is due `now`, if the last one is a while ago.
    fn next(&mut self, progress: Progress, now: Duration) -> Option<String> {
        let text = match progress {
            Progress::Opening(waited) => {
                format!("the kernel opens the device and zeroes it: {} s", waited.as_secs())
            }
            Progress::Scrubbing { done, of } => {
                let rate = self.rate.get_or_insert_with(|| Rate::new(of));
                rate.tell(done, now);
                format!("scrubbing: {rate}")
            }
        };
        let due = self.drawn.is_none_or(|drawn| now >= drawn.saturating_add(TICK));
        due.then(|| {
            self.drawn = Some(now);
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_tells_how_much_how_fast_and_how_long_still_a_few_times_a_second() {
        let mut shown = Shown::default();
        let mut next = |gib: u64, millis| {
            let progress = Progress::Scrubbing { done: gib << 30, of: 4 << 30 };
            shown.next(progress, Duration::from_millis(millis))
        };
        assert_eq!(next(0, 0).as_deref(), Some("scrubbing: 0 B of 4 GiB"));
        assert_eq!(next(1, 199), None);
        assert_eq!(next(2, 2000).as_deref(), Some("scrubbing: 2 GiB of 4 GiB, 1.0 GiB/s, 2 s left"));
    }
}
