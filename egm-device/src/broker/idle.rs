//! The scrub of idle memory, as its thread and the event loop share it.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A scrub of idle memory: its region, and whether it must stop.
#[derive(Debug, Default)]
pub struct IdleScrub {
    stop: AtomicBool,
    region: Mutex<Option<String>>,
}

impl IdleScrub {
    /// Set once the scrub must stop.
    #[must_use]
    pub const fn stopped(&self) -> &AtomicBool {
        &self.stop
    }

    /// Begins with `region`; false once the scrub must stop.
    #[must_use]
    pub fn enter(&self, region: &str) -> bool {
        let mut current = self.current();
        let enters = !self.stop.load(Ordering::Relaxed);
        *current = enters.then(|| region.to_owned());
        enters
    }

    /// Ends with the region.
    pub fn exit(&self) {
        *self.current() = None;
    }

    /// Stops the scrub; returns whether it still has bytes of `region`.
    pub(super) fn stop_for(&self, region: &str) -> bool {
        let current = self.current();
        self.stop.store(true, Ordering::Relaxed);
        current.as_deref() == Some(region)
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn current(&self) -> MutexGuard<'_, Option<String>> {
        self.region.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_scrub_enters_no_other_region() {
        let scrub = IdleScrub::default();
        assert!(scrub.enter("a") && !scrub.stop_for("b") && scrub.stop_for("a"));
        scrub.exit();
        assert!(!scrub.enter("b") && !scrub.stop_for("b"));
    }
}
