//! Places where memory is tried: each node that has some, with the processors next to it.

use egm_address::CpuSet;
use egm_guest::findings::Figure;
use rustix::thread::{CpuSet as Affinity, sched_setaffinity};

use super::ROUNDS;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;
use crate::tree::{self, NODES, Tree};
use crate::validate::Setting;

/// Smallest memory that a node is tried with, in bytes.
const LEAST: u64 = 64 << 10;

/// A node to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeMemory {
    /// Its number; `None` where the kernel has no nodes.
    pub(super) node: Option<u32>,
    /// Bytes that may be taken there, a multiple of a page: what `--size` asks for, a quarter of what is free at most.
    pub(super) size: usize,
    /// The processors of the node, or those next to it.
    pub(super) cpus: CpuSet,
    /// Whether processors are on the node itself.
    pub(super) has_cpus: bool,
}

impl NodeMemory {
    /// Its name in figures.
    pub(super) fn name(&self) -> String {
        self.node.map_or_else(|| "all memory".to_owned(), |node| format!("node {node}"))
    }

    /// Maps `size` bytes of memory on the node; anywhere where the kernel has no nodes.
    pub(super) fn memory(&self, size: usize) -> Result<Mapping, Broken> {
        let mapping = match self.node {
            Some(node) => Mapping::on_node(size, node),
            None => Mapping::new(size),
        };
        mapping.map_err(Broken::system(format!("cannot allocate {size} bytes on {}", self.name())))
    }

    /// Has this thread and those that it starts run on the nearest processors; where the system does not let them,
    /// they run anywhere.
    pub(super) fn run_near(&self) {
        let mut affinity = Affinity::new();
        let fits = |cpu: &usize| *cpu < Affinity::MAX_CPU;
        for cpu in self.cpus.iter().filter_map(|cpu| usize::try_from(cpu).ok()).filter(fits) {
            affinity.set(cpu);
        }
        if affinity.count() > 0 {
            let _ = sched_setaffinity(None, &affinity);
        }
    }
}

/// Nodes with memory, or those of the argument `memory.nodes` (`0,2`); and what is left out, with the reason.
pub(super) fn places(tree: &Tree, setting: &Setting) -> Result<(Vec<NodeMemory>, Vec<String>), Broken> {
    let asked = setting.args.get::<CpuSet>("memory.nodes", CpuSet::default())?;
    let Some(nodes) = tree.list(&format!("{NODES}/has_memory")) else {
        let free = crate::machine::meminfo(tree, "MemAvailable").unwrap_or(0);
        let cpus = tree.list("/sys/devices/system/cpu/online").unwrap_or_default();
        let place = NodeMemory { node: None, size: share(free, setting.most), cpus, has_cpus: true };
        return Ok((vec![place], vec!["the kernel has no NUMA nodes".to_owned()]));
    };
    let (mut places, mut left_out) = (Vec::new(), Vec::new());
    for node in nodes.iter().filter(|node| asked.is_empty() || asked.contains(*node)) {
        let free = tree.available_on(node).unwrap_or(0);
        if free / 4 < LEAST {
            left_out.push(format!("node {node} has {free} bytes free, too little to try"));
            continue;
        }
        let (cpus, has_cpus) = nearest(tree, node, &nodes);
        places.push(NodeMemory { node: Some(node), size: share(free, setting.most), cpus, has_cpus });
    }
    for node in asked.iter().filter(|node| !nodes.contains(*node)) {
        left_out.push(format!("node {node} has no memory"));
    }
    Ok((places, left_out))
}

/// What may be taken of `free` bytes, whole pages: several buffers have room beside one another. Where that is less than
/// `most` it is a power of two, so that runs of different days have figures of the same sizes.
fn share(free: u64, most: u64) -> usize {
    let room = (free / 4).max(LEAST);
    let size = if room < most { 1 << room.ilog2() } else { most.max(LEAST) & !(LEAST - 1) };
    usize::try_from(size).unwrap_or(usize::MAX / 2)
}

/// Repetitions of each measurement: the argument `memory.rounds`.
pub(super) fn rounds(setting: &Setting) -> Result<u32, Broken> {
    Ok(setting.args.get("memory.rounds", ROUNDS)?.clamp(1, 1000))
}

