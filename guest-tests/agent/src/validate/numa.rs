//! Nodes are as described: memory requested of a node lies there, distances make sense, and the firmware's figures of
//! speed are shown.

use egm_guest::findings::Figure;

use super::{Setting, Validation};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sys::Mapping;
use crate::tree::{self, NODES, Tree};

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "numa.placement",
        claim: "every page asked of a node lies on it, by move_pages and by get_mempolicy",
        run: placement,
    },
    Validation {
        name: "numa.distances",
        claim: "each node has a distance to each node, 10 to itself and more to others; nodes without processors or memory are named",
        run: |_| Ok(distances(&Tree::live())),
    },
    Validation {
        name: "numa.hmat",
        claim: "the firmware's latencies and bandwidths of each node can be read; figures",
        run: |_| Ok(hmat(&Tree::live())),
    },
];

/// Bytes that are asked of each node at most.
const MOST: u64 = 64 << 20;
/// Number of pages for which the policy is queried one by one.
const SAMPLES: usize = 64;
/// Reason for a skipped claim on a kernel without nodes.
const NO_NODES: &str = "the kernel shows no NUMA nodes in /sys/devices/system/node (CONFIG_NUMA)";

fn placement(setting: &Setting) -> Result<Finding, Broken> {
    let tree = Tree::live();
    let Some(nodes) = tree.list(&format!("{NODES}/has_memory")) else {
        return Ok(Finding::skipped(NO_NODES));
    };
    let page = rustix::param::page_size();
    let (mut claim, mut left_out) = (Claim::default(), Vec::new());
    let mut tried = false;
    for node in nodes.iter() {
        let free = tree.available_on(node).unwrap_or(0);
        let size = usize::try_from((free / 4).min(setting.most).min(MOST)).unwrap_or(0) / page * page;
        if size == 0 {
            left_out.push(format!("node {node} has {free} bytes free, too little to try"));
            continue;
        }
        tried = true;
        let mut memory = Mapping::on_node(size, node)
            .map_err(Broken::system(format!("cannot allocate {size} bytes on node {node}")))?;
        memory.bytes_mut().iter_mut().step_by(page).for_each(|byte| *byte = 1);
        let is = memory.nodes(page).map_err(Broken::system("move_pages"))?;
        judge(&mut claim, node, "move_pages", &is);
        let step = (size / SAMPLES / page).max(1) * page;
        let sampled: Result<Vec<i32>, _> =
            (0..size).step_by(step).map(|offset| memory.policy_node(offset)).collect();
        judge(&mut claim, node, "get_mempolicy", &sampled.map_err(Broken::system("get_mempolicy"))?);
        claim.seen(format!("node {node}: {} pages", is.len()));
    }
    if !tried {
        return Ok(Finding::skipped(left_out.join("; ")));
    }
    left_out.into_iter().for_each(|left| claim.seen(left));
    Ok(claim.finish())
}

/// Every page of `is` lies on `node`; what is negative is an error number.
fn judge(claim: &mut Claim, node: u32, source: &str, is: &[i32]) {
    let wanted = i32::try_from(node).unwrap_or(-1);
    let wrong = is.iter().filter(|is| **is != wanted).count();
    if let Some(first) = is.iter().find(|is| **is != wanted) {
        claim.untrue(format!(
            "{source} has {wrong} of {} pages asked of node {node} elsewhere, one at {first}",
            is.len()
        ));
    }
}

fn distances(tree: &Tree) -> Finding {
    let Some(online) = tree.list(&format!("{NODES}/online")) else { return Finding::skipped(NO_NODES) };
    let nodes: Vec<u32> = online.iter().collect();
    let mut claim = Claim::default();
    let mut matrix: Vec<Vec<u32>> = Vec::new();
    for node in &nodes {
        let line = tree.text(&tree::node(*node, "distance")).unwrap_or_default();
        let row: Vec<u32> = line.split_whitespace().filter_map(|text| text.parse().ok()).collect();
        claim.holds(row.len() == nodes.len(), || {
            format!("node {node} has {} distances for {} nodes: {:?}", row.len(), nodes.len(), line.trim())
        });
        for (to, distance) in nodes.iter().zip(&row) {
            let good = if to == node { *distance == 10 } else { *distance > 10 };
            claim.holds(good, || format!("the distance from node {node} to node {to} is {distance}"));
        }
        matrix.push(row);
    }
    let at = |from: usize, to: usize| matrix.get(from).and_then(|row| row.get(to));
    let pairs = (0..nodes.len()).flat_map(|from| (0..from).map(move |to| (from, to)));
    let uneven = pairs.filter(|(from, to)| at(*from, *to) != at(*to, *from)).count();
    if uneven > 0 {
        claim.seen(format!("{uneven} pairs have another distance there than back"));
    }
    claim.seen(format!("nodes {online}"));
    for (file, what) in [("has_memory", "without memory"), ("has_cpu", "without processors")] {
        let has = tree.list(&format!("{NODES}/{file}")).unwrap_or_default();
        let without: Vec<String> =
            nodes.iter().filter(|node| !has.contains(**node)).map(u32::to_string).collect();
        if !without.is_empty() {
            claim.seen(format!("{what}: {}", without.join(", ")));
        }
    }
    claim.finish()
}

