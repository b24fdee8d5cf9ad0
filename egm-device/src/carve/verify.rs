//! Whether a split took: the host after the reboot, compared with what was advised.

use egm_address::{ByteSize, Host, Span};
use serde::Serialize;

use crate::carve::advise::{How, NodeSplit, Split};
use crate::region::{HostFacts, Region, RegionKind, Survey, iomem};
use crate::show::size;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What must be.
    pub what: String,
    /// What is.
    pub found: String,
    /// Whether that is it.
    pub ok: bool,
}

fn check(what: String, found: impl Into<String>, ok: bool) -> Check {
    Check { what, found: found.into(), ok }
}

/// Looks at everything that `split` changes: the command line, the kernel's memory map, what its nodes have, regions.
#[must_use]
pub fn verify(split: &Split, now: &Survey) -> Vec<Check> {
    let words: Vec<&str> = now.host.command_line.split_whitespace().collect();
    let added = split.words.iter().map(|word| added(word, &words));
    let removed = split.remove.iter().map(|word| {
        let there = words.contains(&word.as_str());
        check(format!("{word} is gone"), if there { "it is still there" } else { "gone" }, !there)
    });
    let spans = split.nodes.iter().flat_map(|node| &node.hidden).map(|span| unused(*span, &now.host));
    let nodes = split
        .nodes
        .iter()
        .flat_map(|node| [visible(node, split.how, &now.host), Some(guests(node, split.how, &now.regions))]);
    added.chain(removed).chain(spans).chain(nodes.flatten()).collect()
}

fn added(word: &str, words: &[&str]) -> Check {
    let what = format!("/proc/cmdline has {word}");
    if words.contains(&word) {
        return check(what, "it has", true);
    }
    let before = word.split_once('$').map(|(before, _)| before);
    let eaten = words.iter().find(|w| before.is_some_and(|before| w.starts_with(before)) && !w.contains('$'));
    match eaten {
        Some(rest) => check(what, format!("{rest}: the boot loader took the $, so quote it"), false),
        None => check(what, "it has not", false),
    }
}

fn unused(span: Span<Host>, facts: &HostFacts) -> Check {
    let what = format!("{span} is not the kernel's");
    if facts.iomem.is_empty() {
        return check(what, "/proc/iomem shows no addresses: run as root", false);
    }
    // Device-DAX has a line of its own below the persistent memory that it is made of.
    let system = facts.iomem.iter().find(|line| line.is_system_ram() && line.span.overlaps(span));
    match system.or_else(|| iomem::in_the_way(&facts.iomem, span).filter(|line| line.depth == 0)) {
        Some(line) => check(what, line.to_string(), false),
        None => check(what, "unused", true),
    }
}

/// Whether the node's kernel has what it keeps. It has less than was left to it: page tables of its own, crash kernels and
/// firmware take up to an eighth and 512 MiB. hugetlb pages stay counted, so nothing can be said there.
fn visible(node: &NodeSplit, how: How, facts: &HostFacts) -> Option<Check> {
    if how == How::Hugetlb {
        return None;
    }
    let keeps = node.keeps.get();
    let least = keeps.saturating_sub(keeps / 8).saturating_sub(512 << 20);
    let total = facts.nodes.iter().find(|n| n.id == node.node).map_or(0, |n| n.total.get());
    let what = format!("node {} keeps about {}", node.node, size(keeps));
    Some(check(what, format!("MemTotal {}", size(total)), (least..=keeps).contains(&total)))
}

/// Whether regions give guests what the split promised.
fn guests(node: &NodeSplit, how: How, regions: &[Region]) -> Check {
    let fits = |region: &&Region| match (how, &region.kind) {
        (How::Mem | How::Memmap, RegionKind::Reserved { .. }) | (How::Dax, RegionKind::Devdax { .. }) => {
            region.span().is_some_and(|s| node.hidden.iter().any(|hidden| hidden.covers(s)))
        }
        (How::Hugetlb, RegionKind::Hugetlb) | (How::Firmware, RegionKind::Egm { .. }) => {
            region.node == Some(node.node)
        }
        _ => false,
    };
    let found: u64 = regions.iter().filter(fits).map(|region| region.size.get()).sum();
    // A device-DAX namespace loses up to two pages of its alignment to its own description; firmware keeps some for itself.
    let lost = match how {
        How::Dax => node.hidden.len().saturating_mul(2 << 30),
        How::Firmware => usize::try_from(node.guests.get() / 8).unwrap_or(usize::MAX),
        _ => 0,
    };
    let least = node.guests.get().saturating_sub(u64::try_from(lost).unwrap_or(u64::MAX));
    let what = format!("guests get {} at node {}", size(node.guests.get()), node.node);
    let found_text = match (found, how) {
        (0, How::Mem | How::Memmap) => "no region: write the host file of the advice".to_owned(),
        (0, How::Dax) => "no region: run the commands of the advice".to_owned(),
        _ => size(ByteSize::new(found).get()),
    };
    check(what, found_text, found >= least && found > 0)
}
