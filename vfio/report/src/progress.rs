//! Progress of long work: one line, redrawn. Nothing where no terminal shows it.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::rate::Rate;

/// Often enough to look alive, seldom enough to cost nothing.
const REDRAW: Duration = Duration::from_millis(100);
const CELLS: u32 = 30;

/// A progress bar on standard error.
#[derive(Debug)]
pub struct Bar {
    what: String,
    start: Instant,
    /// `None` when standard error is no terminal.
    shown: Option<Mutex<Shown>>,
}

/// The progress, and when it was drawn last.
#[derive(Debug, Default)]
struct Shown {
    rate: Option<Rate>,
    drawn: Duration,
}

impl Bar {
    /// A bar of `what`.
    #[must_use]
    pub fn new(what: impl Into<String>) -> Self {
        let shown = io::stderr().is_terminal().then(Mutex::default);
        Self { what: what.into(), start: Instant::now(), shown }
    }

    /// `done` of `total` bytes are present. From any thread. If another thread draws, this one only returns,
    /// except at the end, which is always drawn.
    pub fn told(&self, done: u64, total: u64) {
        let Some(shown) = &self.shown else { return };
        let locked = if done < total { shown.try_lock().ok() } else { shown.lock().ok() };
        let Some(mut shown) = locked else { return };
        let (now, last) = (self.start.elapsed(), shown.drawn);
        let rate = shown.rate.get_or_insert_with(|| Rate::new(total));
        let is_news = done > rate.done();
        rate.tell(done, now);
        if is_news && (done >= total || now.saturating_sub(last) >= REDRAW) {
            let text = line(&self.what, rate);
            shown.drawn = now;
            let _ = write!(io::stderr(), "\r{text}\x1b[K"); // ANSI: erase to the end of the line
        }
    }
}

/// Whatever is printed next, an error perhaps, begins on a line of its own.
impl Drop for Bar {
    fn drop(&mut self) {
        let shown = self.shown.as_mut().and_then(|shown| shown.get_mut().ok());
        if shown.is_some_and(|shown| shown.drawn > Duration::ZERO) {
            let _ = writeln!(io::stderr());
        }
    }
}

fn line(what: &str, rate: &Rate) -> String {
    let filled = rate.cells(CELLS);
    let bar: String = (0..CELLS).map(|cell| if cell < filled { '#' } else { '.' }).collect();
    format!("{what} [{bar}] {rate}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_much_how_fast_and_how_long_still() {
        let mut rate = Rate::new(64 << 30);
        rate.tell(0, Duration::ZERO);
        rate.tell(16 << 30, Duration::from_secs(4));
        assert_eq!(
            line("memory present", &rate),
            "memory present [########......................] 16 GiB of 64 GiB, 4.0 GiB/s, 12 s left"
        );
    }
}
