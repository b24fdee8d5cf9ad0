//! Two machines on one broker: see [`crate::slices::granted`].

use std::time::Duration;

use super::{PLAIN, Runs, Scenario, SliceTest};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "broker",
    summary: "two machines on one broker, none sees the other; one is killed, a third that waits gets its slice as zeros",
    runs: Runs::Steps,
    region: Some("mem"),
    slice_test: SliceTest::Granted,
    deadline: Duration::from_secs(600),
    long: true,
    ..PLAIN
};
