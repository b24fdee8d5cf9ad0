//! A guest that resets itself.

use super::{PLAIN, Scenario};
use crate::engine::judge::Expected;

/// A guest's reset ends the VMM: the VMM's parent decides whether to start it again.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "reset",
    summary: "a guest that resets itself ends its VMM with exit code 1",
    words: "egm.checks=cpus egm.exit=reset",
    expected: Expected::reset(&["cpus"]),
    ..PLAIN
};
