//! Note on memory that may come from any host node, in a machine with functions of known host nodes.

use std::collections::BTreeMap;

use egm_report::show::first_of;

use crate::facts::Facts;
use crate::plan::BackingPlan;
use crate::plan::demand::Demand;
use crate::plan::demand::devices::DeviceDemand;

/// The note; `None` on a host of one node, and without such memory or functions.
pub(super) fn note(demand: &Demand<'_>) -> Option<String> {
    let facts = demand.facts;
    let unbound: Vec<&str> =
        demand.backings.iter().filter(|b| is_unbound(b)).map(|b| b.id.as_str()).collect();
    let functions = functions(facts, &demand.devices);
    if facts.nodes.len() < 2 || unbound.is_empty() || functions.is_empty() {
        return None;
    }
    let keys = match (has(&unbound, "node"), has(&unbound, "egm")) {
        (true, true) => "\"memory.nodes\" and \"egm\"",
        (false, true) => "\"egm\"",
        _ => "\"memory.nodes\"",
    };
    let mut known = functions.keys();
    let remedy = match (known.next(), known.next()) {
        (Some(node), None) => format!("set \"host_nodes\": \"{node}\" in {keys}"),
        _ => format!("set \"host_nodes\" in {keys}, with a guest node for each host node"),
    };
    let at: Vec<String> = functions.iter().map(|(node, ids)| at_node(*node, ids)).collect();
    let memory = first_of(unbound.iter().map(|id| (*id).to_owned()));
    Some(format!("memory of {memory} may come from any host node, and {}: {remedy}", at.join(" and ")))
}

/// Whether the host chooses the node of each page.
fn is_unbound(backing: &BackingPlan) -> bool {
    backing.region.is_none() && !backing.guest_memfd && backing.host_nodes.is_none()
}

fn has(ids: &[&str], start: &str) -> bool {
    ids.iter().any(|id| id.starts_with(start))
}

/// Ids of the devices that are host functions, by host node.
fn functions<'a>(facts: &Facts, devices: &'a [DeviceDemand<'_>]) -> BTreeMap<u32, Vec<&'a str>> {
    let mut functions: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for one in devices {
        let Some(node) = one.host.and_then(|host| host.numa_node) else { continue };
        if facts.nodes.iter().any(|known| known.id == node) {
            functions.entry(node).or_default().push(&one.device.id);
        }
    }
    functions
}

/// `gpu0, nic0 are at host node 1`.
fn at_node(node: u32, ids: &[&str]) -> String {
    let verb = if ids.len() == 1 { "is" } else { "are" };
    format!("{} {verb} at host node {node}", first_of(ids.iter().map(|id| (*id).to_owned())))
}
