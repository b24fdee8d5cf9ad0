//! The result of one boot of a guest.

use crate::engine::judge::Collected;

#[derive(Debug)]
pub(crate) struct Boot {
    /// Its report and its end.
    pub(crate) collected: Collected,
    /// Milliseconds until the kernel started init.
    pub(crate) init: Option<u64>,
    /// Whether the VMM got SIGTERM.
    pub(crate) signalled: bool,
    /// Result of the disk's check, if the scenario has one: its fault, or `None`.
    pub(crate) disk: Option<Option<String>>,
}

impl Boot {
    /// A boot that nothing stopped, without a check of its disk.
    pub(crate) fn of(collected: Collected, init: Option<u64>) -> Self {
        Self { collected, init, signalled: false, disk: None }
    }
}
