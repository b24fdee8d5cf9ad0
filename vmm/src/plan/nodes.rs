//! NUMA nodes and the distances between them.

use std::collections::BTreeMap;

use egm_address::{CpuSet, PciAddress};

use crate::config::distance::{self, FAR_GPU, LOCAL, NEAR_GPU, OTHER_GPU, SAME_GPU};
use crate::config::{Access, Architecture, Spec};
use crate::plan::{FunctionPlan, FunctionRole, GPU_NODES, MemoryPlan, NodePlan, PassedPlan};

/// Nodes that Debian's kernel for arm64 keeps (`CONFIG_NODES_SHIFT=4`). That for amd64 keeps 1024, more than a plan has.
const DEBIAN_ARM64: usize = 16;
/// `CONFIG_NODES_SHIFT` of kernels that vendors build for Grace machines.
const LARGE_SHIFT: u32 = 6;

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
        egm: spec.slice_of(node.id).is_some(),
        distances: &node.distances,
        access: &node.access,
    });
    let egm = spec.nodes_of_slices().map(|slice| Node {
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
        initiator: None,
        id: node.id,
        cpus: node.cpus,
        memory: bytes(node.id),
        egm: node.egm,
        access: node.access.to_vec(),
    };
    ordered(spec).into_iter().map(node).collect()
}

/// Adds the nodes of GPU memory, behind those with processors: so do vendors' machines, and Linux numbers nodes in that
/// order (ACPI 6.5, 5.2.16: processors, generic initiators, memory).
pub(super) fn add_gpus(nodes: &mut Vec<NodePlan>, distances: &mut Vec<Vec<u8>>, pci: &[FunctionPlan]) {
    let gpu = |function: &FunctionPlan| match &function.role {
        FunctionRole::Endpoint { passed: Some(PassedPlan { node, memory: Some(memory), .. }), .. } => {
            Some(Gpu { address: function.address, near: *node, first: memory.first_node })
        }
        _ => None,
    };
    let gpus: Vec<Gpu> = pci.iter().filter_map(gpu).collect();
    let at = nodes.iter().position(|node| node.cpus.is_empty()).unwrap_or(nodes.len());
    let others = nodes.clone();
    let local: Vec<Vec<bool>> = gpus
        .iter()
        .map(|gpu| others.iter().map(|node| gpu.is_local(node, &others, distances)).collect())
        .collect();
    let new: Vec<(usize, NodePlan)> = (0..)
        .zip(&gpus)
        .flat_map(|(number, gpu)| (0..GPU_NODES).map(move |part| (number, gpu.node(part))))
        .collect();
    let far = |gpu: usize, node: usize| {
        let local = local.get(gpu).and_then(|row| row.get(node)).copied().unwrap_or(false);
        if local { NEAR_GPU } else { FAR_GPU }
    };
    for (row, line) in distances.iter_mut().enumerate() {
        line.splice(at..at, new.iter().map(|(gpu, _)| far(*gpu, row)));
    }
    let line = |gpu: usize, id: u32| {
        let mut line: Vec<u8> = (0..others.len()).map(|node| far(gpu, node)).collect();
        let to = |(other, node): &(usize, NodePlan)| match *other == gpu {
            true if node.id == id => LOCAL,
            true => SAME_GPU,
            false => OTHER_GPU,
        };
        line.splice(at..at, new.iter().map(to));
        line
    };
    let lines: Vec<Vec<u8>> = new.iter().map(|(gpu, node)| line(*gpu, node.id)).collect();
    distances.splice(at..at, lines);
    nodes.splice(at..at, new.into_iter().map(|(_, node)| node));
}

struct Gpu {
    address: PciAddress,
    near: Option<u32>,
    first: u32,
}

impl Gpu {
    fn node(&self, part: u32) -> NodePlan {
        NodePlan {
            id: self.first.saturating_add(part),
            cpus: CpuSet::default(),
            memory: 0,
            egm: false,
            access: Vec::new(),
            initiator: Some(self.address),
        }
    }

    /// Whether `node` is of the GPU's socket: the node that it is near to, or, where that has no processors, the nearest
    /// with some.
    fn is_local(&self, node: &NodePlan, nodes: &[NodePlan], distances: &[Vec<u8>]) -> bool {
        let row = nodes.iter().position(|other| Some(other.id) == self.near).and_then(|at| distances.get(at));
        let with = nodes.iter().zip(row.into_iter().flatten()).filter(|(other, _)| !other.cpus.is_empty());
        let nearest = with.min_by_key(|(_, distance)| **distance).map(|(other, _)| other.id);
        Some(node.id) == self.near || Some(node.id) == nearest
    }
}

/// Distances in the order of the nodes; one that was given in one direction only holds in both.
pub(super) fn distances(spec: &Spec) -> Vec<Vec<u8>> {
    let nodes = ordered(spec);
    let distance = |from: &Node<'_>, to: &Node<'_>| {
        let given = from.distances.get(&to.id).or_else(|| to.distances.get(&from.id));
        given.copied().unwrap_or_else(|| distance::assumed(from.id, to.id))
    };
    nodes.iter().map(|from| nodes.iter().map(|to| distance(from, to)).collect()).collect()
}

/// Note on a guest with more nodes than Debian's kernel keeps.
pub(super) fn too_many(arch: Architecture, nodes: &[NodePlan]) -> Option<String> {
    if arch != Architecture::Aarch64 || nodes.len() <= DEBIAN_ARM64 {
        return None;
    }
    // Linux keeps the first nodes of the SRAT, and ignores all of it if memory or a processor is of a later one.
    let is_essential = |node: &NodePlan| node.initiator.is_none();
    let effect = if nodes.iter().skip(DEBIAN_ARM64).any(is_essential) {
        "it ignores all of them, since one with memory is beyond the first 16"
    } else {
        "the others are lost"
    };
    let fewer = if nodes.iter().any(|node| node.initiator.is_some()) {
        format!("assign fewer GPUs with coherent memory, each of which takes {GPU_NODES} nodes")
    } else {
        "configure fewer nodes".to_owned()
    };
    let shift = nodes.len().next_power_of_two().ilog2().max(LARGE_SHIFT);
    Some(format!(
        "{} NUMA nodes, and Debian's arm64 kernel keeps {DEBIAN_ARM64} (CONFIG_NODES_SHIFT=4): {effect}; boot a kernel with \
         CONFIG_NODES_SHIFT={shift}, or {fewer}",
        nodes.len()
    ))
}
