//! `egm-device regions --html`: the host's memory as a page, with a bar for each socket.

use egm_address::{Host, Hpa, InRegion, Offset, Span, SpanSet};
use egm_report::show::page::{ScaledBar, ScaledPiece, bars, legend, page};
use egm_report::show::{counted, size};

use crate::cli::tables::{refused_table, region_table, slice_table, socket_table};
use crate::region::usage::{RegionPart, Socket, Usage, Usages};
use crate::region::{Region, RegionKind, Survey};

const COLOURS: [(&str, &str); 6] = [
    ("ram", "kernel"),
    ("egm", "free for guests"),
    ("granted", "granted"),
    ("system", "dirty"),
    ("bad", "retired"),
    ("hidden", "hidden, of no region"),
];

/// Pieces of a region that are drawn by address; more are drawn as one piece for each state.
const MOST_PIECES: usize = 32;

/// Smaller pieces of hidden memory are the firmware's own odds and ends.
const LEAST_HIDDEN: u64 = 2 << 20;

/// The page. The kernel's command line is in it only if `with_command_line`: it can have secrets, and pages are shared.
pub(super) fn html(survey: &Survey, sockets: &[Socket], usages: &Usages, with_command_line: bool) -> String {
    let host = &survey.host;
    let heading = if host.product.is_empty() { "This host" } else { &host.product };
    let sum =
        |of: fn(&Socket) -> u64| size(sockets.iter().fold(0, |sum, socket| sum.saturating_add(of(socket))));
    let facts = [
        host.arch.clone(),
        format!("{} in all", sum(|socket| socket.total.get())),
        format!("{} visible to the kernel", sum(|socket| socket.visible.get())),
        format!("{} invisible", sum(|socket| socket.invisible.get())),
    ];
    let drawn: Vec<ScaledBar> = sockets.iter().map(|socket| bar(survey, usages, socket)).collect();
    let main = format!(
        "{}\n{}{}{}{}{}",
        legend(&COLOURS),
        bars("Memory by socket", &drawn),
        socket_table(sockets).html("Sockets"),
        region_table(survey, usages).html("Regions"),
        slice_table(usages).map_or_else(String::new, |table| table.html("Slices")),
        refused_table(survey).map_or_else(String::new, |table| table.html("Refused")),
    );
    let description = if with_command_line && !host.command_line.is_empty() {
        format!("Kernel command line: {}", host.command_line)
    } else {
        String::new()
    };
    page("Host memory", heading, &description, &facts, &main)
}

/// The memory of a socket, lowest address first; memory at unknown addresses comes last.
fn bar(survey: &Survey, usages: &Usages, socket: &Socket) -> ScaledBar {
    let name =
        socket.node.map_or_else(|| "Memory of no known node".to_owned(), |node| format!("Node {node}"));
    let regions = || survey.regions.iter().filter(move |region| socket.has(region));
    let pools = regions().filter(|region| region.kind == RegionKind::Hugetlb);
    let in_pools = pools.fold(0u64, |sum, pool| sum.saturating_add(pool.size.get()));
    let mut blocks = kernel(survey, socket, in_pools);
    blocks.extend(regions().flat_map(|region| pieces(region, usages.get(&region.name))));
    blocks.extend(without_region(survey, socket));
    blocks.sort_by_key(|block| (block.start.is_none(), block.start));
    blocks.dedup_by(|next, block| block.absorb(next));
    let bytes = blocks.iter().fold(0u64, |sum, block| sum.saturating_add(block.bytes));
    ScaledBar {
        title: format!("{name}: {}", size(bytes)),
        pieces: blocks.into_iter().map(Block::piece).collect(),
    }
}

/// A part of a socket's memory.
struct Block {
    start: Option<Hpa>,
    bytes: u64,
    class: &'static str,
    what: String,
    detail: String,
}

impl Block {
    /// Adds `next` if both have the same name and state.
    fn absorb(&mut self, next: &Self) -> bool {
        let is_same = (self.class, &self.what, &self.detail) == (next.class, &next.what, &next.detail);
        if is_same {
            self.bytes = self.bytes.saturating_add(next.bytes);
        }
        is_same
    }

    fn piece(self) -> ScaledPiece {
        let hint = self.start.map_or_else(|| "address not known".to_owned(), |start| format!("from {start}"));
        let label = format!("{}: {}, {}", self.what, size(self.bytes), self.detail);
        ScaledPiece { class: self.class, bytes: self.bytes, label, hint }
    }
}

/// The part of `spans` at the socket: all of it on a host of one node, otherwise by ACPI's affinity.
fn here(survey: &Survey, socket: &Socket, spans: &SpanSet<Host>) -> SpanSet<Host> {
    if survey.host.nodes.len() == 1 && socket.node.is_some() {
        return spans.clone();
    }
    let affinity = survey.host.affinity.iter().filter(|affinity| Some(affinity.node) == socket.node);
    spans.minus(&spans.minus(&affinity.map(|affinity| affinity.span).collect()))
}

