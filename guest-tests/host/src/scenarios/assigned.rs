//! Functions of the emulated host in guests, with steps of their own.

use std::time::Duration;

use super::{PLAIN, Runs, Scenario};
use crate::engine::judge::Expected;

/// The network card behind the second root port.
pub(super) const NET: Scenario = Scenario {
    name: "vfio-net",
    summary: "an assigned network card: bytes go to the host's own card and back, in two guests that reset themselves",
    runs: Runs::Steps,
    assigned: &["0000:02:00.0"],
    generic: true,
    words: "egm.checks=pci,passed_net egm.arg.net.mac=52:54:00:e9:00:02 egm.arg.net.peer=192.168.101.1 \
            egm.arg.net.addr=192.168.101.2/24 egm.exit=reset lapic=notscdeadline quiet",
    expected: Expected::reset(&["pci", "passed_net"]),
    deadline: Duration::from_secs(420),
    ..PLAIN
};

/// The engine with slices of all kinds but the one of [`super::vfio::DMA`].
pub(super) const DMA_KINDS: Scenario = Scenario {
    name: "vfio-dma-kinds",
    summary: "an assigned DMA engine writes slices of every kind of memory, and a peer's BAR",
    runs: Runs::Steps,
    assigned: &["0000:00:14.0", "0000:00:15.0"],
    words: "egm.checks=pci,edu egm.arg.edu.places=3 lapic=notscdeadline",
    expected: Expected::power_off(&["pci", "edu"]),
    deadline: Duration::from_secs(600),
    long: true,
    ..PLAIN
};

/// The same where the kernel pins pages, and takes files and dma-bufs.
pub(super) const DMA_IOMMUFD: Scenario = Scenario {
    name: "vfio-dma-iommufd",
    summary: "the same through iommufd, for every kind of memory that has pages",
    iommufd: true,
    ..DMA_KINDS
};

/// The engine writes to memory that it must not reach.
pub(super) const FAULT: Scenario = Scenario {
    name: "vfio-fault",
    summary: "a device that writes outside of its guest is refused by the IOMMU, and the check for that sees it",
    runs: Runs::Steps,
    assigned: &["0000:00:14.0"],
    deadline: Duration::from_secs(120),
    ..PLAIN
};

/// A card with an injected error in the host's kernel.
pub(super) const ERROR: Scenario = Scenario {
    name: "vfio-error",
    summary: "a function reports an error that it cannot correct: the guest loses it and goes on, the next machine has it",
    runs: Runs::Steps,
    assigned: &["0000:02:00.0"],
    words: "egm.checks=pci,function_lost quiet",
    expected: Expected::power_off(&["pci", "function_lost"]),
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// A drive with every kind of misconfiguration.
pub(super) const REFUSED: Scenario = Scenario {
    name: "vfio-refused",
    summary: "what can be wrong with a function and its host is named with its remedy, and nothing is held afterwards",
    runs: Runs::Steps,
    assigned: &["0000:01:00.0"],
    deadline: Duration::from_secs(120),
    ..PLAIN
};

/// Two cards that are reset alone, by different methods, two that need their bus, and a memory that cannot be reset.
pub(super) const RESET: Scenario = Scenario {
    name: "vfio-hot-reset",
    summary: "state left in a function is gone when a guest gets it, by its own reset or its bus', or the VMM reports that it is not",
    runs: Runs::Steps,
    assigned: &["0000:02:00.0", "0000:06:00.0", "0000:07:00.0", "0000:07:00.1", "0000:00:15.0"],
    deadline: Duration::from_secs(120),
    ..PLAIN
};

/// A drive in many machines.
pub(super) const ROUNDS: Scenario = Scenario {
    name: "vfio-rounds",
    summary: "110 machines in a row with one assigned function, powered off, terminated and killed in turn, leave nothing behind",
    runs: Runs::Steps,
    assigned: &["0000:01:00.0"],
    deadline: Duration::from_secs(120),
    long: true,
    ..PLAIN
};

/// The two that are in one group.
pub(super) const PAIR: Scenario = Scenario {
    name: "vfio-pair",
    summary: "two functions of one group: refused by name while the host uses one of them, then a guest has both",
    runs: Runs::Steps,
    assigned: &["0000:07:00.0", "0000:07:00.1"],
    words: "egm.checks=pci",
    expected: Expected::power_off(&["pci"]),
    deadline: Duration::from_secs(300),
    ..PLAIN
};

/// The other kind of card, behind the switch.
pub(super) const SWITCHED: Scenario = Scenario {
    name: "vfio-net-switch",
    summary: "the same with a card of another kind behind a switch",
    assigned: &["0000:06:00.0"],
    words: "egm.checks=pci,passed_net egm.arg.net.mac=52:54:00:e9:00:06 egm.arg.net.peer=192.168.101.1 \
            egm.arg.net.addr=192.168.101.3/24 egm.exit=reset lapic=notscdeadline quiet",
    long: true,
    ..NET
};

/// A card and a drive that the guest misuses, and the drive behind the switch that it leaves alone.
pub(super) const MOVES: Scenario = Scenario {
    name: "vfio-moves",
    summary: "a guest resets assigned functions and moves their BARs over memory while a drive works, and the next drives them",
    assigned: &["0000:01:00.0", "0000:02:00.0", "0000:05:00.0"],
    vcpus: Some(2),
    words: "egm.checks=passed_fuzz egm.arg.fuzz.seconds=30 egm.arg.fuzz.disk=egm1 lapic=notscdeadline quiet",
    expected: Expected::power_off(&["passed_fuzz"]),
    deadline: Duration::from_secs(300),
    ..NET
};
