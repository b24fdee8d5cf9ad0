//! The result of one boot of a guest, and the emulator's known faults in it.

use egm_guest::findings::{Check, Outcome};

use crate::judge::{Collected, case};
use crate::process::Ending;

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
    /// Number of starts of the guest.
    pub(crate) starts: u32,
    /// Its kernel reported a panic without a message on its console.
    pub(crate) silent_panic: bool,
    /// Its kernel reported a locked-up processor.
    pub(crate) locked_up: bool,
}

impl Boot {
    /// A boot with one start and this result.
    pub(crate) fn of(collected: Collected, init: Option<u64>) -> Self {
        Self {
            collected,
            init,
            signalled: false,
            disk: None,
            starts: 1,
            silent_panic: false,
            locked_up: false,
        }
    }

    /// The known fault of the emulator that happened, if any.
    pub(crate) fn emulator_did(&self) -> Option<&'static str> {
        let never_ended = self.locked_up && self.collected.ending == Ending::Deadline;
        let panicked = self.silent_panic.then_some("a panic without a word");
        panicked.or_else(|| never_ended.then_some("a locked processor until the deadline"))
    }

    /// The case of a restart for a fault of the emulator, if there was one.
    pub(crate) fn emulator_case(&self) -> Option<Check> {
        let reason = "a start of the guest ended in a panic without a word or with a locked processor: discarded-*.log";
        (self.starts > 1).then(|| restarted(reason))
    }
}

/// Prefix of the name of a restart's case.
pub(crate) const EMULATOR: &str = "emulator";

/// A restart for a known fault of the emulator: the earlier start decided nothing.
pub(crate) fn restarted(reason: &str) -> Check {
    Check { outcome: Outcome::Skipped, reason: reason.into(), ..case(EMULATOR, None, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot_of(ending: Ending) -> Boot {
        Boot::of(Collected { lines: Vec::new(), ending, millis: 1 }, Some(1))
    }

    #[test]
    fn a_locked_processor_is_the_emulators_only_where_the_guest_never_ended() {
        let boot = |ending, locked_up| Boot { locked_up, ..boot_of(ending) };
        assert!(boot(Ending::Deadline, true).emulator_did().is_some());
        assert_eq!(boot(Ending::Deadline, false).emulator_did(), None);
        assert_eq!(boot(Ending::Exit(0), true).emulator_did(), None);
        assert_eq!(boot(Ending::Exit(1), false).emulator_did(), None);
    }

    #[test]
    fn a_restart_is_a_case_of_its_own() {
        let boot = |starts| Boot { starts, ..boot_of(Ending::Exit(0)) };
        assert_eq!(boot(1).emulator_case(), None);
        assert_eq!(boot(2).emulator_case().unwrap().outcome, Outcome::Skipped);
    }
}
