//! Guest RAM in hugetlb pages: see [`crate::slices::ram_pages`] for the checks.

use std::time::Duration;

use super::{GraceKernel, PLAIN, Runs, Scenario};
use crate::engine::judge::Expected;

pub(super) const HUGETLB: Scenario = Scenario {
    name: "hugetlb-ram",
    summary: "guest RAM in hugetlb pages of 2 MiB, then of 1 GiB: the plan, the host's pool and the machine's mappings agree",
    runs: Runs::Steps,
    gigantic: true,
    words: "egm.checks=cpus,memory_map quiet",
    expected: Expected::power_off(&["cpus", "memory_map"]),
    ..PLAIN
};

/// A Grace host's guest.
pub(super) const GRACE_HUGETLB: Scenario = Scenario {
    name: "grace-hugetlb-ram",
    config: "grace-lab-smoke.json",
    grace: true,
    grace_kernel: GraceKernel::Debian,
    long: true,
    deadline: Duration::from_secs(400),
    ..HUGETLB
};
