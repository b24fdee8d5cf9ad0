//! Distances between nodes: the configuration's, and between the nodes of GPUs and all others.

use std::collections::BTreeMap;

use super::{Guest, NumaNode};

/// A node's distance to itself, and the one that is assumed where none is written (ACPI 6.5, 5.2.17).
const LOCAL: u8 = 10;
const REMOTE: u8 = 20;
/// Published distances of a Grace guest: between a GPU's nodes, to another GPU's, and from memory and processors to a
/// GPU of the same and of another socket.
const SAME_GPU: u8 = 11;
const OTHER_GPU: u8 = 40;
const NEAR_GPU: u8 = 80;
const FAR_GPU: u8 = 120;

impl Guest {
    pub(super) fn measure(&self) -> Option<Vec<Vec<u8>>> {
        let mut written = BTreeMap::new();
        let nodes = self.machine.memory.nodes.iter().map(|node| (node.id, &node.distances));
        for (from, distances) in nodes.chain(self.machine.egm.iter().map(|s| (s.node, &s.distances))) {
            written.extend(distances.iter().map(|(&to, &distance)| ((from, to), distance)));
        }
        let plain = |from: u32, to: u32| {
            let assumed = if from == to { LOCAL } else { REMOTE };
            written.get(&(from, to)).copied().unwrap_or(assumed)
        };
        let usual = written.iter().all(|(&(from, to), &is)| is == if from == to { LOCAL } else { REMOTE });
        if usual && self.nodes.iter().all(|node| node.initiator.is_none()) {
            return None;
        }
        let distance = |from: &NumaNode, to: &NumaNode| match (from.initiator, to.initiator) {
            (None, None) => plain(from.id, to.id),
            _ if from.id == to.id => LOCAL,
            (Some(a), Some(b)) => {
                if a == b {
                    SAME_GPU
                } else {
                    OTHER_GPU
                }
            }
            (None, Some(gpu)) | (Some(gpu), None) => {
                let other = if from.initiator.is_none() { from } else { to };
                if self.is_near(other, gpu, &plain) { NEAR_GPU } else { FAR_GPU }
            }
        };
        Some(self.nodes.iter().map(|from| self.nodes.iter().map(|to| distance(from, to)).collect()).collect())
    }

    /// Whether `node` is of the GPU's socket: it is the GPU's EGM, or no processors are nearer to that.
    fn is_near(&self, node: &NumaNode, gpu: usize, distance: &impl Fn(u32, u32) -> u8) -> bool {
        let Some(home) = self.devices.get(gpu).and_then(|placed| placed.near) else { return true };
        let processors = self.nodes.iter().filter(|node| !node.cpus.is_empty());
        let nearest = processors.map(|node| distance(node.id, home)).min().unwrap_or(LOCAL);
        distance(node.id, home) <= nearest
    }
}
