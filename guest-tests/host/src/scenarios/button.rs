//! The operator presses the power button.

use super::{PLAIN, Scenario};
use crate::engine::judge::Expected;

/// The check prints this when it waits for the key.
pub(super) const LISTENS: &str = "egm-button";

/// The guest receives the key, and runs until it ends by itself.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "power-button",
    summary: "SIGPWR to the VMM is KEY_POWER for the guest, which decides itself when to power off",
    words: "egm.checks=power_button,cpus",
    expected: Expected::power_off(&["power_button", "cpus"]),
    press_on: Some(LISTENS),
    ..PLAIN
};
