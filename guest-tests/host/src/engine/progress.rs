//! Progress display of long work: a moving line on a terminal, one plain line elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use egm_report::progress::{Counts, ProgressBar, bar};

/// Prefix of every plain line; the lab forwards only such lines from the emulated host's console.
pub(crate) const PREFIX: &str = "egm-lab: ";

/// A piece of work that takes seconds or more.
#[derive(Debug)]
pub(crate) struct Stage {
    what: String,
    begun: Instant,
    bar: ProgressBar,
}

impl Stage {
    /// Work of unknown length.
    pub(crate) fn begin(what: &str) -> Self {
        Self::with(what, None)
    }

    /// Work of about `total` steps.
    pub(crate) fn counted(what: &str, total: u64) -> Self {
        Self::with(what, Some(total))
    }

    fn with(what: &str, total: Option<u64>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        if !terminal {
            eprintln!("{PREFIX}{what}");
        }
        let bar = bar(what, total.map_or(Counts::Time, Counts::Steps));
        if terminal {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self { what: what.to_owned(), begun: Instant::now(), bar }
    }

    /// Counts one step of the total as done.
    pub(crate) fn tick(&self) {
        // The total is an estimate: the bar waits just below its end.
        if self.bar.length().is_none_or(|length| self.bar.position() + 1 < length) {
            self.bar.inc(1);
        }
    }

    /// Prints a line above the moving one.
    pub(crate) fn print_line(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{PREFIX}{text}"));
    }

    /// Ends the work; reports that on a terminal only.
    pub(crate) fn end(self) {
        if std::io::stderr().is_terminal() {
            let what = self.what.clone();
            self.result(&what);
        }
    }

    /// Ends the work with this result.
    pub(crate) fn result(self, text: &str) {
        self.bar.finish_and_clear();
        eprintln!("{PREFIX}{text} ({:.1} s)", self.begun.elapsed().as_secs_f64());
    }

    /// Prints a plain line that belongs to no stage.
    pub(crate) fn note(text: &str) {
        eprintln!("{PREFIX}{text}");
    }
}
