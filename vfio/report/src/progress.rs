//! Progress of long work: one line on standard error, in one style for all programs. Nothing where no terminal shows it.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::show::size;

pub use indicatif::ProgressBar;

/// What a bar counts.
#[derive(Debug, Clone, Copy)]
pub enum Counts {
    /// Bytes, with their speed and the time left.
    Bytes,
    /// Steps, this many in all.
    Steps(u64),
    /// Nothing but the time.
    Time,
}

impl Counts {
    const fn template(self) -> &'static str {
        match self {
            Self::Bytes => "{msg} [{bar:30}] {done} of {total}, {speed}, {eta} left",
            Self::Steps(_) => "{msg} [{bar:30}] {pos} of {len}, {elapsed}",
            Self::Time => "{msg}, {elapsed}",
        }
    }

    fn style(self) -> Option<ProgressStyle> {
        let style = ProgressStyle::with_template(self.template()).ok()?;
        let style = style.with_key("done", write_done).with_key("total", write_total);
        Some(style.with_key("speed", write_speed).progress_chars("##."))
    }
}

/// A line about `what`, which is drawn when it changes.
#[must_use]
pub fn bar(what: impl Into<String>, counts: Counts) -> ProgressBar {
    let length = match counts {
        Counts::Bytes => Some(0),
        Counts::Steps(total) => Some(total),
        Counts::Time => None,
    };
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    if let Some(style) = counts.style() {
        bar.set_style(style);
    }
    bar.with_message(what.into())
}

fn write_done(state: &ProgressState, out: &mut dyn fmt::Write) {
    let _ = write!(out, "{}", size(state.pos())); // a String takes everything
}

fn write_total(state: &ProgressState, out: &mut dyn fmt::Write) {
    let _ = write!(out, "{}", size(state.len().unwrap_or(0)));
}

fn write_speed(state: &ProgressState, out: &mut dyn fmt::Write) {
    let _ = write!(out, "{:.1} GiB/s", state.per_sec() / GIB);
}

const GIB: f64 = 1_073_741_824.0;

/// A bar of bytes that leaves a line with the result.
#[derive(Debug)]
pub struct Bar {
    what: String,
    /// `None` when standard error is no terminal.
    shown: Option<ProgressBar>,
    done: AtomicU64,
    total: AtomicU64,
}

impl Bar {
    /// A bar of `what`.
    #[must_use]
    pub fn new(what: impl Into<String>) -> Self {
        let what = what.into();
        let shown = bar(what.clone(), Counts::Bytes);
        let shown = (!shown.is_hidden()).then_some(shown);
        Self { what, shown, done: AtomicU64::new(0), total: AtomicU64::new(0) }
    }

    /// `done` of `total` bytes are present. From any thread, and without a lock unless the line is due to be drawn. Threads
    /// report out of order: an older report is ignored.
    pub fn report(&self, done: u64, total: u64) {
        let Some(shown) = &self.shown else { return };
        if self.total.swap(total, Ordering::Relaxed) != total {
            shown.set_length(total);
        }
        if done > self.done.fetch_max(done, Ordering::Relaxed) {
            shown.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        let (done, total) = (*self.done.get_mut(), *self.total.get_mut());
        let Some(shown) = self.shown.as_ref().filter(|_| done > 0) else { return };
        let seconds = shown.elapsed().as_secs_f64();
        shown.finish_and_clear();
        let (what, done, total) = (&self.what, size(done), size(total));
        // Standard error may be closed: then the line is lost, and nothing else.
        let _ = writeln!(io::stderr(), "{what}: {done} of {total} in {seconds:.1} s");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_style_is_valid() {
        for counts in [Counts::Bytes, Counts::Steps(3), Counts::Time] {
            assert!(counts.style().is_some(), "{counts:?}");
        }
    }
}
