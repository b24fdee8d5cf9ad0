//! Claim: Linux offers the planned latencies and bandwidths of each node's memory to programs (`access0/initiators`).

use super::Context;
use crate::error::Broken;
use crate::expect::{Access, Node, Plan};
use crate::finding::{Claim, Finding};
use crate::sysfs;

const NODES: &str = "/sys/devices/system/node";
/// Files and whether each is a latency (ns) or a bandwidth (MB/s).
const FIGURES: [(&str, bool); 4] =
    [("read_latency", true), ("write_latency", true), ("read_bandwidth", false), ("write_bandwidth", false)];

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let mut claim = Claim::default();
    let mut compared = 0;
    for node in plan.nodes.iter().filter(|node| !node.access.is_empty()) {
        let Some(number) = plan.linux_node(node.id) else { continue };
        let folder = format!("{NODES}/node{number}/access0/initiators");
        let entries = sysfs::names(&folder);
        if !entries.iter().any(|name| name == "read_latency") {
            continue;
        }
        let Some(access) = nearest(plan, node, &entries) else {
            claim.untrue(format!("node {} has figures, but from no planned initiator: {entries:?}", node.id));
            continue;
        };
        for (file, latency) in FIGURES {
            let is = sysfs::number(format!("{folder}/{file}"))?;
            figure(
                &mut claim,
                &format!("{file} of node {} from {}", node.id, access.from),
                is,
                &access,
                latency,
            );
        }
        claim.seen(format!("node {} from {}: {} ns", node.id, access.from, access.latency_ns));
        compared += 1;
    }
    if compared == 0 && claim.is_true() {
        return Ok(Finding::skipped(if plan.nodes.iter().all(|n| n.access.is_empty()) {
            "no figures are planned"
        } else {
            "this kernel shows no figures (CONFIG_ACPI_HMAT); acpi_tables compares the table itself"
        }));
    }
    Ok(claim.finish())
}

/// The planned figures of an initiator that Linux names for `node`: entries `node0`, `node1`, … of the folder.
fn nearest(plan: &Plan, node: &Node, entries: &[String]) -> Option<Access> {
    let initiator = |id| plan.linux_node(id).map(|number| format!("node{number}"));
    node.access.iter().find(|a| initiator(a.from).is_some_and(|name| entries.contains(&name))).copied()
}

/// Linux counts whole ns and MB/s; the table's 16-bit entries may have rounded a bandwidth by up to 1/65534.
fn figure(claim: &mut Claim, what: &str, is: u64, access: &Access, latency: bool) {
    let planned = u64::from(if latency { access.latency_ns } else { access.bandwidth_mbps });
    let slack = if latency { 0 } else { planned / 32_767 };
    claim.holds(is.abs_diff(planned) <= slack, || format!("{what} is {is}, planned {planned}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::q35;

    #[test]
    fn figures_are_those_of_the_initiator_that_linux_names() {
        let plan = q35();
        let entries = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let access = nearest(&plan, &plan.nodes[1], &entries(&["node0", "read_latency"])).unwrap();
        assert_eq!((access.from, access.latency_ns), (0, 400));
        assert!(nearest(&plan, &plan.nodes[1], &entries(&["node1"])).is_none());
    }

    #[test]
    fn a_latency_is_exact_and_a_bandwidth_rounded_at_most() {
        let judged = |is, access: &Access, latency| {
            let mut claim = Claim::default();
            figure(&mut claim, "x", is, access, latency);
            claim.is_true()
        };
        let access = Access { from: 0, latency_ns: 400, bandwidth_mbps: 51_200_000 };
        assert!(judged(400, &access, true) && !judged(401, &access, true));
        assert!(judged(51_199_000, &access, false) && !judged(51_100_000, &access, false));
    }
}
