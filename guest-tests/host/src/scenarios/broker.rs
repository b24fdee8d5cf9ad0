//! Two machines on one broker: see [`crate::lent`].

use std::time::Duration;

use super::{PLAIN, Scenario, Tale};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "broker",
    story: "two machines on one broker, none sees the other; one is killed, a third that waits gets its slice as zeros",
    region: Some("mem"),
    tale: Tale::Lent,
    deadline: Duration::from_secs(600),
    long: true,
    ..PLAIN
};
