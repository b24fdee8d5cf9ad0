//! NUMA nodes and the distances between them.

use std::collections::BTreeMap;

use egm_address::{CpuSet, PciAddress};

use crate::config::distance::{self, FAR_GPU, LOCAL, NEAR_GPU, OTHER_GPU, SAME_GPU};
use crate::config::{Access, Architecture, Spec};
use crate::plan::{FunctionPlan, FunctionRole, GPU_NODES, MemoryPlan, NodePlan};

/// Nodes that Debian's kernel for arm64 keeps (`CONFIG_NODES_SHIFT=4`). That for amd64 keeps 1024, more than a plan has.
const DEBIAN_ARM64: usize = 16;
/// `CONFIG_NODES_SHIFT` of kernels that vendors build for Grace machines.
const LARGE_SHIFT: u32 = 6;

/// The NUMA nodes of a guest.
pub(in crate::plan) struct Numa {
    /// Nodes in the order of the SRAT.
    pub(in crate::plan) nodes: Vec<NodePlan>,
    /// `distances[i][j]`: from `nodes[i]` to `nodes[j]`.
    pub(in crate::plan) distances: Vec<Vec<u8>>,
}

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

/// Distances in the order of the nodes; one that was given in one direction only holds in both.
fn distances(nodes: &[Node<'_>]) -> Vec<Vec<u8>> {
    let distance = |from: &Node<'_>, to: &Node<'_>| {
        let given = from.distances.get(&to.id).or_else(|| to.distances.get(&from.id));
        given.copied().unwrap_or_else(|| distance::assumed(from.id, to.id))
    };
    nodes.iter().map(|from| nodes.iter().map(|to| distance(from, to)).collect()).collect()
}

impl Numa {
    /// The nodes of `spec`, with the bytes that each has of `memory`.
    pub(super) fn of(spec: &Spec, memory: &[MemoryPlan]) -> Self {
        let ordered = ordered(spec);
        let distances = distances(&ordered);
        let bytes = |id: u32| memory.iter().filter(|m| m.node == id).map(|m| m.span.size()).sum();
        let node = |node: Node<'_>| NodePlan {
            initiator: None,
            id: node.id,
            cpus: node.cpus,
            memory: bytes(node.id),
            egm: node.egm,
            access: node.access.to_vec(),
        };
        Self { nodes: ordered.into_iter().map(node).collect(), distances }
    }

    /// Id of the node of bus 0.
    pub(super) fn first(&self) -> u32 {
        self.nodes.first().map_or(0, |first| first.id)
    }

    /// Adds the nodes of GPU memory, behind those with processors: so do vendors' machines, and Linux numbers nodes in that
    /// order (ACPI 6.5, 5.2.16: processors, generic initiators, memory).
    pub(in crate::plan) fn add_gpus(&mut self, functions: &[FunctionPlan]) {
        let gpus: Vec<Gpu> = functions.iter().filter_map(|function| Gpu::of(function, self)).collect();
        let at = self.nodes.iter().position(|node| node.cpus.is_empty()).unwrap_or(self.nodes.len());
        for (index, row) in self.distances.iter_mut().enumerate() {
            let new = gpus.iter().flat_map(|gpu| gpu.ids().map(move |_| gpu.distance(index)));
            row.splice(at..at, new);
        }
        let (mut nodes, mut rows) = (Vec::new(), Vec::new());
        for gpu in &gpus {
            for id in gpu.ids() {
                nodes.push(gpu.node(id));
                rows.push(gpu.row(id, at, &gpus));
            }
        }
        self.distances.splice(at..at, rows);
        self.nodes.splice(at..at, nodes);
    }
}

/// A GPU with nodes of its own.
struct Gpu {
    address: PciAddress,
    /// Id of its first node.
    first: u32,
    /// From each of its nodes to those that are not of GPUs, in their order.
    distances: Vec<u8>,
}

impl Gpu {
    /// `function`, where it is a GPU with memory that processors share. The nodes of its socket are the one that it is near
    /// to and, where that has no processors, the nearest with some.
    fn of(function: &FunctionPlan, numa: &Numa) -> Option<Self> {
        let FunctionRole::Endpoint { assigned: Some(assigned), .. } = &function.role else { return None };
        let first = assigned.memory.as_ref()?.first_node;
        let row = numa.nodes.iter().position(|node| Some(node.id) == assigned.node);
        let row = row.and_then(|at| numa.distances.get(at)).into_iter().flatten();
        let with = numa.nodes.iter().zip(row).filter(|(node, _)| !node.cpus.is_empty());
        let nearest = with.min_by_key(|(_, distance)| **distance).map(|(node, _)| node.id);
        let is_local = |node: &NodePlan| Some(node.id) == assigned.node || Some(node.id) == nearest;
        let distance = |node: &NodePlan| if is_local(node) { NEAR_GPU } else { FAR_GPU };
        Some(Self { address: function.address, first, distances: numa.nodes.iter().map(distance).collect() })
    }

    /// Ids of its nodes.
    fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        let first = self.first;
        (0..GPU_NODES).map(move |part| first.saturating_add(part))
    }

    fn node(&self, id: u32) -> NodePlan {
        let (cpus, access) = (CpuSet::default(), Vec::new());
        NodePlan { id, cpus, memory: 0, egm: false, access, initiator: Some(self.address) }
    }

    /// Distance to the node with this index among those that are not of GPUs.
    fn distance(&self, index: usize) -> u8 {
        self.distances.get(index).copied().unwrap_or(FAR_GPU)
    }

    /// Distances from its node `id`, those to the nodes of all `gpus` at `at`.
    fn row(&self, id: u32, at: usize, gpus: &[Self]) -> Vec<u8> {
        let mut row = self.distances.clone();
        let to = |gpu: &Self, other: u32| match gpu.first == self.first {
            true if other == id => LOCAL,
            true => SAME_GPU,
            false => OTHER_GPU,
        };
        row.splice(at..at, gpus.iter().flat_map(|gpu| gpu.ids().map(move |other| to(gpu, other))));
        row
    }
}

/// Note on a guest with more nodes than Debian's kernel keeps.
pub(in crate::plan) fn too_many(arch: Architecture, nodes: &[NodePlan]) -> Option<String> {
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
