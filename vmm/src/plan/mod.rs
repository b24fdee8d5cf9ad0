//! From a specification and host facts to every address of the virtual machine, in three steps.
//!
//! [`plan`] is arithmetic: it opens nothing, queries nothing and depends only on its two arguments, so the plan of
//! a machine can be made, read and compared on any other. A step depends on those before it:
//!
//! ```text
//!  Spec ──┐   demand/          map/               policy/
//!         ├─► what the spec ─► addresses, nodes, ─► assigned functions, ─► Plan
//!  Facts ─┘   wants of         PCI tree,           cliques,
//!             this host        windows             notes
//! ```
//! `types`, `functions`, `error` and `rules` are the plan and the reasons why there is none; `render` and `nccl` write it for
//! people and for NCCL.

mod demand;
mod error;
mod functions;
mod map;
mod nccl;
mod policy;
mod render;
mod rules;
#[cfg(test)]
pub(crate) mod tests;
mod types;

pub(crate) use demand::backings::of_slice;
pub(crate) use demand::cpus::check_architecture;
pub use demand::devices::DeviceRegisters;
pub(crate) use demand::devices::slice_registers;
pub(crate) use demand::host_memory::scope;
pub(crate) use demand::pages::{make_private, may_mount};
pub(crate) use demand::regions::{huge_alignment, lost};
pub use error::PlanError;
pub use functions::*;
pub use map::intx::IntxLines;
pub(crate) use map::intx::RootPin;
pub use map::placement::plug;
pub use nccl::nccl;
pub use render::{Screen, View, html, json, text};
pub use rules::{AssignedRule, NoPlacement, PlacementRule};
pub use types::*;

use self::demand::Demand;
use self::map::Map;
use self::policy::Policy;
use crate::config::Spec;
use crate::facts::Facts;

/// Decides everything about the virtual machine that `spec` describes, on the host that `facts` describes.
///
/// # Errors
/// [`PlanError`] names what does not fit, by how much, and with
/// [`Report::help`](crate::error::Report::help) what to change.
pub fn plan(spec: &Spec, facts: &Facts) -> Result<Plan, PlanError> {
    let demand = Demand::of(spec, facts)?;
    let mut map = Map::of(&demand)?;
    let policy = Policy::of(&demand, &mut map)?;
    Ok(Plan {
        version: PLAN_VERSION,
        name: spec.name.clone(),
        description: spec.description.clone(),
        arch: spec.arch,
        boot: spec.boot.clone(),
        console: spec.console.clone(),
        on_reset: spec.on_reset,
        address_bits: facts.address_bits,
        vcpus: demand.vcpus,
        windows: map.windows,
        pci: map.functions,
        expanders: map.expanders,
        passthrough: policy.passthrough,
        nodes: map.numa.nodes,
        distances: map.numa.distances,
        backings: demand.backings,
        memory: map.memory,
        notes: policy.notes,
        lines: map.lines,
        ports: map.ports,
    })
}
