//! NUMA nodes, distances and access figures as rows by node number. Equal nodes with consecutive numbers share a row.

use egm_report::show::size;

use crate::config::Access;
use crate::plan::{FunctionRole, MemoryKind, NodePlan, Plan};

/// A row of a table.
pub(super) struct Row {
    /// Whether it is about EGM.
    pub(super) egm: bool,
    pub(super) cells: Vec<String>,
}

/// Nodes with consecutive numbers that differ in nothing else.
struct Run<'a> {
    /// The first of them.
    node: &'a NodePlan,
    /// Its position in [`Plan::nodes`].
    at: usize,
    /// Position of another of them.
    other: Option<usize>,
    /// Number of the last of them.
    last: u32,
}

impl Run<'_> {
    /// First and last number: `2-9`, or `2` alone.
    fn numbers(&self) -> String {
        range(self.node.id, self.last)
    }

    /// Whether `node`, at position `at`, has the next number and is equal to the first node in everything else.
    fn continues_with(&self, plan: &Plan, at: usize, node: &NodePlan) -> bool {
        let renumbered = NodePlan { id: self.node.id, ..node.clone() };
        self.last.checked_add(1) == Some(node.id)
            && node.cpus.is_empty()
            && renumbered == *self.node
            && kind(plan, node) == kind(plan, self.node)
            && are_as_far(plan, self.at, at)
    }
}

/// Nodes by number; in `wide` tables each is a run of its own.
fn runs(plan: &Plan, wide: bool) -> Vec<Run<'_>> {
    let mut nodes: Vec<(usize, &NodePlan)> = plan.nodes.iter().enumerate().collect();
    nodes.sort_by_key(|(_, node)| node.id);
    let mut runs: Vec<Run<'_>> = Vec::new();
    for (at, node) in nodes {
        match runs.last_mut() {
            Some(run) if !wide && run.continues_with(plan, at, node) => {
                run.other = Some(at);
                run.last = node.id;
            }
            _ => runs.push(Run { node, at, other: None, last: node.id }),
        }
    }
    runs
}

/// Whether the nodes at two positions have the same distances to and from all others.
fn are_as_far(plan: &Plan, a: usize, b: usize) -> bool {
    let mut others = (0..plan.nodes.len()).filter(|other| *other != a && *other != b);
    distance(plan, a, a) == distance(plan, b, b)
        && distance(plan, a, b) == distance(plan, b, a)
        && others.all(|other| {
            distance(plan, a, other) == distance(plan, b, other)
                && distance(plan, other, a) == distance(plan, other, b)
        })
}

/// The distance between the nodes at two positions; 0 where there is none.
fn distance(plan: &Plan, from: usize, to: usize) -> u8 {
    plan.distances.get(from).and_then(|row| row.get(to)).copied().unwrap_or(0)
}

fn range(first: u32, last: u32) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// Heads of the columns of [`nodes`].
pub(super) const NODES: [&str; 4] = ["node", "vCPUs", "memory", "kind"];

/// Number, vCPUs, memory and kind of each run of nodes.
pub(super) fn nodes(plan: &Plan, wide: bool) -> Vec<Row> {
    let row = |run: &Run<'_>| {
        let NodePlan { cpus, memory, egm, .. } = run.node;
        let cpus = if cpus.is_empty() { "none".to_owned() } else { cpus.to_string() };
        let each = if run.other.is_some() && *memory > 0 { " each" } else { "" };
        let memory = format!("{}{each}", size(*memory));
        Row { egm: *egm, cells: vec![run.numbers(), cpus, memory, kind(plan, run.node)] }
    };
    runs(plan, wide).iter().map(row).collect()
}

