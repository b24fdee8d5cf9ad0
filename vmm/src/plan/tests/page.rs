//! The page for a browser and the text for a terminal: the same facts in both.

use std::path::Path;

use super::assigned::three_gpus;
use super::*;
use crate::config::Access;
use crate::{config, facts};

/// A plan with every section: memory of a GPU, a slice, a node without memory, access figures, pinned vCPUs.
fn full() -> (Plan, Facts) {
    let mut spec = config::load(Path::new("../configs/gh200.json")).unwrap();
    let mut facts = facts::load(Path::new("../configs/facts/gh200.json")).unwrap();
    facts.nodes.iter_mut().for_each(|node| node.cpus = "0-143".parse().unwrap());
    spec.cpus.affinity = (0..spec.cpus.count).map(|_| "4-7".parse().unwrap()).collect();
    spec.cpus.affinity[1] = "8".parse().unwrap();
    let mut plan = plan(&spec, &facts).unwrap();
    let last = plan.nodes.last().unwrap().clone();
    let access = vec![Access { from: 0, latency_ns: 90, bandwidth_mbps: 1000 }];
    for (id, egm) in [(62, true), (63, false)] {
        let access = access.clone();
        plan.nodes.push(NodePlan { id, memory: 0, egm, initiator: None, access, ..last.clone() });
        plan.distances.iter_mut().for_each(|row| row.push(30));
        plan.distances.push(vec![30; plan.nodes.len()]);
    }
    (plan, facts)
}

/// The words of the section of `page` with this heading, markup removed.
fn section(page: &str, heading: &str) -> Vec<String> {
    let start = page.find(&format!("<h2>{heading}</h2>")).unwrap_or_else(|| panic!("no section {heading}"));
    let section = &page[start..start + page[start..].find("</section>").unwrap()];
    let (_, section) = section.split_once("</h2>").unwrap();
    let texts = section.split('<').map(|piece| piece.split_once('>').map_or(piece, |(_, text)| text));
    let text = texts.collect::<Vec<_>>().join(" ");
    let text = text.replace("&quot;", "\"").replace("&#39;", "'").replace("&amp;", "&");
    text.split_whitespace().map(str::to_owned).collect()
}

/// The words of the part of `text` with this heading, branches of trees removed.
fn part(text: &str, heading: &str) -> Vec<String> {
    let (_, part) = text.split_once(&format!("\n{heading}\n")).unwrap();
    let part = part.split("\n\n").next().unwrap();
    let words = part.split_whitespace().filter(|word| !word.starts_with(['│', '├', '└']));
    words.map(str::to_owned).collect()
}

