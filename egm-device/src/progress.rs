//! Progress while slices are scrubbed: one line each. Nothing where no terminal shows it.

use std::sync::Mutex;

use egm_report::progress::{Bar, Counts, ProgressBar, bar};

use crate::ledger::Progress;

/// Runs `long` with a progress bar for `id`.
pub(crate) fn with_bar<T>(id: &str, long: impl FnOnce(&(dyn Fn(Progress) + Sync)) -> T) -> T {
    let bars = Bars::default();
    long(&|step| bars.report(id, step))
}

/// One bar for each slice that is scrubbed, one line while the kernel opens a region.
#[derive(Debug, Default)]
pub struct Bars(Mutex<Option<ProgressLine>>);

/// The line that is shown.
#[derive(Debug)]
enum ProgressLine {
    Opening(ProgressBar),
    Scrubbing { id: String, bar: Bar },
}

impl Bars {
    /// Reports a step for slice `id`. From any thread.
    pub fn report(&self, id: &str, step: Progress) {
        let Ok(mut line) = self.0.try_lock() else { return };
        match (step, &*line) {
            (Progress::Opening(_), Some(ProgressLine::Opening(bar))) => bar.tick(),
            (Progress::Opening(_), _) => {
                let bar = bar(format!("{id}: the kernel opens the region"), Counts::Time);
                bar.tick();
                *line = Some(ProgressLine::Opening(bar));
            }
            (Progress::Scrubbing { done, of }, Some(ProgressLine::Scrubbing { id: shown, bar }))
                if shown == id =>
            {
                bar.report(done, of);
            }
            (Progress::Scrubbing { done, of }, _) => {
                let bar = Bar::new(format!("{id} scrubbed"));
                bar.report(done, of);
                *line = Some(ProgressLine::Scrubbing { id: id.to_owned(), bar });
            }
        }
    }
}
