//! Many boots.

use super::{PLAIN, Runs, Scenario};
use crate::engine::judge::Expected;

/// Many boots, because the result of one may be luck.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "boots",
    summary: "sixteen boots in a row all reach their end",
    words: "egm.checks=cpus",
    expected: Expected::power_off(&["cpus"]),
    runs: Runs::Boots(16),
    long: true,
    ..PLAIN
};
