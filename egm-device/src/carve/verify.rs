//! Whether a split is in effect: the host after the reboot, compared with what was advised.

use egm_address::{Host, Span};
use egm_report::show::size;
use serde::Serialize;

use crate::carve::advise::{HiddenPiece, NodeSplit, Split, SplitMethod};
use crate::region::{HostFacts, Region, RegionKind, Survey, iomem};

/// One check of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SplitCheck {
    /// Expected state, as text.
    pub what: String,
    /// State that was found, as text.
    pub found: String,
    /// Whether the state is as expected.
    pub ok: bool,
}

fn check(what: String, found: impl Into<String>, ok: bool) -> SplitCheck {
    SplitCheck { what, found: found.into(), ok }
}

/// Checks all that `split` changes: the command line, the kernel's memory map, memory of its nodes, regions.
#[must_use]
pub fn verify(split: &Split, now: &Survey) -> Vec<SplitCheck> {
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

fn added(word: &str, words: &[&str]) -> SplitCheck {
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

fn unused(span: Span<Host>, facts: &HostFacts) -> SplitCheck {
    let what = format!("{span} is not the kernel's");
    if facts.iomem.is_empty() {
        return check(what, "/proc/iomem shows addresses to root only", false);
    }
    // Device-DAX has a line of its own below the persistent memory that it is made of.
    let system = facts.iomem.iter().find(|line| line.is_system_ram() && line.span.overlaps(span));
    match system.or_else(|| iomem::in_the_way(&facts.iomem, span).filter(|line| line.depth == 0)) {
        Some(line) => check(what, line.to_string(), false),
        None => check(what, "unused", true),
    }
}

/// Whether the node's kernel has what it keeps. It has less than was left to it: page tables of its own, crash kernels and
/// firmware take up to an eighth and 512 MiB. hugetlb pages stay counted, so they permit no check.
fn visible(node: &NodeSplit, ways: &[SplitMethod], facts: &HostFacts) -> Option<SplitCheck> {
    if ways.contains(&SplitMethod::Hugetlb) {
        return None;
    }
    let keeps = node.keeps.get();
    let least = keeps.saturating_sub(keeps / 8).saturating_sub(512 << 20);
    let total = facts.nodes.iter().find(|n| n.id == node.node).map_or(0, |n| n.total.get());
    let what = format!("node {} keeps {}, more or less", node.node, size(keeps).trim_start_matches('~'));
    Some(check(what, format!("MemTotal {}", size(total)), (least..=keeps).contains(&total)))
}

/// Whether regions give guests this piece.
fn reached(piece: &HiddenPiece, regions: &[Region]) -> SplitCheck {
    let fits = |region: &&Region| {
        let kind = match piece.how {
            SplitMethod::Dax => matches!(region.kind, RegionKind::Devdax { .. }),
            _ => matches!(region.kind, RegionKind::Reserved { .. }),
        };
        kind && region.span().is_some_and(|span| piece.span.covers(span))
    };
    let found: u64 = regions.iter().filter(fits).map(|region| region.size.get()).sum();
    // A device-DAX namespace loses up to two pages of its alignment to its own description.
    let lost = if piece.how == SplitMethod::Dax { (2 << 30).min(piece.span.size() / 2) } else { 0 };
    let what =
        format!("guests get {} at {} ({})", size(piece.span.size()), piece.span.start(), piece.how.name());
    let text = match (found, piece.how) {
        (0, SplitMethod::Dax) => "no region: run the commands of the advice".to_owned(),
        (0, _) => "no region: write the host file of the advice".to_owned(),
        _ => size(found),
    };
    // No piece is empty, and half of its bytes at most may be lost: no region at all is never enough.
    check(what, text, found >= piece.span.size().saturating_sub(lost))
}

/// Whether regions give guests the promised amount, where the split names no place.
fn amount(node: &NodeSplit, how: SplitMethod, regions: &[Region]) -> SplitCheck {
    let kind = |region: &Region| match how {
        SplitMethod::Hugetlb => region.kind == RegionKind::Hugetlb,
        _ => matches!(region.kind, RegionKind::Egm { .. }),
    };
    let here = regions.iter().filter(|region| kind(region) && region.node == Some(node.node));
    let found: u64 = here.map(|region| region.size.get()).sum();
    let guests = node.guests.get();
    // Firmware keeps some of it for itself.
    let lost = if how == SplitMethod::Firmware { guests / 8 } else { 0 };
    let what = format!("guests get {} at node {} ({})", size(guests), node.node, how.name());
    check(what, size(found), found >= guests.saturating_sub(lost) && found > 0)
}

#[cfg(test)]
mod tests {
    use egm_address::{ByteSize, CpuSet, Hpa};

    use super::*;
    use crate::region::{DaxFiles, Node};
    use crate::retired::Retired;

    const GIB: u64 = 1 << 30;

    fn region(kind: RegionKind, node: u32, base: Option<u64>, size: u64) -> Region {
        Region {
            name: "r".to_owned(),
            kind,
            node: Some(node),
            size: ByteSize::new(size),
            page_size: ByteSize::new(2 << 20),
            base: base.map(Hpa::new),
            functions: Vec::new(),
            retired: Retired::new([], size, 1 << 16),
        }
    }

    fn reserved(base: u64, size: u64) -> Region {
        region(RegionKind::Reserved { device: "/dev/mem".into() }, 0, Some(base), size)
    }

    fn dax(base: u64, size: u64) -> Region {
        let kind = RegionKind::Devdax { device: "/dev/dax0.0".into(), files: DaxFiles::Static };
        region(kind, 0, Some(base), size)
    }

    fn egm(node: u32, size: u64) -> Region {
        region(RegionKind::Egm { device: "/dev/egm4".into() }, node, None, size)
    }

    fn piece(how: SplitMethod, start: u64, size: u64) -> HiddenPiece {
        HiddenPiece { how, span: Span::new(Hpa::new(start), size).unwrap() }
    }

    fn node(keeps: u64, guests: u64) -> NodeSplit {
        NodeSplit { node: 0, keeps: ByteSize::new(keeps), guests: ByteSize::new(guests), hidden: Vec::new() }
    }

    #[test]
    fn a_node_may_miss_an_eighth_and_512_mib_of_what_it_keeps_and_have_no_more() {
        let seen = |keeps: u64, total: u64| {
            let total = ByteSize::new(total);
            let host = |id| Node { id, cpus: CpuSet::default(), total, pools: Vec::new() };
            let facts = HostFacts { nodes: vec![host(0)], ..HostFacts::default() };
            visible(&node(keeps, 0), &[SplitMethod::Mem], &facts).unwrap().ok
        };
        let least = 7 * GIB - (512 << 20);
        for (total, ok) in [(least - 1, false), (least, true), (8 * GIB, true), (8 * GIB + 1, false)] {
            assert_eq!(seen(8 * GIB, total), ok, "{total}");
        }
        assert_eq!(visible(&node(GIB, 0), &[SplitMethod::Hugetlb], &HostFacts::default()), None);
    }

    #[test]
    fn reserved_memory_counts_when_it_lies_in_the_piece_and_is_whole() {
        let whole = piece(SplitMethod::Memmap, 4 * GIB, 4 * GIB);
        for (regions, ok) in [
            (vec![], false),
            (vec![reserved(4 * GIB, 4 * GIB)], true),
            (vec![reserved(4 * GIB, 2 * GIB), reserved(6 * GIB, 2 * GIB)], true),
            (vec![reserved(4 * GIB, 4 * GIB - 1)], false),
            (vec![reserved(3 * GIB, 4 * GIB)], false),
            (vec![dax(4 * GIB, 4 * GIB)], false),
        ] {
            assert_eq!(reached(&whole, &regions).ok, ok, "{regions:?}");
        }
    }

    #[test]
    fn device_dax_may_lose_2_gib_or_half_of_a_small_piece_and_must_exist() {
        for (size, found, ok) in [
            (8 * GIB, 6 * GIB, true),
            (8 * GIB, 6 * GIB - 1, false),
            (2 * GIB, GIB, true),
            (2 * GIB, GIB - 1, false),
            (1, 1, true),
        ] {
            assert_eq!(
                reached(&piece(SplitMethod::Dax, GIB, size), &[dax(GIB, found)]).ok,
                ok,
                "{found} of {size}"
            );
        }
        assert!(!reached(&piece(SplitMethod::Dax, GIB, 8 * GIB), &[]).ok);
        assert!(!reached(&piece(SplitMethod::Dax, GIB, 8 * GIB), &[reserved(GIB, 8 * GIB)]).ok);
    }

    #[test]
    fn firmware_may_keep_an_eighth_and_a_pool_nothing() {
        for (how, found, ok) in [
            (SplitMethod::Firmware, egm(0, 7 * GIB), true),
            (SplitMethod::Firmware, egm(0, 7 * GIB - 1), false),
            (SplitMethod::Firmware, egm(1, 8 * GIB), false),
            (SplitMethod::Firmware, region(RegionKind::Hugetlb, 0, None, 8 * GIB), false),
            (SplitMethod::Hugetlb, region(RegionKind::Hugetlb, 0, None, 8 * GIB), true),
            (SplitMethod::Hugetlb, region(RegionKind::Hugetlb, 0, None, 8 * GIB - 1), false),
            (SplitMethod::Hugetlb, egm(0, 8 * GIB), false),
        ] {
            assert_eq!(
                amount(&node(0, 8 * GIB), how, std::slice::from_ref(&found)).ok,
                ok,
                "{how:?} {found:?}"
            );
        }
        assert!(!amount(&node(0, 0), SplitMethod::Hugetlb, &[]).ok, "no region is no success");
    }

    #[test]
    fn a_word_that_lost_its_dollar_sign_is_recognised() {
        let word = "memmap=4G$8G";
        assert!(added(word, &["quiet", word]).ok);
        for (words, eaten) in
            [(vec!["memmap=4G8G"], true), (vec!["memmap=4G$9G"], false), (vec!["quiet"], false)]
        {
            let check = added(word, &words);
            assert_eq!(
                (check.ok, check.found.contains("boot loader took the $")),
                (false, eaten),
                "{words:?}"
            );
        }
    }

    fn line(start: u64, size: u64, depth: u8, name: &str) -> iomem::Resource {
        iomem::Resource { span: Span::new(Hpa::new(start), size).unwrap(), depth, name: name.to_owned() }
    }

    /// A host with 8 GiB for its kernel, and 4 GiB above them for guests.
    fn split_host() -> Survey {
        let total = ByteSize::new(8 * GIB);
        let host = HostFacts {
            command_line: "quiet memmap=4G$8G".to_owned(),
            iomem: vec![line(0, 8 * GIB, 0, "System RAM"), line(8 * GIB, 4 * GIB, 0, "Reserved")],
            nodes: vec![Node { id: 0, cpus: CpuSet::default(), total, pools: Vec::new() }],
            ..HostFacts::default()
        };
        Survey { host, regions: vec![reserved(8 * GIB, 4 * GIB)], refused: Vec::new() }
    }

    #[test]
    fn each_part_of_a_split_has_a_check_that_only_it_fails() {
        let split = Split {
            ways: vec![SplitMethod::Memmap],
            words: vec!["memmap=4G$8G".to_owned()],
            remove: vec!["mem=4G".to_owned()],
            nodes: vec![NodeSplit {
                hidden: vec![piece(SplitMethod::Memmap, 8 * GIB, 4 * GIB)],
                ..node(8 * GIB, 4 * GIB)
            }],
            ..Split::default()
        };
        let failed = |now: &Survey| {
            let checks = verify(&split, now);
            assert_eq!(checks.len(), 5);
            checks.into_iter().filter(|check| !check.ok).map(|check| check.what).collect::<Vec<_>>()
        };
        assert_eq!(failed(&split_host()), [""; 0]);
        let changed = |change: fn(&mut Survey)| {
            let mut now = split_host();
            change(&mut now);
            failed(&now)
        };
        let word = changed(|now| now.host.command_line = "memmap=1G$8G".to_owned());
        assert_eq!(word, ["/proc/cmdline has memmap=4G$8G"]);
        assert_eq!(changed(|now| now.host.command_line.push_str(" mem=4G")), ["mem=4G is gone"]);
        let used = ["0x200000000..0x300000000 is not the kernel's"];
        assert_eq!(changed(|now| now.host.iomem[1].name = "System RAM".to_owned()), used);
        assert_eq!(changed(|now| now.host.iomem.clear()), used, "no addresses prove nothing");
        let seen = changed(|now| now.host.nodes[0].total = ByteSize::new(9 * GIB));
        assert_eq!(seen, ["node 0 keeps 8 GiB, more or less"]);
        assert_eq!(changed(|now| now.regions.clear()).len(), 1);
    }

    #[test]
    fn a_pool_or_egm_is_checked_by_its_amount_and_places_are_not() {
        let split = |how| Split { ways: vec![how], nodes: vec![node(8 * GIB, 4 * GIB)], ..Split::default() };
        let checks = |how| verify(&split(how), &split_host()).len();
        assert_eq!(
            [SplitMethod::Mem, SplitMethod::Memmap, SplitMethod::Dax].map(checks),
            [1; 3],
            "of the kernel's memory only"
        );
        assert_eq!((checks(SplitMethod::Firmware), checks(SplitMethod::Hugetlb)), (2, 1));
    }

    #[test]
    fn memory_is_unused_when_no_ram_of_the_kernel_and_no_device_is_there() {
        let ok = |lines: &[iomem::Resource]| {
            let facts = HostFacts { iomem: lines.to_vec(), ..HostFacts::default() };
            unused(Span::new(Hpa::new(8 * GIB), 4 * GIB).unwrap(), &facts).ok
        };
        let ram = line(0, 8 * GIB, 0, "System RAM");
        assert!(ok(std::slice::from_ref(&ram)), "below it");
        assert!(!ok(&[ram.clone(), line(11 * GIB, 2 * GIB, 0, "System RAM")]));
        assert!(!ok(&[ram.clone(), line(9 * GIB, GIB, 0, "PCI Bus 0000:00")]));
        let pmem = line(8 * GIB, 4 * GIB, 0, "Persistent Memory (legacy)");
        assert!(ok(&[ram, pmem, line(8 * GIB, 4 * GIB, 1, "dax0.0")]));
    }

    #[test]
    fn a_piece_without_a_region_names_the_next_step() {
        let found = |how| reached(&piece(how, GIB, GIB), &[]).found;
        assert!(found(SplitMethod::Dax).ends_with("run the commands of the advice"));
        assert!(found(SplitMethod::Memmap).ends_with("write the host file of the advice"));
        assert_eq!(
            reached(&piece(SplitMethod::Memmap, GIB, 2 * GIB), &[reserved(GIB, GIB)]).found,
            size(GIB)
        );
    }
}
