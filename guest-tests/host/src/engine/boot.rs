//! The result of one boot of a guest.

use crate::engine::judge::Collected;

/// Result of one boot.
#[derive(Debug)]
pub(crate) struct Boot {
    /// Its report and its end.
    pub(crate) collected: Collected,
    /// Milliseconds until the kernel started init.
    pub(crate) init: Option<u64>,
    /// Whether the VMM got SIGTERM.
    pub(crate) signalled: bool,
    /// Fault of the disk afterwards, if the scenario checks the disk and finds one.
    pub(crate) disk: Option<Option<String>>,
}

impl Boot {
    /// A boot that nothing stopped, without a check of its disk.
    pub(crate) fn of(collected: Collected, init: Option<u64>) -> Self {
        Self { collected, init, signalled: false, disk: None }
    }
}
