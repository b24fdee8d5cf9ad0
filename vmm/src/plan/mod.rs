//! From a specification and host facts to every address of the virtual machine.
//!
//! [`plan`] is arithmetic: it opens nothing, queries nothing and depends only on its two arguments, so the plan of
//! a machine can be made, read and compared on any other. Each file decides one thing:
//!
//! ```text
//!  Spec ──┬─► cpus      vCPU ids, topology, pinning
//!  Facts ─┤   trust     whether a GPU would reach another trust domain's memory
//!         │   regions   which region of the host an EGM slice comes from, and where in it
//!         │   space     which guest physical addresses may be used at all
//!         │   memory    RAM and EGM slices in that space, and the memory behind them
//!         │   pages     host pages behind ordinary memory, and why not larger ones
//!         │   retired   slices without retired pages
//!         │   pci       what devices need of PCI, windows
//!         │   fixed     BARs at addresses that the configuration fixes
//!         │   data_direct   pairs of functions, and GPU BARs that they address
//!         │   near      guest nodes that host functions are near to
//!         │   tree      expanders, root ports, switches, bus numbers
//!         │   blocks    BARs, and devices, as one range for a bridge
//!         │   place     those ranges in the windows
//!         │   functions PCI functions of the tree, with bus numbers and windows
//!         │   plug      BARs of what is plugged in later
//!         │   passed    host functions: interface of the kernel, groups
//!         │   served    vfio-user servers: what is known of them, memory shared with them
//!         │   cliques   which GPUs the guest's driver sees as peers
//!         │   nodes     NUMA nodes, distances
//!         │   host_memory   whether the host has the memory, and free
//!         │   unbound   memory of any host node, in a machine with functions of known ones
//!         └─► host      does the host have what was planned
//! ```

mod backing;
mod bits;
mod blocks;
mod cliques;
mod cpus;
mod data_direct;
mod error;
mod fixed;
mod functions;
mod host;
mod host_memory;
mod intx;
mod memory;
mod nccl;
mod near;
mod no_place;
mod nodes;
mod pages;
mod passed;
mod passed_plan;
mod passed_rule;
mod pci;
mod place;
mod plug;
mod regions;
mod render;
mod retired;
mod served;
mod space;
#[cfg(test)]
pub(crate) mod tests;
mod tree;
mod trust;
mod types;
mod unbound;
mod units;
mod wanted;

pub use backing::{Allocation, BackingPlan, HostPages, MemoryKind, MemoryPlan};
pub use bits::AddressBits;
pub use error::PlanError;
pub use intx::{IntxLines, RootPin};
pub use nccl::nccl;
pub use no_place::NoPlace;
pub(crate) use pages::may_mount;
pub use passed_plan::*;
pub use passed_rule::{PassedRule, PlaceRule};
pub use pci::VIRTIO_BAR_SIZE;
pub use plug::plug;
pub(crate) use regions::lost;
pub use render::{Colour, View, html, json, text};
pub use types::*;
pub(crate) use units::huge_alignment;

use crate::arch::layout_of;
use crate::config::Spec;
use crate::facts::Facts;

/// Decides everything about the virtual machine that `spec` describes, on the host that `facts` describes.
///
/// # Errors
/// [`PlanError`] names what does not fit, by how much, and with
/// [`Report::help`](crate::error::Report::help) what to change.
pub fn plan(spec: &Spec, facts: &Facts) -> Result<Plan, PlanError> {
    let layout = layout_of(spec.arch);
    host::check_target(spec, facts)?;
    let vcpus = cpus::plan(spec, layout)?;
    host::check_cpus(&vcpus, facts)?;
    trust::check_gpus(spec, facts)?;
    let sources = regions::choose(spec, facts)?;
    let mut wanted = pci::wanted(spec, facts, &sources)?;
    let alone = data_direct::decide(facts, &mut wanted)?;
    let mut space = space::Space::new(spec, facts, layout)?;
    let (mut backings, memory, coarse) = memory::plan(spec, &sources, &mut space)?;
    host::check_nodes(&backings, facts)?;
    let not_free = host_memory::check(&backings, facts)?;
    let small = pages::decide(spec, facts, &mut backings);
    served::check_memory(spec, facts, &backings)?;
    let (mut nodes, mut distances) = (nodes::plan(spec, &memory), nodes::distances(spec));
    let tree = tree::tree(spec, facts, &wanted, nodes.first().map_or(0, |first| first.id))?;
    let (low, high) = (place::Blocks::new(&wanted, &tree, false)?, place::Blocks::new(&wanted, &tree, true)?);
    let windows = pci::windows(spec, &high, tree.buses(), &mut space)?;
    let low = place::place(&low, Some(windows.memory32), &space)?;
    let high = place::place(&high, windows.memory64, &space)?;
    let decided = passed::decide(spec, facts, &wanted, &backings)?;
    let (pci, expanders) = functions::functions(&wanted, &tree, (&low, &high), &decided.functions)?;
    nodes::add_gpus(&mut nodes, &mut distances, &pci);
    let own = layout.lines.iter().map(|&(owner, gsi)| LinePlan { gsi, owner: owner.to_owned() });
    let lines = own.chain(intx::lines(&pci, layout.intx)).collect();
    let lost = sources.into_iter().filter_map(|source| source.lost);
    let many = nodes::too_many(spec.arch, &nodes);
    let unbound = unbound::note(facts, &wanted, &backings);
    Ok(Plan {
        version: PLAN_VERSION,
        name: spec.name.clone(),
        description: spec.description.clone(),
        arch: spec.arch,
        boot: spec.boot.clone(),
        console: spec.console.clone(),
        address_bits: facts.address_bits,
        vcpus,
        windows: space.windows(&windows),
        pci,
        expanders,
        smmus: Vec::new(),
        passthrough: decided.passthrough,
        nodes,
        distances,
        backings,
        memory,
        notes: lost
            .chain(coarse)
            .chain(small)
            .chain(alone)
            .chain(decided.notes)
            .chain(served::notes(spec, facts))
            .chain(many)
            .chain(not_free)
            .chain(unbound)
            .collect(),
        lines,
        ports: layout
            .ports
            .iter()
            .map(|&(owner, first, count)| PortPlan { first, count, owner: owner.to_owned() })
            .collect(),
    })
}
