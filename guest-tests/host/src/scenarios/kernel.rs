//! Claims about the kernel of the host, without a guest.

use super::{PLAIN, Runs, Scenario};

/// On the newest kernel that the lab builds.
pub(super) const TESTS: Scenario = Scenario {
    name: "kernel-tests",
    summary: "tests of egm-device on the newest kernel: owners of memory, leases of files, pools in flight, a device per slice",
    runs: Runs::Steps,
    own_kernel: true,
    tests: true,
    long: true,
    ..PLAIN
};
