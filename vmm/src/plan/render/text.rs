//! A plan for a terminal.

use std::fmt::Write;

use egm_address::Printable;
use egm_report::show::{Screen, Side, Style, Table, printable_lines, size};

use crate::plan::render::model;
use crate::plan::{FunctionPlan, FunctionRole, Plan};

use Side::{Left, Right};

/// The plan in words and tables.
pub fn text(plan: &Plan, colour: Screen) -> String {
    let mut out = String::new();
    let heading = |out: &mut String, title: &str| {
        out.push('\n');
        out.push_str(&colour.paint(Style::Strong, title));
        out.push('\n');
    };
    out.push_str(&colour.paint(Style::Strong, &plan.name));
    let _ = writeln!(out, " · {}", model::summary(plan).join(" · "));
    if !plan.description.is_empty() {
        let _ = writeln!(out, "{}", printable_lines(&plan.description));
    }
    for note in &plan.notes {
        let _ = writeln!(out, "note: {}", Printable(note));
    }
    heading(&mut out, "Guest physical memory");
    memory(plan).write(&mut out, colour);
    heading(&mut out, "Behind it");
    backings(plan).write(&mut out, colour);
    heading(&mut out, "PCI");
    pci(plan, colour, &mut out);
    let passthrough = model::passthrough(plan);
    if !passthrough.is_empty() {
        heading(&mut out, "Host functions");
        pairs(&["what", "how"], passthrough).write(&mut out, colour);
    }
    heading(&mut out, "NUMA nodes");
    nodes(plan).write(&mut out, colour);
    heading(&mut out, "Distances");
    distances(plan, colour, &mut out);
    if plan.nodes.iter().any(|node| !node.access.is_empty()) {
        heading(&mut out, "Memory access");
        access(plan).write(&mut out, colour);
    }
    let pinning = model::pinning(plan);
    if !pinning.is_empty() {
        heading(&mut out, "Pinning");
        pairs(&["vCPU", "host CPUs"], pinning).write(&mut out, colour);
    }
    heading(&mut out, "Lines and ports");
    pairs(&["owner", "has"], model::lines_and_ports(plan)).write(&mut out, colour);
    out
}

fn memory(plan: &Plan) -> Table<'static> {
    let mut table = Table::new(&[Left, Left, Right, Left, Left], &["from", "up to", "size", "what", "where"]);
    for block in model::blocks(plan) {
        let (from, to) = (model::address(plan, block.span.start()), model::address(plan, block.span.end()));
        table
            .row(Some(block.tone.style()), vec![from, to, size(block.span.size()), block.what, block.detail]);
    }
    table
}

fn backings(plan: &Plan) -> Table<'static> {
    let mut table = Table::new(&[Left, Right, Left], &["memory", "size", "from"]);
    for backing in &plan.backings {
        table.row(None, vec![backing.id.clone(), size(backing.size), model::backing(backing)]);
    }
    table
}

fn pci(plan: &Plan, colour: Screen, out: &mut String) {
    for (address, words, tree) in model::trees(plan) {
        let _ = writeln!(out, "  {address} {}", Printable(&words));
        branches(plan, &tree, "  ", colour, out);
    }
}

/// Functions of one bus and those behind them, each line after `indent`.
fn branches(plan: &Plan, tree: &[model::Branch<'_>], indent: &str, colour: Screen, out: &mut String) {
    for (i, branch) in tree.iter().enumerate() {
        let last = i.saturating_add(1) == tree.len();
        let (first, below) = if last { ("└─", "   ") } else { ("├─", "│  ") };
        let held = if branch.behind.is_empty() { "   " } else { "│  " };
        let indents = (&*format!("{indent}{first} "), &*format!("{indent}{below}{held}"));
        pci_function(plan, branch.function, colour, indents, out);
        branches(plan, &branch.behind, &format!("{indent}{below}"), colour, out);
    }
}

fn pci_function(
    plan: &Plan,
    function: &FunctionPlan,
    colour: Screen,
    indents: (&str, &str),
    out: &mut String,
) {
    let (first, next) = indents;
    let name = model::function(function);
    let name = match function.role {
        FunctionRole::Endpoint { .. } => colour.paint(Style::Cyan, &name),
        _ => Printable(&name).to_string(),
    };
    let _ = writeln!(out, "{first}{} {name}", function.address);
    for (what, span) in model::holdings(function) {
        let place = span.map_or_else(String::new, |span| {
            format!(" at {}, {}", model::address(plan, span.start()), size(span.size()))
        });
        let _ = writeln!(out, "{next}{}", colour.paint(Style::Faint, &format!("{what}{place}")));
    }
}

fn nodes(plan: &Plan) -> Table<'static> {
    let mut table = Table::new(&[Right, Left, Right, Left], &["node", "vCPUs", "memory", "kind"]);
    for node in &plan.nodes {
        let (tone, kind) = match (node.egm, node.memory) {
            _ if node.initiator.is_some() => (None, "GPU memory"),
            (true, _) => (Some(Style::Green), "EGM"),
            (false, 0) => (None, "no memory"),
            (false, _) => (None, "RAM"),
        };
        let cpus = if node.cpus.is_empty() { "none".to_owned() } else { node.cpus.to_string() };
        table.row(tone, vec![node.id.to_string(), cpus, size(node.memory), kind.to_owned()]);
    }
    table
}

fn distances(plan: &Plan, colour: Screen, out: &mut String) {
    let sides = vec![Right; plan.nodes.len().saturating_add(1)];
    let ids: Vec<String> = plan.nodes.iter().map(|node| node.id.to_string()).collect();
    let heads: Vec<&str> = std::iter::once("from \\ to").chain(ids.iter().map(String::as_str)).collect();
    let mut table = Table::new(&sides, &heads);
    for (id, row) in ids.iter().zip(&plan.distances) {
        table.row(None, std::iter::once(id.clone()).chain(row.iter().map(u8::to_string)).collect());
    }
    table.write(out, colour);
}

fn access(plan: &Plan) -> Table<'static> {
    let heads = ["memory of node", "from node", "latency", "bandwidth"];
    let mut table = Table::new(&[Right; 4], &heads);
    for (node, access) in plan.nodes.iter().flat_map(|node| node.access.iter().map(move |a| (node, a))) {
        table.row(
            node.egm.then_some(Style::Green),
            vec![
                node.id.to_string(),
                access.from.to_string(),
                format!("{} ns", access.latency_ns),
                format!("{} MB/s", access.bandwidth_mbps),
            ],
        );
    }
    table
}

fn pairs(heads: &[&str], rows: Vec<(String, String)>) -> Table<'static> {
    let mut table = Table::new(&[Left, Left], heads);
    for (left, right) in rows {
        table.row(None, vec![left, right]);
    }
    table
}