/// Runs `measure` in each place, near it and so many rounds; skipped where there is no place.
pub(super) fn in_each(
    setting: &Setting,
    mut measure: impl FnMut(&mut Claim, &NodeMemory, u32) -> Result<Vec<Figure>, Broken>,
) -> Result<Finding, Broken> {
    let (places, left_out) = places(&Tree::live(), setting)?;
    if places.is_empty() {
        return Ok(Finding::skipped(left_out.join("; ")));
    }
    let rounds = rounds(setting)?;
    let (mut claim, mut figures) = (Claim::default(), Vec::new());
    for place in &places {
        place.run_near();
        figures.extend(measure(&mut claim, place, rounds)?);
        claim.seen(place.name());
    }
    left_out.into_iter().for_each(|left| claim.seen(left));
    Ok(claim.finish().with_figures(figures))
}

/// The processors of a node, or of the node with processors that is least far away.
fn nearest(tree: &Tree, node: u32, nodes: &CpuSet) -> (CpuSet, bool) {
    let cpus = |node: u32| tree.list(&tree::node(node, "cpulist")).unwrap_or_default();
    let own = cpus(node);
    if !own.is_empty() {
        return (own, true);
    }
    let online = tree.list(&format!("{NODES}/online")).unwrap_or_else(|| nodes.clone());
    let line = tree.text(&tree::node(node, "distance")).unwrap_or_default();
    let distances = line.split_whitespace().map(|text| text.parse().unwrap_or(u32::MAX));
    let mut others: Vec<(u32, u32)> = distances.zip(online.iter()).collect();
    others.sort_unstable();
    let near = others.into_iter().map(|(_, other)| cpus(other)).find(|cpus| !cpus.is_empty());
    (near.unwrap_or_default(), false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmdline::Arguments;
    use crate::tree::tests::recorded;

    const TWO_AND_EGM: &str = "\
== /sys/devices/system/node/online
0-3
== /sys/devices/system/node/has_memory
0-2
== /sys/devices/system/node/node0/cpulist
0-3
== /sys/devices/system/node/node1/cpulist
4-7
== /sys/devices/system/node/node2/cpulist

== /sys/devices/system/node/node2/distance
40 20 10 30
== /sys/devices/system/node/node0/meminfo
Node 0 MemFree:   4096000 kB
== /sys/devices/system/node/node1/meminfo
Node 1 MemFree:   100 kB
== /sys/devices/system/node/node2/meminfo
Node 2 MemFree:    824000 kB
Node 2 Active(file):   200000 kB
Node 2 Inactive(file): 100000 kB
Node 2 SReclaimable:   100000 kB
";

    fn setting(args: &[&str]) -> Setting {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Setting { seed: 1, most: 256 << 20, args: Arguments::from_pairs(&args).unwrap() }
    }

    #[test]
    fn a_node_without_processors_is_tried_from_the_nearest_and_a_full_one_is_left_out() {
        let (_folder, tree) = recorded(TWO_AND_EGM);
        let (places, left_out) = places(&tree, &setting(&[])).unwrap();
        let said: Vec<_> = places.iter().map(|p| (p.node, p.size, p.cpus.to_string(), p.has_cpus)).collect();
        assert_eq!(
            said,
            [(Some(0), 256 << 20, "0-3".into(), true), (Some(2), 128 << 20, "4-7".into(), false)]
        );
        assert_eq!(left_out, ["node 1 has 102400 bytes free, too little to try"]);
    }

    #[test]
    fn what_is_taken_is_what_was_asked_for_or_a_power_of_two() {
        assert_eq!(share(1 << 40, 3_000_000), 2_949_120, "whole pages of 64 KiB");
        assert_eq!(share(401 << 20, 256 << 20), 64 << 20);
        assert_eq!((share(0, 1), share(0, u64::MAX)), (64 << 10, 64 << 10));
    }

    #[test]
    fn nodes_can_be_chosen_and_a_kernel_without_nodes_is_one_place() {
        let (_folder, tree) = recorded(TWO_AND_EGM);
        let (chosen, left_out) = places(&tree, &setting(&["memory.nodes=2-3"])).unwrap();
        assert_eq!((chosen.len(), chosen[0].node), (1, Some(2)));
        assert_eq!(left_out, ["node 3 has no memory"]);
        let (_folder, empty) = recorded("== /proc/meminfo\nMemAvailable: 4096 kB\n");
        let (alone, _) = places(&empty, &setting(&[])).unwrap();
        assert_eq!((alone[0].node, alone[0].size), (None, 1 << 20));
        assert!(places(&tree, &setting(&["memory.nodes=x"])).is_err());
    }
}
