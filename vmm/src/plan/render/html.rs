//! A plan for a browser: one page, without scripts, fonts or anything else from elsewhere.

use std::fmt::Write;

use egm_report::show::page::{self, table};
use egm_report::show::{escape, size};

use crate::plan::render::model;
use crate::plan::{FunctionPlan, Plan};

/// The plan as a whole page.
pub fn html(plan: &Plan) -> String {
    let pinning = pairs("Pinning", &["vCPU", "host CPUs"], model::pinning(plan));
    let passed = pairs("Host functions", &["what", "how"], model::passthrough(plan));
    let ports = pairs("Lines and ports", &["owner", "has"], model::lines_and_ports(plan));
    let colours = [("ram", "RAM"), ("egm", "EGM"), ("pci", "PCI"), ("system", "system"), ("free", "free")];
    let notes: String =
        plan.notes.iter().map(|note| format!("<p class=\"note\">{}</p>\n", escape(note))).collect();
    let main = format!(
        "{notes}<div class=\"columns\">\n\
         <section class=\"wide\">\n<h2>Guest physical memory</h2>\n{}\n<div class=\"scroll\">\n{}</div>\n\
         <p class=\"note\">Height grows with the logarithm of the size.</p>\n</section>\n\
         <div>\n{}{passed}{}{}{}{pinning}{ports}</div>\n</div>\n{}",
        page::legend(&colours),
        map(plan),
        pci(plan),
        nodes(plan),
        distances(plan),
        access(plan),
        memory(plan),
    );
    let title = format!("{}: plan", plan.name);
    page::page(&title, &plan.name, &plan.description, &model::summary(plan), &main)
}

/// The guest's address space as a drawing. Unused space is a thin broken band.
fn map(plan: &Plan) -> String {
    let blocks = model::blocks(plan);
    let end = blocks.last().map_or_else(String::new, |block| model::address(plan, block.span.end()));
    let band = |block: model::Block| page::Band {
        class: block.tone.class(),
        start: model::address(plan, block.span.start()),
        size: block.span.size(),
        hint: format!("{}: {}", block.span, block.what),
        what: block.what,
        detail: block.detail,
    };
    let bands: Vec<page::Band> = blocks.into_iter().map(band).collect();
    let title = format!(
        "Guest physical address space of {}, lowest address first; the table below says the same",
        plan.name
    );
    page::map("map-title", &title, &bands, &end)
}

fn pairs(title: &str, heads: &[&str], rows: Vec<(String, String)>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = rows.into_iter().map(|(left, right)| (String::new(), vec![left, right])).collect();
    table(title, heads, &[], &rows)
}

fn memory(plan: &Plan) -> String {
    let row = |block: model::Block| {
        let (from, to) = (model::address(plan, block.span.start()), model::address(plan, block.span.end()));
        let cells = vec![from, to, size(block.span.size()), block.what, block.detail];
        (format!("address {}", block.tone.class()), cells)
    };
    let rows: Vec<_> = model::blocks(plan).into_iter().map(row).collect();
    let map = table("Memory map", &["from", "up to", "size", "what", "where"], &[2], &rows);
    let row =
        |b: &crate::plan::BackingPlan| (String::new(), vec![b.id.clone(), size(b.size), model::backing(b)]);
    let rows: Vec<_> = plan.backings.iter().map(row).collect();
    map + &table("Behind it", &["memory", "size", "from"], &[1], &rows)
}

fn pci(plan: &Plan) -> String {
    let mut out = "<section>\n<h2>PCI</h2>\n<ul class=\"tree\">".to_owned();
    for (address, words, tree) in model::trees(plan) {
        let _ = writeln!(out, "<li><code>{address}</code> {words}");
        branches(plan, &tree, &mut out);
        out.push_str("</li>\n");
    }
    out.push_str("</ul>\n</section>\n");
    out
}

fn branches(plan: &Plan, tree: &[model::Branch<'_>], out: &mut String) {
    if tree.is_empty() {
        return;
    }
    out.push_str("<ul>\n");
    for branch in tree {
        out.push_str("<li>");
        pci_function(plan, branch.function, out);
        branches(plan, &branch.behind, out);
        out.push_str("</li>\n");
    }
    out.push_str("</ul>");
}

fn pci_function(plan: &Plan, function: &FunctionPlan, out: &mut String) {
    let _ = write!(out, "<code>{}</code> {}", function.address, escape(&model::function(function)));
    let holdings = model::holdings(function);
    if holdings.is_empty() {
        return;
    }
    out.push_str("<dl>");
    for (what, span) in holdings {
        let place = span.map_or_else(String::new, |span| {
            format!("<code>{}</code> {}", model::address(plan, span.start()), size(span.size()))
        });
        let _ = write!(out, "<dt>{}</dt><dd>{place}</dd>", escape(&what));
    }
    out.push_str("</dl>");
}

fn nodes(plan: &Plan) -> String {
    let row = |node: &crate::plan::NodePlan| {
        let kind = match (node.egm, node.memory) {
            _ if node.initiator.is_some() => "GPU memory",
            (true, _) => "EGM",
            (false, 0) => "no memory",
            (false, _) => "RAM",
        };
        let cpus = if node.cpus.is_empty() { "none".to_owned() } else { node.cpus.to_string() };
        let class = if node.egm { "egm" } else { "" };
        (class.to_owned(), vec![node.id.to_string(), cpus, size(node.memory), kind.to_owned()])
    };
    let rows: Vec<_> = plan.nodes.iter().map(row).collect();
    table("NUMA nodes", &["node", "vCPUs", "memory", "kind"], &[2], &rows)
}

/// Distances as a heat map: 10, a node's own memory, is plain, the farthest is darkest.
fn distances(plan: &Plan) -> String {
    let farthest = plan.distances.iter().flatten().copied().max().unwrap_or(10).max(11);
    let mut out = "<section>\n<h2>Distances</h2>\n<div class=\"scroll\"><table class=\"heat\">\n<thead><tr>\
                   <th scope=\"col\">from \\ to</th>"
        .to_owned();
    for node in &plan.nodes {
        let _ = write!(out, "<th scope=\"col\">{}</th>", node.id);
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (node, row) in plan.nodes.iter().zip(&plan.distances) {
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", node.id);
        for distance in row {
            let heat = u32::from(distance.saturating_sub(10)) * 100 / u32::from(farthest - 10);
            let _ = write!(out, "<td style=\"--heat: {heat}%\">{distance}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
    out
}

fn access(plan: &Plan) -> String {
    let figures = plan.nodes.iter().flat_map(|node| node.access.iter().map(move |a| (node, a)));
    let rows: Vec<_> = figures
        .map(|(node, access)| {
            let class = if node.egm { "egm" } else { "" };
            let (latency, bandwidth) =
                (format!("{} ns", access.latency_ns), format!("{} MB/s", access.bandwidth_mbps));
            (class.to_owned(), vec![node.id.to_string(), access.from.to_string(), latency, bandwidth])
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let heads = ["memory of node", "from node", "latency", "bandwidth"];
    table("Memory access", &heads, &[0, 1, 2, 3], &rows)
}
