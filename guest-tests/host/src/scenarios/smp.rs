//! Processors and nodes.

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::engine::judge::Expected;

/// The agent's checks, then the validations of `egm-guest validate` that apply to this guest.
const REQUIRED: &[&str] = &[
    "cpus",
    "clock",
    "memory_map",
    "numa",
    "acpi_tables",
    "hmat",
    "pci",
    "rng",
    "msix",
    "egm_pattern",
    "egm_bandwidth",
    "memory.pattern",
    "memory.bandwidth",
    "memory.latency",
    "memory.egm",
    "numa.placement",
    "numa.distances",
    "numa.hmat",
    "pci.bars",
];

/// More processors and nodes than the smallest case, and in addition to the checks a user's tool, which has no plan.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "smp",
    summary: "four vCPUs in two sockets come up, on three ordinary nodes and an EGM node; egm-guest validate finds nothing wrong",
    config: "smp.json",
    words: "egm.checks=cpus,clock,memory_map,numa,acpi_tables,hmat,pci,rng,msix,egm_pattern,egm_bandwidth \
            egm.validate=memory.pattern,memory.bandwidth,memory.latency,memory.egm,numa.placement,numa.distances,numa.hmat,pci.bars \
            egm.arg.size=1048576 egm.arg.memory.rounds=1",
    expected: Expected::power_off(REQUIRED),
    deadline: Duration::from_secs(300),
    ..PLAIN
};
