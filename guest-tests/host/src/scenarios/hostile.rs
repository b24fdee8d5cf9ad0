//! A hostile guest.

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::engine::judge::Expected;

/// The guest must still be able to power off afterwards.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "hostile",
    summary: "a minute of random writes to configuration space, ports and MMIO harms neither VMM nor guest",
    config: "demo.json",
    words: "egm.checks=fuzz egm.arg.fuzz.seconds=60",
    expected: Expected::power_off(&["fuzz"]),
    deadline: Duration::from_secs(300),
    ..PLAIN
};
