//! Devices that come and go: see [`crate::assigned::plugged`], [`crate::assigned::plugged_virtio`] and
//! [`crate::slices::plugged`].

use std::time::Duration;

use super::{PLAIN, Runs, Scenario, SliceTest};
use crate::engine::judge::Expected;

/// A drive in a spare port.
pub(super) const HOTPLUG: Scenario = Scenario {
    name: "vfio-hotplug",
    summary: "a drive is plugged into a spare port of a running guest, used, unplugged, free for others, and plugged in again",
    runs: Runs::Steps,
    config: "hotplug.json",
    assigned: &["0000:01:00.0"],
    words: "egm.checks=hotplug egm.arg.hotplug.devices=nvme,nvme lapic=notscdeadline",
    expected: Expected::power_off(&["hotplug"]),
    deadline: Duration::from_secs(480),
    ..PLAIN
};

/// Virtio devices in spare ports, which need no function of the host.
pub(super) const VIRTIO: Scenario = Scenario {
    name: "virtio-hotplug",
    summary: "a disk is planned, plugged in, used, unplugged and plugged in again, then a tap; a disk in use is refused",
    assigned: &[],
    words: "egm.checks=hotplug egm.arg.hotplug.devices=disk,disk,net egm.arg.hotplug.text=egm-lab-put-this \
            egm.arg.hotplug.mac=52:54:00:65:67:70 lapic=notscdeadline",
    ..HOTPLUG
};

/// Slices in spare ports.
pub(super) const SLICE: Scenario = Scenario {
    name: "slice-hotplug",
    summary: "slices of hidden memory are plugged into a running guest as functions, used, unplugged, scrubbed and returned",
    assigned: &[],
    region: Some("memmap"),
    slice_test: SliceTest::Device,
    words: "egm.checks=hotplug egm.arg.hotplug.devices=slice,slice lapic=notscdeadline",
    ..HOTPLUG
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
