//! A page of a slice that goes bad: see [`crate::bad_page`].

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::judge::Expected;

const DEADLINE: Duration = Duration::from_secs(400);

/// Last of the stories of this region: the page stays retired.
pub(super) const FOUND: Scenario = Scenario {
    name: "poison",
    story: "a page of a slice goes bad: told, survived, retired, a hole of the next guest",
    region: Some("dax0.0"),
    bad_page: true,
    deadline: DEADLINE,
    ..PLAIN
};

/// The agent is the guest's init, so its end is a panic. Pages of 4 KiB: a bad huge page takes data of the guest's kernel along.
pub(super) const READ: Scenario = Scenario {
    name: "poison-read",
    story: "a guest reads a page that went bad: it gets a machine check, and the machine ends in good order",
    region: Some("local"),
    expected: Expected { exit: 1, summary: false, checks: &[] },
    bad_page: true,
    deadline: DEADLINE,
    ..PLAIN
};