/// Kind of a node's memory, with the GPU or the slices that it is of.
fn kind(plan: &Plan, node: &NodePlan) -> String {
    if let Some(address) = node.initiator {
        let roles = plan.pci.iter().filter(|function| function.address == address);
        let gpu = roles.map(|function| &function.role).find_map(|role| match role {
            FunctionRole::Endpoint { device, assigned: Some(assigned) } => {
                Some(format!(" of {} (host {})", device.id, assigned.function))
            }
            _ => None,
        });
        return format!("GPU memory{}", gpu.unwrap_or_default());
    }
    if node.egm {
        let pieces = plan.memory.iter().filter(|m| m.node == node.id && m.kind == MemoryKind::Egm);
        let mut slices: Vec<&str> =
            pieces.filter_map(|m| Some(plan.backings.get(m.backing)?.id.as_str())).collect();
        slices.dedup();
        return ["EGM"].into_iter().chain(slices).collect::<Vec<_>>().join(" ");
    }
    if node.memory == 0 { "no memory".to_owned() } else { "RAM".to_owned() }
}

/// Distances between runs of nodes.
pub(super) struct Distances {
    /// The runs, in rows and columns.
    pub(super) names: Vec<String>,
    pub(super) rows: Vec<Vec<Distance>>,
}

/// A cell of the distances.
pub(super) struct Distance {
    /// The distance; of several nodes to each other the larger one.
    pub(super) farthest: u8,
    pub(super) text: String,
}

impl Distances {
    pub(super) fn of(plan: &Plan, wide: bool) -> Self {
        let runs = runs(plan, wide);
        let cell = |from: &Run<'_>, to: &Run<'_>| {
            let first = distance(plan, from.at, to.at);
            match from.other.filter(|_| from.at == to.at) {
                Some(other) => {
                    let second = distance(plan, from.at, other);
                    Distance { farthest: first.max(second), text: format!("{first}/{second}") }
                }
                None => Distance { farthest: first, text: first.to_string() },
            }
        };
        Self {
            names: runs.iter().map(Run::numbers).collect(),
            rows: runs.iter().map(|from| runs.iter().map(|to| cell(from, to)).collect()).collect(),
        }
    }

    /// Explanation of cells with two distances, if there are any.
    pub(super) fn legend(&self) -> Option<String> {
        let pair = self.rows.iter().flatten().find(|cell| cell.text.contains('/'))?;
        Some(format!("{}: from a node to itself, and to the other nodes of its row", pair.text))
    }
}

/// Heads of the columns of [`access`].
pub(super) const ACCESS: [&str; 4] = ["memory of node", "from node", "latency", "bandwidth"];

/// Figures of each run of nodes, for each run of processors' nodes.
pub(super) fn access(plan: &Plan, wide: bool) -> Vec<Row> {
    let mut rows = Vec::new();
    for run in runs(plan, wide) {
        rows.extend(figures(&run.node.access, wide).iter().map(|figures| figures.row(&run)));
    }
    rows
}

/// Equal figures for nodes of processors with consecutive numbers.
struct Figures<'a> {
    /// Those of the first node.
    access: &'a Access,
    /// Number of the last node.
    last: u32,
}

impl Figures<'_> {
    fn row(&self, memory: &Run<'_>) -> Row {
        let Access { from, latency_ns, bandwidth_mbps } = self.access;
        let (latency, bandwidth) = (format!("{latency_ns} ns"), format!("{bandwidth_mbps} MB/s"));
        Row {
            egm: memory.node.egm,
            cells: vec![memory.numbers(), range(*from, self.last), latency, bandwidth],
        }
    }

    fn continue_with(&self, next: &Access) -> bool {
        let renumbered = Access { from: next.from, ..self.access.clone() };
        self.last.checked_add(1) == Some(next.from) && renumbered == *next
    }
}

fn figures(access: &[Access], wide: bool) -> Vec<Figures<'_>> {
    let mut sorted: Vec<&Access> = access.iter().collect();
    sorted.sort_by_key(|access| access.from);
    let mut all: Vec<Figures<'_>> = Vec::new();
    for access in sorted {
        match all.last_mut() {
            Some(figures) if !wide && figures.continue_with(access) => figures.last = access.from,
            _ => all.push(Figures { access, last: access.from }),
        }
    }
    all
}
