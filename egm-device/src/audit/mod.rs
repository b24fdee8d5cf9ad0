//! The audit log: one JSON line for each change of what a tenant holds.
//!
//! ```text
//! ledger, lease, broker ─► Log::write(Event) ─► line.rs ─┬─► file.rs     var/log/egm-device/audit.jsonl, rotated by size
//!                                                         ├─► file.rs     var/log/egm-device/findings.jsonl: findings again
//!                                   limit.rs (per user)  └─► journal.rs  run/systemd/journal/socket, where it exists
//! ```
//! Nothing waits for the log and nothing fails because of it: a line that cannot be written is counted, reported on standard
//! error once, and the count is part of the next line (`lost`).
#![forbid(unsafe_code)]

mod event;
mod file;
mod journal;
mod limit;
mod line;
pub mod time;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

pub use event::{Action, Actor, Event, Finding, Program, Refusal, RegionBytes};
pub use file::FILES;
pub use line::MAX_LINE;

use file::LogFile;
use journal::Journal;
use limit::Limits;

/// Files of the audit log.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The newest lines; rotated files have `.1`, `.2`, … appended.
    pub file: PathBuf,
    /// Findings about memory once more, where no number of grants and refusals rotates them out.
    pub findings: PathBuf,
    /// Socket of the system journal.
    pub journal: PathBuf,
}

impl Paths {
    /// Those of the host below `root`.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            file: root.join("var/log/egm-device/audit.jsonl"),
            findings: root.join("var/log/egm-device/findings.jsonl"),
            journal: root.join("run/systemd/journal/socket"),
        }
    }
}

/// A handle on the audit log: cheap to clone, for any number of threads and processes.
#[derive(Debug, Clone, Default)]
pub struct Log(Option<Arc<Sinks>>);

#[derive(Debug)]
struct Sinks {
    file: LogFile,
    findings: LogFile,
    journal: Journal,
    limits: Limits,
    /// Lines that neither the file nor the journal's failure may hide: reported with the next line of the file.
    lost: AtomicU64,
    /// Lines that a journal which exists did not take.
    unsent: AtomicU64,
}

impl Log {
    /// A log that drops every event.
    #[must_use]
    pub const fn none() -> Self {
        Self(None)
    }

    /// The log in `paths`. Nothing is opened before the first event.
    #[must_use]
    pub fn new(paths: Paths) -> Self {
        Self(Some(Arc::new(Sinks {
            file: LogFile::new(paths.file),
            findings: LogFile::new(paths.findings),
            journal: Journal::new(paths.journal),
            limits: Limits::default(),
            lost: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        })))
    }

    /// Writes `event` with the time of now. Lines beyond a user's allowance are counted instead: no user fills the log.
    pub fn write(&self, event: &Event) {
        let Some(sinks) = self
            .0
            .as_ref()
            .filter(|_| !(egm_address::fault!("audit-line-missing") && matches!(event, Event::Return(_))))
        else {
            return;
        };
        let size = line::encode(SystemTime::now(), event, 0, 0).len();
        let Some(suppressed) = sinks.limits.allow(event, size) else { return };
        sinks.write(event, suppressed);
    }
}

impl Sinks {
    fn write(&self, event: &Event, suppressed: u64) {
        let lost = self.lost.load(Ordering::Relaxed);
        let line = line::encode(SystemTime::now(), event, lost, suppressed);
        if self.append(&self.file, &line) {
            self.lost.fetch_sub(lost, Ordering::Relaxed);
        }
        if event.is_finding() {
            self.append(&self.findings, &line);
        }
        match self.journal.send(event, &line) {
            Ok(()) => self.unsent.store(0, Ordering::Relaxed),
            Err(error) => {
                if self.unsent.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::info!("cannot send the audit log to the system journal: {error}");
                }
            }
        }
    }

    /// Whether `line` is in `file` now; else it is counted as lost.
    fn append(&self, file: &LogFile, line: &[u8]) -> bool {
        let appended = file.append(line);
        if let Err(error) = &appended
            && self.lost.fetch_add(1, Ordering::Relaxed) == 0
        {
            tracing::info!("cannot write the audit log {}: {error}", file.path().display());
        }
        appended.is_ok()
    }
}

#[cfg(test)]
mod tests;
