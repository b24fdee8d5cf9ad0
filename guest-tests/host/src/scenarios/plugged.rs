//! Functions that come and go: see [`crate::assigned::plugged`].

use std::time::Duration;

use super::{PLAIN, Runs, Scenario};
use crate::engine::judge::Expected;

/// A drive in a spare port.
pub(super) const HOTPLUG: Scenario = Scenario {
    name: "vfio-hotplug",
    summary: "a drive is plugged into a spare port of a running guest, used, unplugged, free for others, and plugged in again",
    runs: Runs::Steps,
    config: "hotplug.json",
    assigned: &["0000:01:00.0"],
    words: "egm.checks=hotplug egm.arg.hotplug.rounds=2 lapic=notscdeadline",
    expected: Expected::power_off(&["hotplug"]),
    deadline: Duration::from_secs(480),
    ..PLAIN
};

/// A drive that the host takes back.
pub(super) const REQUEST: Scenario = Scenario {
    name: "vfio-request",
    summary: "the host unbinds an assigned drive: the guest lets it go and runs on, the host has it",
    config: "smoke.json",
    words: "egm.checks=hotplug lapic=notscdeadline",
    ..HOTPLUG
};

/// A drive that is pulled out. It runs after all other scenarios with that drive, because the drive stays away.
pub(super) const PULLED: Scenario = Scenario {
    name: "vfio-surprise",
    summary: "an assigned drive is pulled out of the host: the VMM reports it, the guest loses it and runs on",
    ..REQUEST
};

/// The same drive through iommufd, in a host of its own.
pub(super) const PULLED_IOMMUFD: Scenario = Scenario {
    name: "vfio-surprise-iommufd",
    summary: "the same through iommufd: what the kernel refuses of a drive that is gone does not end the machine",
    iommufd: true,
    long: true,
    ..PULLED
};
