//! A line on standard error that shows the progress of a run, for a person at a terminal; nothing without one.

use egm_report::progress::{Counts, ProgressBar, bar};

#[derive(Debug)]
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Of a run of `total` validations.
    pub(super) fn new(total: usize) -> Self {
        Self(bar("", Counts::Steps(u64::try_from(total).unwrap_or(u64::MAX))))
    }

    /// The validation `name` runs.
    pub(super) fn runs(&self, name: &str) {
        self.0.set_message(name.to_owned());
    }

    pub(super) fn done(&self) {
        self.0.inc(1);
    }
}

/// Erases the line, so that the next print begins on a line of its own.
impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
