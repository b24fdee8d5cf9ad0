//! The emulated Grace host: its machine and its device tree.

pub(crate) mod machine;
mod tree;

use crate::engine::scenario::Scenario;
use crate::images::debian::Architecture;
use crate::images::rdma_kit::Kit;
use crate::images::tools::Tools;

pub(crate) use machine::{Profile, l1, make_egm};
pub(crate) use tree::tree;

/// Whether this machine has the processors of a Grace host.
pub(crate) fn is_arm() -> bool {
    Architecture::of_this_machine() == Architecture::Arm64
}

/// The reason why `scenario` cannot run on a host of its processor, if any.
pub(crate) fn missing(scenario: &Scenario) -> Option<String> {
    match (scenario.grace, is_arm()) {
        (false, true) => Some("its guest is one for x86-64, and this machine is none".into()),
        (true, false) => {
            Tools::missing_for_grace().or_else(|| Kit::missing(Architecture::Arm64).filter(|_| scenario.rdma))
        }
        _ => None,
    }
}
