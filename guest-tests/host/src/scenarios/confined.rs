//! Machines of an unprivileged user ([`crate::assigned::confined`]), and pins that outlive a machine ([`crate::assigned::dma_pin`]).

use std::time::Duration;

use super::{PLAIN, Runs, Scenario, grace};
use crate::engine::judge::Expected;

/// A slice of `/dev/mem`, and a drive that the host takes back.
pub(super) const MEM: Scenario = Scenario {
    name: "user-slice",
    summary: "a machine of an unprivileged user has hidden memory and a drive, and no descriptor of the memory; its keeper scrubs",
    runs: Runs::Steps,
    region: Some("mem"),
    assigned: &["0000:01:00.0"],
    words: "egm.checks=numa,egm_pattern,hotplug lapic=notscdeadline",
    expected: Expected::power_off(&["numa", "egm_pattern", "hotplug"]),
    deadline: Duration::from_secs(480),
    ..PLAIN
};

/// VFIO objects that another process keeps.
pub(super) const PIN: Scenario = Scenario {
    name: "vfio-dma-pin",
    summary: "a machine dies while another process keeps its VFIO group or device: its slice is quarantined until that ends",
    runs: Runs::Steps,
    assigned: &["0000:01:00.0"],
    deadline: Duration::from_secs(120),
    ..PLAIN
};

/// The same with the objects of iommufd, which Debian's kernel lacks.
pub(super) const PIN_IOMMUFD: Scenario = Scenario {
    name: "vfio-dma-pin-iommufd",
    summary: "a machine dies while another process keeps its VFIO device or iommufd, opened through iommufd: its slice is quarantined until that ends",
    iommufd: true,
    long: true,
    ..PIN
};

/// A slice of `/dev/egm4`, and a drive.
pub(super) const GRACE_EGM: Scenario = Scenario {
    name: "grace-user-slice",
    summary: "a machine of an unprivileged user has a slice of /dev/egm4 and a drive, and no descriptor of it; its keeper scrubs",
    runs: Runs::Steps,
    region: Some("egm4"),
    assigned: &["0000:01:00.0"],
    words: "egm.checks=numa,egm_pattern,nvme egm.arg.nvme.serial=egm0 quiet",
    expected: Expected::power_off(&["numa", "egm_pattern", "nvme"]),
    ..grace::GRACE
};
