//! Processors and nodes.

use super::{PLAIN, Scenario};

/// More processors and nodes than the smallest case.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "smp",
    story: "four vCPUs in two sockets come up, on three ordinary nodes and an EGM node",
    config: "smp.json",
    ..PLAIN
};
