//! A page of a slice that goes bad: see [`crate::slices::bad_page`].

use std::time::Duration;

use super::{PLAIN, Runs, Scenario, SliceTest};

const DEADLINE: Duration = Duration::from_secs(400);

/// The last scenario of this region: the page stays retired.
pub(super) const FOUND: Scenario = Scenario {
    name: "poison",
    summary: "a page of a slice goes bad: reported, survived, retired, a hole of the next guest",
    runs: Runs::Steps,
    region: Some("dax0.0"),
    slice_test: SliceTest::BadPage,
    deadline: DEADLINE,
    ..PLAIN
};

/// Pages of 4 KiB: a bad huge page would also destroy data of the guest's kernel.
pub(super) const READ: Scenario = Scenario {
    name: "poison-read",
    summary: "a guest reads a page that went bad: it gets a machine check, ends the reading program, and lives",
    runs: Runs::Steps,
    region: Some("local"),
    slice_test: SliceTest::BadPage,
    deadline: DEADLINE,
    ..PLAIN
};
