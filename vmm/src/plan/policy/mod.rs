//! Step 3: how host functions are assigned, and what the operator should know.
//!
//! | file | content |
//! |---|---|
//! | `assigned` | interface of the kernel, groups, memory of GPUs |
//! | `cliques` | which GPUs the guest's driver sees as peers |
//! | `unbound` | memory of any host node, in a machine with functions of known ones |

mod assigned;
mod cliques;
mod unbound;

use std::path::Path;

use crate::plan::demand::Demand;
use crate::plan::demand::backings::{Served, served};
use crate::plan::map::{Map, nodes};
use crate::plan::{FunctionRole, PassthroughPlan, PlanError};

/// Decisions that no address depends on.
pub(super) struct Policy {
    /// How host functions are opened; `None` without any.
    pub(super) passthrough: Option<PassthroughPlan>,
    /// Properties that the machine lacks because the host could not give its first choice.
    pub(super) notes: Vec<String>,
}

impl Policy {
    /// Decides how the host functions of `demand` are assigned, and adds that to the functions and nodes of `map`.
    pub(super) fn of(demand: &Demand<'_>, map: &mut Map) -> Result<Self, PlanError> {
        let mut decided = assigned::decide(demand)?;
        for function in &mut map.functions {
            if let FunctionRole::Endpoint { device, assigned } = &mut function.role {
                *assigned = decided.functions.remove(&device.id);
            }
        }
        map.numa.add_gpus(&map.functions);
        Ok(Self { passthrough: decided.passthrough, notes: notes(demand, map, decided.notes) })
    }
}

/// All notes for the operator; `assigned` are those on host functions.
fn notes(demand: &Demand<'_>, map: &Map, assigned: Vec<String>) -> Vec<String> {
    let mut notes: Vec<String> = demand.sources.iter().filter_map(|source| source.lost.clone()).collect();
    for more in [&map.lost_memory, &demand.small_pages, &demand.unpaired] {
        notes.extend(more.iter().cloned());
    }
    notes.extend(assigned);
    notes.extend(servers(demand));
    notes.extend(nodes::too_many(demand.spec.arch, &map.numa.nodes));
    notes.extend(map.not_free.iter().cloned());
    notes.extend(unbound::note(demand));
    notes
}

/// Notes on servers that the facts do not describe.
fn servers(demand: &Demand<'_>) -> Vec<String> {
    let known = |socket: &Path| demand.facts.servers.iter().any(|server| server.socket == socket);
    let unknown = served(demand.spec).filter(|server| !known(server.socket));
    let note = |server: Served<'_>| {
        format!(
            "device \"{}\": its BARs are not in this plan, and move what is placed after them: only its running server reports \
             their sizes; record them with: egm-vmm facts --server {}",
            server.device.id,
            server.socket.display()
        )
    };
    unknown.map(note).collect()
}
