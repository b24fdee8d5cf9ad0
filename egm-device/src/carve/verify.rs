//! Whether a split took: the host after the reboot, compared with what was advised.

use egm_address::{Host, Span};
use serde::Serialize;

use crate::carve::advise::{How, NodeSplit, Piece, Split};
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
    let spans = split.nodes.iter().flat_map(|node| &node.hidden).map(|piece| unused(piece.span, &now.host));
    let nodes = split.nodes.iter().flat_map(|node| {
        let amount =
            split.ways.iter().filter(|how| !how.has_places()).map(|how| amount(node, *how, &now.regions));
        let pieces = node.hidden.iter().map(|piece| reached(piece, &now.regions));
        visible(node, &split.ways, &now.host).into_iter().chain(amount).chain(pieces).collect::<Vec<_>>()
    });
    added.chain(removed).chain(spans).chain(nodes).collect()
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
fn visible(node: &NodeSplit, ways: &[How], facts: &HostFacts) -> Option<Check> {
    if ways.contains(&How::Hugetlb) {
        return None;
    }
    let keeps = node.keeps.get();
    let least = keeps.saturating_sub(keeps / 8).saturating_sub(512 << 20);
    let total = facts.nodes.iter().find(|n| n.id == node.node).map_or(0, |n| n.total.get());
    let what = format!("node {} keeps {}, more or less", node.node, size(keeps).trim_start_matches('~'));
    Some(check(what, format!("MemTotal {}", size(total)), (least..=keeps).contains(&total)))
}

/// Whether regions give guests this piece.
fn reached(piece: &Piece, regions: &[Region]) -> Check {
    let fits = |region: &&Region| {
        let kind = match piece.how {
            How::Dax => matches!(region.kind, RegionKind::Devdax { .. }),
            _ => matches!(region.kind, RegionKind::Reserved { .. }),
        };
        kind && region.span().is_some_and(|span| piece.span.covers(span))
    };
    let found: u64 = regions.iter().filter(fits).map(|region| region.size.get()).sum();
    // A device-DAX namespace loses up to two pages of its alignment to its own description.
    let lost = if piece.how == How::Dax { (2 << 30).min(piece.span.size() / 2) } else { 0 };
    let what =
        format!("guests get {} at {} ({})", size(piece.span.size()), piece.span.start(), piece.how.name());
    let text = match (found, piece.how) {
        (0, How::Dax) => "no region: run the commands of the advice".to_owned(),
        (0, _) => "no region: write the host file of the advice".to_owned(),
        _ => size(found),
    };
    check(what, text, found >= piece.span.size().saturating_sub(lost) && found > 0)
}

/// Whether regions give guests as much as was promised where nobody promised a place.
fn amount(node: &NodeSplit, how: How, regions: &[Region]) -> Check {
    let kind = |region: &Region| match how {
        How::Hugetlb => region.kind == RegionKind::Hugetlb,
        _ => matches!(region.kind, RegionKind::Egm { .. }),
    };
    let here = regions.iter().filter(|region| kind(region) && region.node == Some(node.node));
    let found: u64 = here.map(|region| region.size.get()).sum();
    let guests = node.guests.get();
    // Firmware keeps some of it for itself.
    let lost = if how == How::Firmware { guests / 8 } else { 0 };
    let what = format!("guests get {} at node {} ({})", size(guests), node.node, how.name());
    check(what, size(found), found >= guests.saturating_sub(lost) && found > 0)
}
