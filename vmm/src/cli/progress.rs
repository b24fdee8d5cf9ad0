//! What a person sees while memory is made present or scrubbed: one line, redrawn. Nothing when nobody looks.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use egm_device::ledger::Progress;

/// Often enough to look alive, seldom enough to cost nothing.
const REDRAW: Duration = Duration::from_millis(100);
const CELLS: u32 = 30;

/// A progress bar on standard error.
pub(super) struct Bar {
    what: String,
    start: Instant,
    /// When and up to where it was drawn; `None` when standard error is no terminal.
    drawn: Option<Mutex<(Instant, u64)>>,
}

impl Bar {
    /// A bar of `what`.
    pub(super) fn new(what: impl Into<String>) -> Self {
        let start = Instant::now();
        let drawn = io::stderr().is_terminal().then(|| Mutex::new((start, 0)));
        Self { what: what.into(), start, drawn }
    }

    /// `done` of `total` bytes are present. From any thread; one that finds another drawing goes on with its work,
    /// except at the end, which is always drawn.
    pub(super) fn told(&self, done: u64, total: u64) {
        let Some(drawn) = &self.drawn else { return };
        let locked = if done < total { drawn.try_lock().ok() } else { drawn.lock().ok() };
        let Some(mut drawn) = locked else { return };
        let now = Instant::now();
        if done > drawn.1 && (done >= total || now.duration_since(drawn.0) >= REDRAW) {
            *drawn = (now, done);
            let text = line(&self.what, done, total, now.duration_since(self.start));
            let _ = write!(io::stderr(), "\r{text}\x1b[K"); // ANSI: erase to the end of the line
        }
    }
}

/// One bar for each slice that is scrubbed, one line while the kernel opens a region.
#[derive(Default)]
pub(super) struct Bars(Mutex<Option<(String, Bar)>>);

impl Bars {
    /// What is done for slice `id`. From any thread.
    pub(super) fn told(&self, id: &str, step: Progress) {
        let Ok(mut current) = self.0.try_lock() else { return };
        match step {
            Progress::Opening(since) => {
                if io::stderr().is_terminal() {
                    let seconds = since.as_secs();
                    let _ = write!(io::stderr(), "\r{id}: the kernel opens the region, {seconds} s\x1b[K");
                }
            }
            Progress::Scrubbing { done, of } => {
                if current.as_ref().is_none_or(|(shown, _)| shown != id) {
                    *current = Some((id.to_owned(), Bar::new(format!("{id} scrubbed"))));
                }
                if let Some((_, bar)) = &*current {
                    bar.told(done, of);
                }
            }
        }
    }
}

/// Whatever is printed next, an error perhaps, begins on a line of its own.
impl Drop for Bar {
    fn drop(&mut self) {
        let drawn = self.drawn.as_ref().and_then(|drawn| drawn.lock().ok()).map_or(0, |drawn| drawn.1);
        if drawn > 0 {
            let _ = writeln!(io::stderr());
        }
    }
}

fn line(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let (seconds, done_gib, total_gib) = (elapsed.as_secs_f64().max(1e-3), gib(done), gib(total));
    let speed = done_gib / seconds;
    let left = if speed > 0.0 { (total_gib - done_gib).max(0.0) / speed } else { 0.0 };
    let is_full = |cell| f64::from(cell) * total_gib < done_gib * f64::from(CELLS);
    let bar: String = (0..CELLS).map(|cell| if is_full(cell) { '#' } else { '.' }).collect();
    format!("{what} [{bar}] {done_gib:.2} of {total_gib:.2} GiB, {speed:.1} GiB/s, {left:.0} s left")
}

/// For people: a `f64` holds every size to well below what two decimals show.
fn gib(bytes: u64) -> f64 {
    let mib = u32::try_from(bytes >> 20).unwrap_or(u32::MAX); // 4 PiB
    f64::from(mib) / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_much_how_fast_and_how_long_still() {
        let text = line("memory present", 16 << 30, 64 << 30, Duration::from_secs(4));
        assert_eq!(
            text,
            "memory present [########......................] 16.00 of 64.00 GiB, 4.0 GiB/s, 12 s left"
        );
    }

    #[test]
    fn the_ends_of_a_bar_are_its_ends() {
        let cells = |done, total| line("", done, total, Duration::ZERO).matches('#').count();
        assert_eq!((cells(0, 1 << 30), cells(1 << 20, 1 << 30), cells(1 << 30, 1 << 30)), (0, 1, 30));
        assert_eq!((cells(u64::MAX, u64::MAX), cells(0, 0)), (30, 0));
    }
}
