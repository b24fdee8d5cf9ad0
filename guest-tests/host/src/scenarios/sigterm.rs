//! An operator who stops the VMM.

use super::{PLAIN, Scenario};
use crate::judge::Expected;

/// An operator stops the VMM while the guest hangs with its disk written.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "sigterm",
    story: "SIGTERM ends the VMM of a guest that does nothing, with exit code 0 and its disk flushed",
    config: "demo.json",
    words: "egm.checks=blk egm.exit=hang",
    expected: Expected { exit: 0, summary: true, checks: &["blk"] },
    terminate_on: Some("{\"egm-check\":\"summary\""),
    ..PLAIN
};
