//! The operator stops the VMM.

use super::{PLAIN, Scenario};
use crate::engine::disk::Proof;
use crate::engine::judge::Expected;

/// The guest announces each block that it has flushed; the last one must be in the image.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "sigterm",
    summary: "SIGTERM while the guest writes ends the VMM with exit code 0 and everything flushed on the disk",
    config: "demo.json",
    words: "egm.checks=disk_busy egm.arg.busy.seconds=0",
    expected: Expected { exit: 0, summary: false, checks: &[] },
    terminate_on: Some("egm-busy 50"),
    disk: Some(Proof::LastFlushed),
    ..PLAIN
};