/// The kernel's memory without its huge pages: their addresses are not known, and they are regions.
fn kernel(survey: &Survey, socket: &Socket, in_pools: u64) -> Vec<Block> {
    let block = |start, bytes, detail: &str| Block {
        start,
        bytes,
        class: "ram",
        what: "kernel".to_owned(),
        detail: detail.to_owned(),
    };
    let known = here(survey, socket, &survey.host.system_ram());
    let mut blocks: Vec<Block> = if known.is_empty() && socket.visible.get() > 0 {
        vec![block(None, socket.visible.get(), "at addresses that are not known")]
    } else {
        known.iter().map(|span| block(Some(span.start()), span.size(), "System RAM")).collect()
    };
    if let Some(largest) = blocks.iter_mut().max_by_key(|block| block.bytes) {
        largest.bytes = largest.bytes.saturating_sub(in_pools);
    }
    blocks
}

/// RAM that the firmware counts, the kernel does not have and no region names.
fn without_region(survey: &Survey, socket: &Socket) -> Vec<Block> {
    let host = &survey.host;
    let firmware: SpanSet<Host> = host.firmware.iter().copied().collect();
    let regions = survey.regions.iter().filter_map(Region::span);
    let named: SpanSet<Host> = host.system_ram().iter().chain(regions).collect();
    let left = here(survey, socket, &firmware.minus(&named));
    let block = |span: Span<Host>| Block {
        start: Some(span.start()),
        bytes: span.size(),
        class: "hidden",
        what: "hidden".to_owned(),
        detail: "of no region".to_owned(),
    };
    left.iter().filter(|span| span.size() >= LEAST_HIDDEN).map(block).collect()
}

fn span(part: RegionPart) -> Option<Span<InRegion>> {
    Span::new(Offset::new(part.offset), part.size.get()).ok()
}

/// Bytes of a region in one state.
struct RegionPiece {
    span: Span<InRegion>,
    class: &'static str,
    detail: String,
}

impl RegionPiece {
    fn block(self, region: &Region) -> Block {
        Block {
            start: region.base.and_then(|base| base.checked_add(self.span.start().get())),
            bytes: self.span.size(),
            class: self.class,
            what: region.name.clone(),
            detail: self.detail,
        }
    }
}

/// Pieces of a region, of which the first one added for a byte has it.
struct RegionPieces {
    left: SpanSet<InRegion>,
    pieces: Vec<RegionPiece>,
}

impl RegionPieces {
    fn add(&mut self, spans: &SpanSet<InRegion>, class: &'static str, detail: &str) {
        let new = self.left.minus(&self.left.minus(spans));
        self.left = self.left.minus(&new);
        self.pieces.extend(new.iter().map(|span| RegionPiece { span, class, detail: detail.to_owned() }));
    }
}

/// A region in pieces: retired, granted, dirty, and the rest.
fn pieces(region: &Region, usage: Option<&Usage>) -> Vec<Block> {
    let whole: SpanSet<InRegion> = Span::new(Offset::new(0), region.size.get()).into_iter().collect();
    let mut all = RegionPieces { left: whole.clone(), pieces: Vec::new() };
    all.add(region.retired.spans(), "bad", "retired");
    for held in usage.iter().flat_map(|usage| &usage.held) {
        all.add(&span(held.part).into_iter().collect(), "granted", &format!("granted to {}", held.owner));
    }
    let dirty = usage.iter().flat_map(|usage| &usage.dirty).filter_map(|part| span(*part));
    all.add(&dirty.collect(), "system", "dirty");
    all.add(&whole, "egm", detail(region));
    all.pieces.sort_by_key(|piece| piece.span);
    let count = all.pieces.len();
    let blocks: Vec<Block> = all.pieces.into_iter().map(|piece| piece.block(region)).collect();
    if count > MOST_PIECES { by_state(blocks) } else { blocks }
}

/// One block for each state, at the first place of that state. What is granted to several owners is one block.
fn by_state(blocks: Vec<Block>) -> Vec<Block> {
    let mut states: Vec<(u64, Block)> = Vec::new();
    for block in blocks {
        match states.iter_mut().find(|(_, state)| state.class == block.class) {
            Some((count, state)) => {
                *count = count.saturating_add(1);
                state.bytes = state.bytes.saturating_add(block.bytes);
            }
            None => states.push((1, block)),
        }
    }
    let summed = |(count, block): (u64, Block)| {
        let state = if block.class == "granted" { "granted".to_owned() } else { block.detail };
        let detail = if count > 1 { format!("{state}, in {}", counted(count, "piece")) } else { state };
        Block { detail, ..block }
    };
    states.into_iter().map(summed).collect()
}

