//! Rows of equal nodes, and names of host functions.

use std::path::Path;

use super::assigned::three_gpus;
use super::*;
use crate::config::Access;
use crate::{config, facts};

/// Four GPUs of eight nodes each, beside two nodes with processors and two of EGM.
fn many_nodes() -> (Plan, Facts) {
    let spec = config::load(Path::new("../configs/gb200-nvl4-egm.json")).unwrap();
    let facts = facts::load(Path::new("../configs/facts/grace.json")).unwrap();
    (plan(&spec, &facts).unwrap(), facts)
}

/// The lines of the part of `plan`'s text with this heading, after its heads.
fn lines(plan: &Plan, view: &View<'_>, heading: &str) -> Vec<String> {
    let text = text(plan, view);
    let (_, part) = text.split_once(&format!("\n{heading}\n")).unwrap();
    part.split("\n\n").next().unwrap().lines().skip(1).map(str::to_owned).collect()
}

#[test]
fn equal_nodes_with_consecutive_numbers_share_a_row_that_names_their_gpu() {
    let (plan, facts) = many_nodes();
    let short = lines(&plan, &View::of(&facts), "NUMA nodes");
    let words = short.iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    assert_eq!(
        words.collect::<Vec<_>>(),
        [
            "0 0-3 16382 MiB RAM",
            "1 4-7 16 GiB RAM",
            "2-9 none 0 B GPU memory of gpu0 (host 0008:01:00.0)",
            "10-17 none 0 B GPU memory of gpu1 (host 0009:01:00.0)",
            "18-25 none 0 B GPU memory of gpu2 (host 0018:01:00.0)",
            "26-33 none 0 B GPU memory of gpu3 (host 0019:01:00.0)",
            "34 none 256 GiB EGM egm0",
            "35 none 256 GiB EGM egm1",
        ]
    );
    let wide = lines(&plan, &View { wide: true, ..View::of(&facts) }, "NUMA nodes");
    let numbers = wide.iter().map(|line| line.split_whitespace().next().unwrap().parse().unwrap());
    assert_eq!(numbers.collect::<Vec<u32>>(), (0..36).collect::<Vec<_>>());
}

#[test]
fn distances_of_equal_nodes_share_rows_and_columns() {
    let (mut plan, facts) = many_nodes();
    let short = lines(&plan, &View::of(&facts), "Distances");
    assert_eq!(short.len(), 9, "{short:?}");
    let cells: Vec<&str> = short[2].split_whitespace().collect();
    assert_eq!(cells, ["2-9", "80", "120", "10/11", "40", "40", "40", "80", "120"]);
    assert_eq!(short[8], "  10/11: from a node to itself, and to the other nodes of its row");
    let wide = View { wide: true, ..View::of(&facts) };
    assert_eq!(lines(&plan, &wide, "Distances").len(), 36);
    // Node 5 is farther from node 0 than its neighbours are.
    plan.distances[5][0] = 90;
    let names = lines(&plan, &View::of(&facts), "NUMA nodes");
    let names: Vec<&str> = names.iter().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["0", "1", "2-4", "5", "6-9", "10-17", "18-25", "26-33", "34", "35"]);
}

#[test]
fn nodes_are_in_the_order_of_their_numbers_and_equal_memory_is_each_of_them() {
    let facts = facts();
    let nodes = vec![node(0, GIB, "0"), node(1, GIB, ""), node(2, GIB, ""), node(3, GIB, "1")];
    let plan = plan(&spec(nodes), &facts).unwrap();
    assert_eq!(plan.nodes.iter().map(|node| node.id).collect::<Vec<_>>(), [0, 3, 1, 2]);
    let short = lines(&plan, &View::of(&facts), "NUMA nodes");
    let cells: Vec<Vec<&str>> = short.iter().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(cells[1], ["1-2", "none", "1", "GiB", "each", "RAM"]);
    assert_eq!((cells.len(), cells[2][0]), (3, "3"));
}

#[test]
fn equal_figures_share_a_row() {
    let facts = facts();
    let mut plan = plan(&spec(vec![node(0, GIB, "0")]), &facts).unwrap();
    let figures = |from: u32, latency_ns: u32| Access { from, latency_ns, bandwidth_mbps: 1000 };
    plan.nodes[0].access = vec![figures(3, 90), figures(0, 80), figures(1, 90), figures(2, 90)];
    let short = lines(&plan, &View::of(&facts), "Memory access");
    let cells: Vec<Vec<&str>> = short.iter().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(cells, [["0", "0", "80", "ns", "1000", "MB/s"], ["0", "1-3", "90", "ns", "1000", "MB/s"]]);
    assert_eq!(lines(&plan, &View { wide: true, ..View::of(&facts) }, "Memory access").len(), 4);
}

#[test]
fn text_breaks_at_the_width_of_a_terminal_and_not_in_a_file() {
    let (plan, facts) = many_nodes();
    let note = format!("note: {}\n", plan.notes[0]);
    assert!(text(&plan, &View::of(&facts)).contains(&note), "{note}");
    let narrow = text(&plan, &View { screen: Screen::plain(60), ..View::of(&facts) });
    let (before, _) = narrow.split_once("\nGuest physical memory\n").unwrap();
    assert!(before.lines().all(|line| line.chars().count() <= 60), "{before}");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    assert!(words(before).contains(&words(&note)), "{before}");
    let how = lines(&plan, &View { screen: Screen::plain(60), ..View::of(&facts) }, "Host functions");
    assert_eq!(how[0], "  legacy  egm0 is of egm4, memory without struct pages,");
    assert_eq!(how[1], "          which iommufd of stock kernels does not map");
}

#[test]
fn a_host_function_is_named_by_vendor_and_ids_as_far_as_they_are_known() {
    let (spec, mut facts) = three_gpus();
    let plan = plan(&spec, &facts).unwrap();
    assert!(text(&plan, &View::of(&facts)).contains("vfio0: NVIDIA 10de:2335, host 0000:21:00.0\n"));
    facts.functions[0].vendor = 0xfff1;
    assert!(text(&plan, &View::of(&facts)).contains("vfio0: fff1:2335, host 0000:21:00.0\n"));
    facts.functions.remove(0);
    assert!(text(&plan, &View::of(&facts)).contains("vfio0: host function 0000:21:00.0\n"));
}
