//! `egm-device regions --html`: the host's memory as a page, one map a socket.

use egm_address::{Host, Hpa, InRegion, Offset, Span, SpanSet};
use egm_report::show::page::{Band, legend, map, page};
use egm_report::show::size;

use crate::cli::tables::{refused_table, region_table, slice_table, socket_table};
use crate::region::usage::{RegionPart, Socket, Usage, Usages};
use crate::region::{Region, RegionKind, Survey};

const COLOURS: [(&str, &str); 6] = [
    ("ram", "kernel"),
    ("egm", "for guests"),
    ("pci", "granted"),
    ("system", "dirty, or hidden without a region"),
    ("bad", "retired"),
    ("free", "not its memory"),
];

/// A region with more retired pieces than this gets a sentence instead of bands.
const MOST_RETIRED: usize = 32;

/// Smaller pieces of hidden memory are the firmware's own odds and ends.
const LEAST_HIDDEN: u64 = 2 << 20;

pub(super) fn html(survey: &Survey, sockets: &[Socket], usages: &Usages) -> String {
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
    let maps: String = sockets.iter().map(|socket| socket_map(survey, usages, socket)).collect();
    let main = format!(
        "{}\n<div class=\"maps\">\n{maps}</div>\n{}{}{}{}",
        legend(&COLOURS),
        socket_table(sockets).html("Sockets"),
        region_table(survey, usages).html("Regions"),
        slice_table(usages).map_or_else(String::new, |table| table.html("Slices")),
        refused_table(survey).map_or_else(String::new, |table| table.html("Refused")),
    );
    page("Host memory", heading, &host.command_line, &facts, &main)
}

fn socket_map(survey: &Survey, usages: &Usages, socket: &Socket) -> String {
    let (name, id) = socket.node.map_or_else(
        || ("Memory of no known node".to_owned(), "map".to_owned()),
        |node| (format!("Node {node}"), format!("map{node}")),
    );
    let here = survey.regions.iter().filter(|region| socket.has(region));
    let (placed, unplaced): (Vec<&Region>, Vec<&Region>) = here.partition(|region| region.span().is_some());
    let mut blocks = kernel(survey, socket);
    blocks.extend(placed.iter().flat_map(|region| pieces(region, usages.get(&region.name))));
    blocks.extend(without_region(survey, socket));
    blocks.sort_by_key(|block| block.start);
    let end = blocks.last().and_then(Block::end);
    let title = format!("{name}: its memory, lowest address first; the tables below say the same");
    let mut out = format!("<section>\n<h2>{name}</h2>\n<div class=\"scroll\">\n");
    out += &map(&id, &title, &bands(blocks), &end.map_or_else(String::new, |end| end.to_string()));
    let apart: Vec<Block> =
        unplaced.iter().flat_map(|region| pieces(region, usages.get(&region.name))).collect();
    if !apart.is_empty() {
        out += "</div>\n<h2>Pools, and regions whose addresses are not known</h2>\n<div class=\"scroll\">\n";
        let title = format!("{name}: pools and regions without known addresses");
        out +=
            &map(&format!("{id}-apart"), &title, &apart.into_iter().map(Block::band).collect::<Vec<_>>(), "");
    }
    out + "</div>\n<p class=\"note\">Height grows with the logarithm of the size.</p>\n</section>\n"
}

/// A part of a socket's memory.
struct Block {
    start: Option<Hpa>,
    size: u64,
    class: &'static str,
    what: String,
    detail: String,
}

impl Block {
    fn end(&self) -> Option<Hpa> {
        self.start?.checked_add(self.size)
    }

    fn band(self) -> Band {
        let start = self.start.map_or_else(String::new, |start| start.to_string());
        let hint = format!("{} {}, {} {}", start, self.what, size(self.size), self.detail);
        Band { class: self.class, start, size: self.size, what: self.what, detail: self.detail, hint }
    }
}

