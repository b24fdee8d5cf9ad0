//! Functions of the emulated host in a guest: see [`crate::passed`] for what is shown of each.

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::judge::Expected;

/// The drive behind the first root port.
pub(super) const NVME: Scenario = Scenario {
    name: "vfio-nvme",
    story: "a passed NVMe drive: written, found in its image, survives the guest's reset, free afterwards",
    passed: &["0000:01:00.0"],
    words: "egm.checks=pci,nvme egm.arg.nvme.serial=egm0",
    expected: Expected { exit: 0, summary: true, checks: &["pci", "nvme"] },
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// The same through iommufd. Under 7.3 as the emulated host an idle guest with the TSC-deadline timer sleeps for ever.
pub(super) const IOMMUFD: Scenario = Scenario {
    name: "vfio-nvme-iommufd",
    story: "the same through iommufd: memory by file, BARs by dma-buf",
    words: "egm.checks=pci,nvme egm.arg.nvme.serial=egm0 lapic=notscdeadline",
    iommufd: true,
    long: true,
    ..NVME
};
