//! Processors and nodes.

use std::time::Duration;

use super::{PLAIN, Scenario};
use crate::judge::Expected;

/// What `egm-guest validate` decides there, each by name: one that is waived says so, and is there all the same.
const VALIDATED: &[&str] = &[
    "cpus",
    "numa",
    "memory.pattern",
    "memory.bandwidth",
    "memory.latency",
    "memory.egm",
    "numa.placement",
    "numa.distances",
    "numa.hmat",
    "pci.bars",
];

/// More processors and nodes than the smallest case, and a person's tool beside the checks: it knows no plan.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "smp",
    story: "four vCPUs in two sockets come up, on three ordinary nodes and an EGM node; egm-guest validate finds nothing wrong",
    config: "smp.json",
    words: "egm.checks=all egm.validate=memory,numa,pci egm.arg.size=1048576 egm.arg.memory.rounds=1",
    expected: Expected { exit: 0, summary: true, checks: VALIDATED },
    deadline: Duration::from_secs(300),
    ..PLAIN
};
