//! Distances between nodes: the configuration's, and between the nodes of GPUs and all others.

use std::collections::BTreeMap;

use egm_config::distance::{FAR_GPU, LOCAL, NEAR_GPU, OTHER_GPU, SAME_GPU, assumed};

use super::{Guest, NumaNode};

impl Guest {
    pub(super) fn measure(&self) -> Option<Vec<Vec<u8>>> {
        let mut written = BTreeMap::new();
        let nodes = self.machine.memory.nodes.iter().map(|node| (node.id, &node.distances));
        for (from, distances) in nodes.chain(self.machine.egm.iter().map(|s| (s.node, &s.distances))) {
            written.extend(distances.iter().map(|(&to, &distance)| ((from, to), distance)));
        }
        let plain =
            |from: u32, to: u32| written.get(&(from, to)).copied().unwrap_or_else(|| assumed(from, to));
        let usual = written.iter().all(|(&(from, to), &is)| is == assumed(from, to));
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