/// Files of `access0/initiators`: file, its figure's name, unit, and factor from the file's unit to that.
const HMAT: [(&str, &str, &str, f64); 4] = [
    ("read_latency", "latency of reads", "ns", 1.0),
    ("write_latency", "latency of writes", "ns", 1.0),
    ("read_bandwidth", "bandwidth of reads", "GB/s", 1e-3),
    ("write_bandwidth", "bandwidth of writes", "GB/s", 1e-3),
];

fn hmat(tree: &Tree) -> Finding {
    let Some(nodes) = tree.list(&format!("{NODES}/has_memory")) else { return Finding::skipped(NO_NODES) };
    let (mut figures, mut seen, mut without) = (Vec::new(), Vec::new(), Vec::new());
    for node in nodes.iter() {
        let folder = tree::node(node, "access0/initiators");
        let initiators: Vec<String> =
            tree.names(&folder).into_iter().filter(|name| name.starts_with("node")).collect();
        let before = figures.len();
        for (file, what, unit, scale) in HMAT {
            // 0 is what the kernel shows of a value that the firmware did not give.
            let Some(value) = tree.number(&format!("{folder}/{file}")).filter(|value| *value > 0) else {
                continue;
            };
            let mut value = [f64::from(u32::try_from(value).unwrap_or(u32::MAX)) * scale];
            figures.push(Figure::of(format!("{what}, node {node}, by firmware"), None, unit, &mut value));
        }
        if figures.len() > before {
            seen.push(format!("node {node} from {}", initiators.join(" and ")));
        } else {
            without.push(node.to_string());
        }
    }
    if figures.is_empty() {
        return Finding::skipped(
            "no node has figures in access0/initiators: the firmware gave no HMAT with them, or the kernel has no \
             CONFIG_HMEM_REPORTING; a VMM writes one from its configuration",
        );
    }
    if !without.is_empty() {
        seen.push(format!("without figures: node {}", without.join(", ")));
    }
    Finding::passed(seen.join("; ")).with_figures(figures)
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;
    use crate::tree::tests::recorded;

    const NODES: &str = "\
== /sys/devices/system/node/online
0-2
== /sys/devices/system/node/has_memory
0,2
== /sys/devices/system/node/has_cpu
0
== /sys/devices/system/node/node0/distance
10 20 40
== /sys/devices/system/node/node1/distance
20 10 30
== /sys/devices/system/node/node2/distance
80 30 10
== /sys/devices/system/node/node2/access0/initiators/read_latency
250
== /sys/devices/system/node/node2/access0/initiators/write_latency
0
== /sys/devices/system/node/node2/access0/initiators/read_bandwidth
100000
== /sys/devices/system/node/node2/access0/initiators/node0/cpulist
0-3
";

    #[test]
    fn nodes_without_something_and_uneven_distances_are_named() {
        let (_folder, tree) = recorded(NODES);
        let finding = distances(&tree);
        assert_eq!(finding.outcome, Outcome::Passed);
        assert_eq!(
            finding.reason,
            "1 pairs have another distance there than back; nodes 0-2; without memory: 1; without processors: 1, 2"
        );
    }

    #[test]
    fn a_distance_that_makes_no_sense_fails() {
        for (line, said) in
            [("10 10 40", "to node 1 is 10"), ("20 20 40", "to node 0 is 20"), ("10 20", "2 distances for 3")]
        {
            let (_folder, tree) = recorded(&NODES.replacen("10 20 40", line, 1));
            let finding = distances(&tree);
            assert_eq!(finding.outcome, Outcome::Failed, "{line}");
            assert!(finding.reason.contains(said), "{}", finding.reason);
        }
    }

    #[test]
    fn figures_of_the_firmware_are_in_the_units_of_others() {
        let (_folder, tree) = recorded(NODES);
        let verdict = hmat(&tree).into_verdict("numa.hmat", "", 0);
        let figures: Vec<(f64, &str)> = verdict.figures.iter().map(|f| (f.value, &*f.unit)).collect();
        assert_eq!(figures, [(250.0, "ns"), (100.0, "GB/s")]);
        assert_eq!(verdict.reason, "node 2 from node0; without figures: node 0");
        let (_folder, none) = recorded("== /sys/devices/system/node/has_memory\n0\n");
        assert_eq!(hmat(&none).outcome, Outcome::Skipped);
    }

    #[test]
    fn a_page_elsewhere_is_counted() {
        let mut claim = Claim::default();
        judge(&mut claim, 1, "move_pages", &[1, 1]);
        assert!(claim.is_true());
        judge(&mut claim, 1, "move_pages", &[1, 0, -14]);
        assert!(claim.finish().reason.contains("2 of 3 pages asked of node 1 elsewhere, one at 0"));
    }

    #[test]
    fn without_nodes_the_claims_are_skipped() {
        let (_folder, tree) = recorded("");
        assert_eq!((distances(&tree).outcome, hmat(&tree).outcome), (Outcome::Skipped, Outcome::Skipped));
    }
}
