//! The first machine.

use super::{PLAIN, Scenario};
use crate::engine::disk::Proof;
use crate::engine::judge::Expected;

/// The machine of the README's first command.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "demo",
    summary: "a guest with an EGM node, a disk, a network, a socket device and an entropy source holds its VMM to its plan",
    config: "demo.json",
    words: "egm.checks=cpus,clock,memory_map,numa,acpi_tables,hmat,pci,rng,virtio_blk,virtio_net,vsock,msix,egm_pattern,\
            egm_bandwidth",
    expected: Expected::power_off(&[
        "cpus",
        "clock",
        "memory_map",
        "numa",
        "acpi_tables",
        "hmat",
        "pci",
        "rng",
        "virtio_blk",
        "virtio_net",
        "vsock",
        "msix",
        "egm_pattern",
        "egm_bandwidth",
    ]),
    disk: Some(Proof::Signature),
    ..PLAIN
};
