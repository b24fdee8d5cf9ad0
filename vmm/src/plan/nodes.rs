//! NUMA nodes and the distances between them.

use std::collections::BTreeMap;

use egm_address::CpuSet;

use crate::config::{Access, Spec};
use crate::plan::{MemoryPlan, NodePlan};

/// ACPI 6.5, 5.2.17: the distance of a node to itself.
const LOCAL_DISTANCE: u8 = 10;
/// What Linux assumes between nodes that nobody gave a distance (`REMOTE_DISTANCE`).
const REMOTE_DISTANCE: u8 = 20;

/// One node of the specification, whichever list it comes from.
struct Node<'a> {
    id: u32,
    cpus: CpuSet,
    egm: bool,
    distances: &'a BTreeMap<u32, u8>,
    access: &'a [Access],
}

/// Nodes in SRAT order: those with processors, then those with memory only, each by ascending id. Linux numbers its
/// nodes as it meets them, so this order keeps EGM nodes behind the others.
fn ordered(spec: &Spec) -> Vec<Node<'_>> {
    let ordinary = spec.memory.nodes.iter().map(|node| Node {
        id: node.id,
        cpus: node.cpus.clone(),
        egm: false,
        distances: &node.distances,
        access: &node.access,
    });
    let egm = spec.egm.iter().map(|slice| Node {
        id: slice.node,
        cpus: CpuSet::default(),
        egm: true,
        distances: &slice.distances,
        access: &slice.access,
    });
    let mut all: Vec<Node<'_>> = ordinary.chain(egm).collect();
    all.sort_by_key(|node| (node.cpus.is_empty(), node.id));
    all
}

pub(super) fn plan(spec: &Spec, memory: &[MemoryPlan]) -> Vec<NodePlan> {
    let bytes = |id: u32| memory.iter().filter(|m| m.node == id).map(|m| m.span.size()).sum();
    let node = |node: Node<'_>| NodePlan {
        id: node.id,
        cpus: node.cpus,
        memory: bytes(node.id),
        egm: node.egm,
        access: node.access.to_vec(),
    };
    ordered(spec).into_iter().map(node).collect()
}

/// Distances in the order of the nodes; one that was given in one direction only holds in both.
pub(super) fn distances(spec: &Spec) -> Vec<Vec<u8>> {
    let nodes = ordered(spec);
    let distance = |from: &Node<'_>, to: &Node<'_>| {
        if from.id == to.id {
            return LOCAL_DISTANCE;
        }
        let given = from.distances.get(&to.id).or_else(|| to.distances.get(&from.id));
        given.copied().unwrap_or(REMOTE_DISTANCE)
    };
    nodes.iter().map(|from| nodes.iter().map(|to| distance(from, to)).collect()).collect()
}