#[test]
fn the_page_has_the_tables_of_the_text() {
    let (plan, facts) = full();
    let view = View::of(&facts);
    let (page, text) = (html(&plan, &view), text(&plan, &view));
    for (heading, of_text) in [
        ("Memory map", "Guest physical memory"),
        ("Backing", "Backing"),
        ("Host functions", "Host functions"),
        ("NUMA nodes", "NUMA nodes"),
        ("Distances", "Distances"),
        ("Memory access", "Memory access"),
        ("Pinning", "Pinning"),
        ("Lines and ports", "Lines and ports"),
    ] {
        assert_eq!(section(&page, heading), part(&text, of_text), "{heading}");
    }
    // The text joins a name and its place by "at" and a comma.
    let bare = |words: Vec<String>| {
        let words = words.into_iter().filter(|word| word != "at");
        words.map(|word| word.trim_end_matches(',').to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(bare(section(&page, "PCI")), bare(part(&text, "PCI")));
    let kinds = section(&page, "NUMA nodes").join(" ");
    for kind in ["GPU memory", "EGM", "no memory", "RAM"] {
        assert!(kinds.contains(kind), "{kind}: {kinds}");
    }
    for class in ["ram", "pci", "system", "free"] {
        assert!(page.contains(&format!("<tr class=\"address {class}\">")), "{class}");
    }
}

#[test]
fn memory_without_distances_to_processors_belongs_to_no_socket() {
    let (mut plan, facts) = full();
    plan.distances.clear();
    let page = html(&plan, &View::of(&facts));
    assert!(page.contains("Socket 0: ") && page.contains("No socket: "), "{page}");
}

#[test]
fn sections_of_nothing_are_left_out() {
    let facts = facts();
    let plan = plan(&spec(vec![node(0, GIB, "0")]), &facts).unwrap();
    let (page, text) = (html(&plan, &View::of(&facts)), text(&plan, &View::of(&facts)));
    for heading in ["Host functions", "Memory access", "Pinning"] {
        assert!(!page.contains(&format!("<h2>{heading}</h2>")), "{heading}");
        assert!(!text.contains(&format!("\n{heading}\n")), "{heading}");
    }
    assert!(!text.contains("of EGM"), "{text}");
}

#[test]
fn a_terminal_with_colours_shows_devices_in_another_colour_than_ports() {
    let (spec, facts) = three_gpus();
    let plan = plan(&spec, &facts).unwrap();
    let text = text(&plan, &View { screen: Screen::coloured(120), ..View::of(&facts) });
    let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap();
    assert!(line("vfio0: ").contains("\u{1b}[") && !line("root port, slot 1").contains("\u{1b}["), "{text}");
}

#[test]
fn vcpus_in_a_row_with_the_same_host_cpus_are_one_line() {
    let (mut plan, facts) = full();
    let pinning = |plan: &Plan| part(&text(plan, &View::of(&facts)), "Pinning").join(" ");
    assert_eq!(pinning(&plan), "vCPU host CPUs 0 4-7 1 8 2-3 4-7");
    plan.vcpus[1].host_cpus = None;
    assert_eq!(pinning(&plan), "vCPU host CPUs 0 4-7 2-3 4-7");
}

#[test]
fn a_distance_is_as_dark_as_it_is_far() {
    let (plan, facts) = full();
    let page = html(&plan, &View { wide: true, ..View::of(&facts) });
    let farthest = plan.distances.iter().flatten().copied().max().unwrap();
    let cells = page.split("--heat: ").skip(1).map(|cell| {
        let (heat, rest) = cell.split_once("%\">").unwrap();
        let (distance, _) = rest.split_once('<').unwrap();
        (distance.parse::<u8>().unwrap(), heat.parse::<u32>().unwrap())
    });
    let mut cells: Vec<_> = cells.collect();
    cells.sort_unstable();
    assert!(cells.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{cells:?}");
    assert_eq!((cells[0], cells[cells.len() - 1]), ((10, 0), (farthest, 100)));
}

#[test]
fn memory_of_sockets_is_drawn_to_one_scale_and_the_map_once() {
    let spec = config::load(Path::new("../configs/gb200-nvl4-egm.json")).unwrap();
    let facts = facts::load(Path::new("../configs/facts/grace.json")).unwrap();
    let page = html(&plan(&spec, &facts).unwrap(), &View::of(&facts));
    // 256 GiB and about 16 GiB of 272 GiB, which are 280 pixels.
    let bar = "<i class=\"egm\" style=\"height: 263px\"></i><i class=\"ram\" style=\"height: 16px\"></i>";
    assert_eq!(page.matches(bar).count(), 2, "{page}");
    for socket in ["<figcaption>Socket 0: ", "<figcaption>Socket 1: "] {
        assert_eq!(page.matches(socket).count(), 1, "{socket}");
    }
    assert_eq!(page.matches("0x0004840000000</td><td>0x0008840000000").count(), 1, "a slice in the map");
    assert!(!page.contains("<svg"));
}

#[test]
fn a_page_lacks_the_kernels_command_line() {
    let (mut spec, facts) = (spec(vec![node(0, GIB, "0")]), facts());
    spec.boot.cmdline = "console=ttyS0 password=secret".to_owned();
    let plan = plan(&spec, &facts).unwrap();
    assert!(!html(&plan, &View::of(&facts)).contains("secret"));
}