/// Words for the free bytes of a region.
fn detail(region: &Region) -> &'static str {
    match region.kind {
        RegionKind::Hugetlb => "hugetlb, part of the kernel's memory",
        _ => region.kind.word(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use egm_address::ByteSize;

    use super::*;
    use crate::region::usage::{OwnedPart, sockets};
    use crate::retired::Retired;

    const MIB: u64 = 1 << 20;

    fn part(offset: u64, size: u64) -> RegionPart {
        RegionPart { offset, size: ByteSize::new(size) }
    }

    /// A host of one node with 8 MiB of System RAM and 32 MiB hidden from it.
    fn survey() -> Survey {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("proc/cmdline", "<i> mem=16M"),
            ("proc/iomem", "00000000-007fffff : System RAM\n"),
            ("proc/meminfo", "MemTotal: 8000 kB\n"),
        ] {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let file =
            r#"{"regions": [{"name": "hidden", "base": "0x1000000", "size": "32MiB", "trusted": true}]}"#;
        let mut survey = Survey::of(root.path(), &[serde_json::from_str(file).unwrap()]);
        survey.regions[0].retired = Retired::new([(30 * MIB, 4096)], 32 * MIB, 4096);
        survey
    }

    #[test]
    fn a_region_is_cut_into_what_is_retired_granted_dirty_and_free() {
        let held = vec![OwnedPart { part: part(2 * MIB, 4 * MIB), owner: "vm".to_owned() }];
        // A record that disagrees with the locks: what is held stays held.
        let usage =
            Usage { held, dirty: vec![part(0, 4 * MIB), part(30 * MIB, 4 * MIB)], ..Usage::default() };
        let survey = survey();
        let shown: Vec<_> = pieces(&survey.regions[0], Some(&usage))
            .into_iter()
            .map(|block| (block.class, block.start.unwrap().get() - 16 * MIB, block.bytes))
            .collect();
        assert_eq!(
            shown,
            [
                ("system", 0, 2 * MIB),
                ("granted", 2 * MIB, 4 * MIB),
                ("egm", 6 * MIB, 24 * MIB),
                ("bad", 30 * MIB, 4096),
                ("system", 30 * MIB + 4096, 2 * MIB - 4096),
            ]
        );
        assert_eq!(pieces(&survey.regions[0], None).iter().map(|block| block.bytes).sum::<u64>(), 32 * MIB);
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_shows_names_as_text() {
        let held =
            vec![OwnedPart { part: part(0, 4 * MIB), owner: "<script>alert('x')</script>".to_owned() }];
        let usages = Usages::from([("hidden".to_owned(), Usage { held, ..Usage::default() })]);
        let survey = survey();
        let page = html(&survey, &sockets(&survey, &usages), &usages, false);
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        for foreign in ["<script", "<i>", "<link", "@import", "url(", "src=", "http:", "https:"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        for shown in ["granted to &lt;script&gt;", "kernel: 8 MiB", "of no region", "retired", "0x1000000"] {
            assert!(page.contains(shown), "{shown}");
        }
    }

    #[test]
    fn the_kernels_command_line_is_in_the_page_on_request_only() {
        let (survey, usages) = (survey(), Usages::new());
        let page = |with| html(&survey, &sockets(&survey, &usages), &usages, with);
        assert!(!page(false).contains("mem=16M"));
        assert!(page(true).contains("<p>Kernel command line: &lt;i&gt; mem=16M</p>"));
    }

    #[test]
    fn a_socket_is_a_bar_of_all_its_memory() {
        let mut survey = survey();
        let pool = Region {
            name: "hugetlb-2m-node0".to_owned(),
            kind: RegionKind::Hugetlb,
            size: ByteSize::new(2 * MIB),
            base: None,
            retired: Retired::default(),
            ..survey.regions[0].clone()
        };
        survey.regions.push(pool);
        let usages = Usages::new();
        let bar = bar(&survey, &usages, &sockets(&survey, &usages)[0]);
        assert_eq!((bar.title.as_str(), bar.bytes()), ("Node 0: 40 MiB", 40 * MIB));
        let pieces: Vec<_> = bar.pieces.iter().map(|piece| (piece.class, piece.bytes)).collect();
        let (bad, rest) = (("bad", 4096), ("egm", 2 * MIB - 4096));
        assert_eq!(pieces, [("ram", 6 * MIB), ("egm", 30 * MIB), bad, rest, ("egm", 2 * MIB)]);
        assert_eq!(bar.pieces[0].label, "kernel: 6 MiB, System RAM");
        assert_eq!(bar.pieces[4].label, "hugetlb-2m-node0: 2 MiB, hugetlb, part of the kernel's memory");
    }

    #[test]
    fn a_region_in_many_pieces_is_drawn_by_state() {
        let held = |count: u64| {
            let part = |at| OwnedPart { part: part(at * MIB, 4096), owner: format!("vm{at}") };
            Usage { held: (0..count).map(part).collect(), ..Usage::default() }
        };
        let mut region = survey().regions.remove(0);
        region.retired = Retired::default();
        assert_eq!(pieces(&region, Some(&held(16))).len(), MOST_PIECES);
        let summed = pieces(&region, Some(&held(17)));
        let shown: Vec<_> = summed.iter().map(|b| (b.class, b.bytes, b.detail.as_str())).collect();
        let free = 32 * MIB - 17 * 4096;
        let wanted =
            [("granted", 17 * 4096, "granted, in 17 pieces"), ("egm", free, "reserved, in 17 pieces")];
        assert_eq!(shown, wanted);
    }
}
