//! A whole distribution.

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::engine::judge::Expected;

/// This guest has no agent: Debian's own init starts the unit that reports.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "debian-root",
    summary: "Debian on a virtio disk reaches multi-user with its network, and powers off",
    config: "demo.json",
    words: "quiet systemd.show_status=no",
    expected: Expected::power_off(&["multi-user", "network"]),
    debian: true,
    deadline: Duration::from_secs(900),
    long: true,
    ..PLAIN
};
