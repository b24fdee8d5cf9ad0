//! Functions of the emulated host in a guest: see [`crate::assigned::function`] for the checks of each.

use std::time::Duration;

use super::slices::SMALL_PAGES;
use super::{PLAIN, Runs, Scenario, SliceTest};
use crate::engine::disk::Proof;
use crate::engine::judge::Expected;

/// The drive behind the first root port.
pub(super) const NVME: Scenario = Scenario {
    name: "vfio-nvme",
    summary: "an assigned NVMe drive: written, found in its image, survives the guest's reset, free afterwards",
    runs: Runs::Steps,
    assigned: &["0000:01:00.0"],
    words: "egm.checks=pci,nvme egm.arg.nvme.serial=egm0",
    expected: Expected::power_off(&["pci", "nvme"]),
    disk: Some(Proof::Signature),
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// The same drive with a guest that resets itself and does not end its machine.
pub(super) const REBOOT: Scenario = Scenario {
    name: "vfio-reboot",
    summary: "a guest with an assigned NVMe drive resets itself twice in place, and the drive works after each reset",
    reboots: true,
    words: "egm.checks=restarts,pci,nvme egm.arg.nvme.serial=egm0",
    expected: Expected::power_off(&["restarts", "pci", "nvme"]),
    disk: None,
    long: true,
    ..NVME
};

/// The same through iommufd. Under 7.3 as the emulated host an idle guest with the TSC-deadline timer sleeps for ever.
pub(super) const IOMMUFD: Scenario = Scenario {
    name: "vfio-nvme-iommufd",
    summary: "the same through iommufd: memory by file, BARs by dma-buf",
    words: "egm.checks=pci,nvme egm.arg.nvme.serial=egm0 lapic=notscdeadline",
    iommufd: true,
    long: true,
    ..NVME
};

/// The same drive with a guest that uses no message-signalled interrupts.
pub(super) const INTX: Scenario = Scenario {
    name: "vfio-intx",
    summary: "an assigned NVMe drive with interrupts by a line",
    words: "pci=nomsi egm.checks=pci,nvme egm.arg.nvme.serial=egm0 egm.arg.nvme.intx=1",
    ..NVME
};

/// The engine, a peer's memory, and hidden memory of the host.
pub(super) const DMA: Scenario = Scenario {
    name: "vfio-dma",
    summary: "an assigned DMA engine writes memory, a slice that the host's kernel has no pages of, and a peer's BAR",
    region: Some("mem"),
    assigned: &["0000:00:14.0", "0000:00:15.0"],
    words: "egm.checks=pci,edu egm.arg.edu.places=3",
    expected: Expected::power_off(&["pci", "edu"]),
    disk: None,
    ..NVME
};

/// The engine and a slice that is a file of the machine's own VM, which iommufd maps by address.
pub(super) const DMA_OWN: Scenario = Scenario {
    name: "vfio-dma-guest-memfd",
    summary: "the same engine through iommufd writes a slice of guest_memfd",
    region: Some("guest-memfd"),
    slice_test: SliceTest::Own,
    assigned: &["0000:00:14.0"],
    words: "egm.checks=pci,edu lapic=notscdeadline",
    iommufd: true,
    long: true,
    deadline: SMALL_PAGES,
    ..DMA
};

/// Both functions behind the switch.
pub(super) const SWITCH: Scenario = Scenario {
    name: "vfio-switch",
    summary: "two functions behind one switch of the host are behind one switch of the guest",
    assigned: &["0000:05:00.0", "0000:06:00.0"],
    words: "egm.checks=pci,nvme egm.arg.nvme.serial=egm1",
    disk: None,
    ..NVME
};

/// A hostile guest, with a drive, an engine and a memory of the host.
pub(super) const HOSTILE: Scenario = Scenario {
    name: "vfio-hostile",
    summary: "a minute of random writes to assigned functions harms neither VMM nor guest nor host",
    assigned: &["0000:01:00.0", "0000:00:14.0", "0000:00:15.0"],
    words: "egm.checks=fuzz egm.arg.fuzz.seconds=60 egm.arg.fuzz.passed=1",
    expected: Expected::power_off(&["fuzz"]),
    disk: None,
    long: true,
    ..NVME
};
