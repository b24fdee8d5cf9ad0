//! The first machine.

use super::{PLAIN, Scenario};
use crate::disk::Proof;

/// What the README's first command boots.
pub(super) const SCENARIO: Scenario = Scenario {
    name: "demo",
    story: "a guest with an EGM node, a disk, a network, a socket device and an entropy source holds its VMM to its plan",
    config: "demo.json",
    disk: Some(Proof::Signature),
    ..PLAIN
};
