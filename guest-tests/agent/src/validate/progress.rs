//! A line on standard error that shows the progress of a run, for a person at a terminal; nothing without one.

use std::io::{self, Write};
use std::time::Duration;

use crate::output;

const CELLS: usize = 24;

#[derive(Debug)]
pub(super) struct Progress {
    total: usize,
    done: usize,
    /// Columns of the terminal, where there is one.
    columns: Option<usize>,
}

impl Progress {
    /// Of a run of `total` validations.
    pub(super) fn new(total: usize) -> Self {
        Self { total, done: 0, columns: output::terminal(&io::stderr()) }
    }

    /// The validation `name` runs since then.
    pub(super) fn told(&self, name: &str, since: Duration) {
        if let Some(columns) = self.columns {
            // A line that wraps could not be taken back.
            let line: String = line(self.done, self.total, name, since).chars().take(columns - 1).collect();
            // ANSI: to the line's begin, and erase to its end.
            let _ = write!(io::stderr(), "\r{line}\x1b[K");
        }
    }

    /// A validation ended.
    pub(super) const fn done(&mut self) {
        self.done += 1;
    }
}

/// Erases the line, so that the next print begins on a line of its own.
impl Drop for Progress {
    fn drop(&mut self) {
        if self.columns.is_some() && self.total > 0 {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(done: usize, total: usize, name: &str, since: Duration) -> String {
    let filled = (done * CELLS).checked_div(total).unwrap_or(0);
    let bar: String = (0..CELLS).map(|cell| if cell < filled { '#' } else { '.' }).collect();
    format!("[{bar}] {done} of {total}, {name}, {} s", since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_many_are_done_and_which_runs() {
        assert_eq!(
            line(3, 12, "memory.pattern", Duration::from_secs(5)),
            "[######..................] 3 of 12, memory.pattern, 5 s"
        );
        assert!(line(0, 0, "x", Duration::ZERO).starts_with("[......"));
    }
}
