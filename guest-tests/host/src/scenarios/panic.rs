//! The guest's kernel panics.

use super::{PLAIN, Scenario};
use crate::engine::judge::Expected;
use crate::runner::machine::PANICKED;

/// The pvpanic device notifies the VMM.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "panic",
    summary: "a panic of the guest's kernel ends its VMM with exit code 1",
    words: "egm.checks=cpus egm.exit=panic",
    expected: Expected { exit: 1, ..Expected::power_off(&["cpus"]) },
    prints: Some(PANICKED),
    ..PLAIN
};