/// The blocks, and between them what is no memory of this socket.
fn bands(blocks: Vec<Block>) -> Vec<Band> {
    let mut bands: Vec<Band> = Vec::new();
    let mut from: Option<Hpa> = None;
    for block in blocks {
        let gap = from.zip(block.start).and_then(|(from, to)| Span::between(from, to));
        bands.extend(gap.map(|gap| {
            let what = "not its memory".to_owned();
            Block { start: Some(gap.start()), size: gap.size(), class: "free", what, detail: String::new() }
                .band()
        }));
        from = block.end();
        bands.push(block.band());
    }
    bands
}

/// The part of `spans` at the socket: all of it on a host of one node, otherwise by ACPI's affinity.
fn here(survey: &Survey, socket: &Socket, spans: &SpanSet<Host>) -> SpanSet<Host> {
    if survey.host.nodes.len() == 1 && socket.node.is_some() {
        return spans.clone();
    }
    let affinity = survey.host.affinity.iter().filter(|affinity| Some(affinity.node) == socket.node);
    spans.minus(&spans.minus(&affinity.map(|affinity| affinity.span).collect()))
}

fn kernel(survey: &Survey, socket: &Socket) -> Vec<Block> {
    let block = |start, size, detail: &str| Block {
        start,
        size,
        class: "ram",
        what: "kernel".to_owned(),
        detail: detail.to_owned(),
    };
    let known = here(survey, socket, &survey.host.system_ram());
    if known.is_empty() && socket.visible.get() > 0 {
        return vec![block(None, socket.visible.get(), "MemTotal; where is not known")];
    }
    known.iter().map(|span| block(Some(span.start()), span.size(), "System RAM")).collect()
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
        size: span.size(),
        class: "system",
        what: "hidden".to_owned(),
        detail: "no region".to_owned(),
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
            size: self.span.size(),
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
    let retired = region.retired.spans();
    let count = retired.iter().count();
    let mut all = RegionPieces { left: whole.clone(), pieces: Vec::new() };
    if count <= MOST_RETIRED {
        all.add(retired, "bad", "retired");
    }
    for held in usage.iter().flat_map(|usage| &usage.held) {
        all.add(&span(held.part).into_iter().collect(), "pci", &format!("granted to {}", held.owner));
    }
    let dirty = usage.iter().flat_map(|usage| &usage.dirty).filter_map(|part| span(*part));
    all.add(&dirty.collect(), "system", "dirty");
    let mut rest = detail(region);
    if count > MOST_RETIRED {
        rest += &format!(", with {} retired in {count} pieces", size(retired.size()));
    }
    all.add(&whole, "egm", &rest);
    all.pieces.sort_by_key(|piece| piece.span);
    all.pieces.into_iter().map(|piece| piece.block(region)).collect()
}

fn detail(region: &Region) -> String {
    let kind = region.kind.word();
    match region.kind {
        RegionKind::Hugetlb => format!("{kind}, part of the kernel's RAM"),
        _ => kind.to_owned(),
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
            .map(|block| (block.class, block.start.unwrap().get() - 16 * MIB, block.size))
            .collect();
        assert_eq!(
            shown,
            [
                ("system", 0, 2 * MIB),
                ("pci", 2 * MIB, 4 * MIB),
                ("egm", 6 * MIB, 24 * MIB),
                ("bad", 30 * MIB, 4096),
                ("system", 30 * MIB + 4096, 2 * MIB - 4096),
            ]
        );
        assert_eq!(pieces(&survey.regions[0], None).iter().map(|block| block.size).sum::<u64>(), 32 * MIB);
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_shows_names_as_text() {
        let held =
            vec![OwnedPart { part: part(0, 4 * MIB), owner: "<script>alert('x')</script>".to_owned() }];
        let usages = Usages::from([("hidden".to_owned(), Usage { held, ..Usage::default() })]);
        let survey = survey();
        let page = html(&survey, &sockets(&survey, &usages), &usages);
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        for foreign in ["<script", "<i>", "<link", "@import", "url(", "src=", "http:", "https:"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        for shown in ["granted to &lt;script&gt;", "kernel", "not its memory", "retired", "0x1000000"] {
            assert!(page.contains(shown), "{shown}");
        }
    }
}
