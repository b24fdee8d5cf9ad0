//! A guest that resets itself.

use std::time::Duration;

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

/// Check `first`, and then those of the demo's machine in one that goes on.
pub(super) const fn and_then_all(first: &'static str) -> [&'static str; 12] {
    [
        first,
        "cpus",
        "clock",
        "memory_map",
        "numa",
        "pci",
        "rng",
        "virtio_blk",
        "virtio_net",
        "vsock",
        "msix",
        "egm_pattern",
    ]
}

const RESTARTED: &[&str] = &and_then_all("restarts");

/// The machine of the demo: resets of its guest do not end it.
pub(super) const REBOOT: Scenario = Scenario {
    name: "reboot",
    summary: "a guest that resets itself twice starts again in the same VMM, with its devices as at the first start",
    config: "demo.json",
    reboots: true,
    words: "egm.checks=restarts,cpus,clock,memory_map,numa,pci,rng,virtio_blk,virtio_net,vsock,msix,egm_pattern",
    expected: Expected::power_off(RESTARTED),
    deadline: Duration::from_secs(300),
    long: true,
    ..PLAIN
};
