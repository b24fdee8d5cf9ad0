//! Progress while slices are scrubbed: one line each. Nothing where no terminal shows it.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;

use egm_report::progress::Bar;

use crate::ledger::Progress;

/// Runs `long` with a progress bar for `id`.
pub(crate) fn with_bar<T>(id: &str, long: impl FnOnce(&(dyn Fn(Progress) + Sync)) -> T) -> T {
    let bars = Bars::default();
    long(&|step| bars.report(id, step))
}

/// One bar for each slice that is scrubbed, one line while the kernel opens a region.
#[derive(Debug, Default)]
pub struct Bars(Mutex<Option<(String, Bar)>>);

impl Bars {
    /// Reports a step for slice `id`. From any thread.
    pub fn report(&self, id: &str, step: Progress) {
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
