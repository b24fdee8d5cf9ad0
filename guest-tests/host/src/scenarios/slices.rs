//! A slice of each kind of memory that the emulated host has: see [`crate::slices::owned`] for the checks of each.

use std::time::Duration;

use super::{PLAIN, Runs, Scenario, SliceTest};
use crate::engine::judge::Expected;

/// Every byte of a slice is written and read twice, under emulation.
const DEADLINE: Duration = Duration::from_secs(400);

/// As long for a boot where each base page is a fault of its own.
pub(super) const SMALL_PAGES: Duration = Duration::from_secs(600);

/// Memory above the kernel's limit `mem=`.
pub(super) const MEM: Scenario = Scenario {
    name: "slice-mem",
    summary: "a slice of memory that mem= hides: used, exclusive, scrubbed, returned",
    runs: Runs::Steps,
    region: Some("mem"),
    deadline: DEADLINE,
    ..PLAIN
};

/// Memory that `memmap=nn$ss` reserves.
pub(super) const MEMMAP: Scenario = Scenario {
    name: "slice-memmap",
    summary: "a slice of memory that memmap=nn$ss reserves, of machines in a sandbox: used, exclusive, scrubbed, returned",
    runs: Runs::Steps,
    region: Some("memmap"),
    strict: true,
    deadline: DEADLINE,
    ..PLAIN
};

/// Memory that `memmap=nn!ss` makes persistent, as device-DAX.
pub(super) const DEVDAX: Scenario = Scenario {
    name: "slice-devdax",
    summary: "a slice of a device-DAX device: used, exclusive, scrubbed, returned",
    runs: Runs::Steps,
    region: Some("dax0.0"),
    deadline: DEADLINE,
    ..PLAIN
};

/// A device-DAX region with a device for each slice.
pub(super) const DEVDAX_OWNERS: Scenario = Scenario {
    name: "slice-devdax-owners",
    summary: "slices of one device-DAX region have a device each: two users and a server reach their own alone, then all are removed",
    runs: Runs::Steps,
    region: Some("dax2"),
    deadline: DEADLINE,
    ..PLAIN
};

/// A guest on such a slice.
pub(super) const DEVDAX_OWNED: Scenario = Scenario {
    name: "slice-devdax-device",
    summary: "a slice with a device-DAX device of its own: used, exclusive, scrubbed, returned",
    region: Some("dax2"),
    long: true,
    ..DEVDAX
};

/// Files of a file system that maps persistent memory directly.
pub(super) const FSDAX: Scenario = Scenario {
    name: "slice-fsdax",
    summary: "a slice is a file of a DAX file system: used, exclusive, scrubbed, returned; two users reach their own alone",
    runs: Runs::Steps,
    region: Some("pmem"),
    slice_test: SliceTest::File,
    deadline: DEADLINE,
    ..PLAIN
};

/// Huge pages of node 0.
pub(super) const HUGETLB: Scenario = Scenario {
    name: "slice-hugetlb",
    summary: "a slice of a pool of huge pages: used, exclusive, scrubbed, returned",
    runs: Runs::Steps,
    region: Some("hugetlb"),
    deadline: DEADLINE,
    ..PLAIN
};

/// Memory of the machine's own process: see [`crate::slices::own_memory`].
pub(super) const MEMFD: Scenario = Scenario {
    name: "slice-memfd",
    summary: "a slice of the machine's own memfd: seen at the addresses of its page map, apart from another's, zero for each, gone with it",
    runs: Runs::Steps,
    region: Some("local"),
    slice_test: SliceTest::Own,
    deadline: DEADLINE,
    ..PLAIN
};

/// Memory of the machine's own VM: see [`crate::slices::own_memory`].
pub(super) const GUEST_MEMFD: Scenario = Scenario {
    name: "slice-guest-memfd",
    summary: "a slice of KVM's guest_memfd: the machine's own, zero for each, gone with it, memory of the host's kernel",
    runs: Runs::Steps,
    region: Some("guest-memfd"),
    slice_test: SliceTest::Own,
    own_kernel: true,
    long: true,
    deadline: SMALL_PAGES,
    ..PLAIN
};

/// Its function is the monitor's own in one guest, and a server's in another.
pub(super) const DEVICE: Scenario = Scenario {
    name: "egm-device",
    summary: "a slice as a PCI function: the monitor's own and that of egm-device serve are one and the same to guests",
    runs: Runs::Steps,
    region: Some("local"),
    slice_test: SliceTest::Device,
    words: "egm.checks=memory_map,numa,pci,egm_device,egm_commands egm.arg.egm_device.size=25165824 quiet",
    expected: Expected::power_off(&["memory_map", "numa", "pci", "egm_device", "egm_commands"]),
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// The same function over every kind of memory, in an emulated host that has guest_memfd.
pub(super) const DEVICE_KINDS: Scenario = Scenario {
    name: "egm-device-kinds",
    summary: "a slice as a PCI function of hidden RAM, device-DAX, huge pages, guest_memfd, and of a lease that a server has",
    region: None,
    own_kernel: true,
    long: true,
    words: "egm.checks=pci,egm_device egm.arg.egm_device.size=25165824 quiet",
    expected: Expected::power_off(&["pci", "egm_device"]),
    ..DEVICE
};
