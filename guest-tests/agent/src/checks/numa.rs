//! Claim: the guest has the planned NUMA nodes with the planned vCPUs, memory and distances; an EGM node has exactly the
//! pages of its slice. If a kernel reports that it has room for fewer nodes, only the first ones are compared.
//!
//! Pages are compared by zoneinfo's `present`, which counts what the kernel was given; `MemTotal` is what is left after the
//! kernel's own page descriptors (1.6 %), and must be at least 95 % of an EGM slice. A kernel that put itself into the slice
//! (address space randomisation does) may have taken its own size in addition.

use std::collections::BTreeMap;

use egm_address::{CpuSet, SpanSet};

use super::Context;
use super::acpi_numa;
use super::memory_map::{self, mebibytes};
use crate::error::Broken;
use crate::expect::{Node, Plan, first_mebibyte};
use crate::finding::{Claim, Finding};
use crate::sysfs;

const NODES: &str = "/sys/devices/system/node";

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &acpi_numa::kept(&context.plan)?;
    let mut claim = Claim::default();
    let online = sysfs::list(format!("{NODES}/online"))?;
    let planned: CpuSet = plan.nodes.iter().filter_map(|n| plan.linux_node(n.id)).collect();
    claim.equal("the list of nodes", &online.to_string(), &planned.to_string());
    let kernel = memory_map::kernel_image(&sysfs::text("/proc/iomem")?);
    let present = present_pages(&sysfs::text("/proc/zoneinfo")?);
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let mut egm = 0;
    for node in &plan.nodes {
        let Some(number) = plan.linux_node(node.id).filter(|n| online.contains(*n)) else { continue };
        let file = |name| format!("{NODES}/node{number}/{name}");
        let cpus = sysfs::list(file("cpulist"))?;
        claim.equal(format!("the CPUs of node {number}"), &cpus.to_string(), &node.cpus.to_string());
        let bytes = present.get(&number).copied().unwrap_or(0).saturating_mul(page);
        size(&mut claim, plan, node, bytes);
        if node.egm {
            let text = sysfs::text(file("meminfo"))?;
            let total = sysfs::node_meminfo(&text, number, "MemTotal").unwrap_or(0);
            let usable = plan.usable(Some(node.id));
            let taken = kernel.size() - kernel.minus(&usable).size();
            total_of_slice(&mut claim, number, total, bytes, taken);
            claim.seen(format!("node {number}: EGM, {bytes} bytes present, MemTotal {total} bytes"));
            egm += total;
        }
        distances(&mut claim, plan, node, &sysfs::text(file("distance"))?);
    }
    let finding = claim.finish();
    Ok(if egm > 0 { finding.with_value(mebibytes(egm), "MiB") } else { finding })
}

/// Pages present in each node, from `/proc/zoneinfo`.
fn present_pages(text: &str) -> BTreeMap<u32, u64> {
    let mut pages = BTreeMap::new();
    let mut node = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("Node ") {
            node = rest.split(',').next().and_then(|n| n.parse::<u32>().ok());
        } else if let (Some(node), Some(count)) = (node, line.trim().strip_prefix("present ")) {
            *pages.entry(node).or_insert(0u64) += count.trim().parse::<u64>().unwrap_or(0);
        }
    }
    pages
}

/// All usable bytes of a node are present; what lies below 1 MiB may be kept by firmware and kernel.
fn size(claim: &mut Claim, plan: &Plan, node: &Node, present: u64) {
    let usable: SpanSet<_> = plan.usable(Some(node.id));
    let (least, most) = (usable.minus(&first_mebibyte()).size(), usable.size());
    claim.holds((least..=most).contains(&present), || {
        format!("node {} has {present:#x} bytes present, planned {least:#x} to {most:#x}", node.id)
    });
}

/// `MemTotal` of a node that has `present` bytes, `taken` of them by the kernel's image.
fn total_of_slice(claim: &mut Claim, number: u32, total: u64, present: u64, taken: u64) {
    let least = (present / 20 * 19).saturating_sub(taken);
    claim.holds((least..=present).contains(&total) && total > 0, || {
        format!("node {number} has MemTotal {total:#x}, not 95 % of its slice of {present:#x} bytes, {taken:#x} of them the kernel's image")
    });
}

/// The `distance` line of a node has the planned distances, in Linux's order of nodes.
fn distances(claim: &mut Claim, plan: &Plan, node: &Node, line: &str) {
    let Some(row) = plan.nodes.iter().position(|n| n.id == node.id) else { return };
    let mut planned: Vec<(u32, Option<u8>)> = plan
        .nodes
        .iter()
        .enumerate()
        .filter_map(|(column, to)| {
            let distance = plan.distances.get(row).and_then(|row| row.get(column)).copied();
            plan.linux_node(to.id).map(|number| (number, distance))
        })
        .collect();
    planned.sort_unstable();
    let planned: Vec<_> = planned.into_iter().map(|(_, distance)| distance).collect();
    let is: Vec<Option<u8>> = line.split_whitespace().map(|n| n.parse().ok()).collect();
    claim.equal(format!("distances from node {}", node.id), &is, &planned);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::q35;

    #[test]
    fn present_pages_are_summed_over_the_zones_of_a_node() {
        let pages = present_pages(include_str!("../../fixtures/q35/zoneinfo"));
        assert_eq!(pages, BTreeMap::from([(0, 3998 + 126_976), (1, 0xffd9)]));
    }

    #[test]
    fn an_egm_node_has_exactly_its_slice_and_the_first_node_may_lack_low_memory() {
        let judged = |index: usize, present| {
            let (plan, mut claim) = (q35(), Claim::default());
            size(&mut claim, &plan, &plan.nodes[index], present);
            claim.is_true()
        };
        assert!(judged(1, 0xffd_9000));
        assert!(!judged(1, 0xffd_8000) && !judged(1, 0xffd_a000));
        assert!(
            judged(0, (3998 + 126_976) * 4096) && !judged(0, 510 << 20) && !judged(0, (512 << 20) + 4096)
        );
    }

    #[test]
    fn a_node_may_spend_a_twentieth_of_a_slice_on_the_kernel() {
        let judged = |total, taken| {
            let mut claim = Claim::default();
            total_of_slice(&mut claim, 1, total, 1000, taken);
            claim.is_true()
        };
        assert!(judged(950, 0) && judged(1000, 0) && !judged(949, 0) && !judged(1001, 0));
        assert!(judged(750, 200) && !judged(749, 200));
    }

    #[test]
    fn distances_are_compared_in_linuxs_order() {
        let judged = |line| {
            let (plan, mut claim) = (q35(), Claim::default());
            distances(&mut claim, &plan, &plan.nodes[1], line);
            claim.is_true()
        };
        assert!(judged("40 10\n") && !judged("10 40\n") && !judged("40\n") && !judged("40 x\n"));
    }
}
