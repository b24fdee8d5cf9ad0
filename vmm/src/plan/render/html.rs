//! A plan for a browser: one page, without scripts, fonts or anything else from elsewhere.
//!
//! The page never has the kernel's command line, which may have secrets of the guest.

use std::fmt::Write;

use egm_report::show::page::{self, table};
use egm_report::show::{escape, size};

use crate::plan::render::nodes::{ACCESS, Distances, NODES, Row};
use crate::plan::render::{View, model, nodes, sockets};
use crate::plan::{FunctionPlan, Plan};

/// The plan as a whole page.
pub fn html(plan: &Plan, view: &View<'_>) -> String {
    let notes: String =
        plan.notes.iter().map(|note| format!("<p class=\"note\">{}</p>\n", escape(note))).collect();
    let main = format!(
        "{notes}{}<div class=\"columns\">\n<div>\n{}{}</div>\n<div>\n{}{}{}{}{}{}</div>\n</div>\n{}",
        sockets::html(plan),
        memory(plan),
        backings(plan),
        rows("NUMA nodes", &NODES, &[2], &nodes::nodes(plan, view.wide)),
        distances(&Distances::of(plan, view.wide)),
        access(plan, view),
        pairs("Host functions", &["what", "how"], model::passthrough(plan)),
        pairs("Pinning", &["vCPU", "host CPUs"], model::pinning(plan)),
        pairs("Lines and ports", &["owner", "has"], model::lines_and_ports(plan)),
        pci(plan, view),
    );
    let title = format!("{}: plan", plan.name);
    page::page(&title, &plan.name, &plan.description, &model::summary(plan), &main)
}

fn pairs(title: &str, heads: &[&str], rows: Vec<(String, String)>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = rows.into_iter().map(|(left, right)| (String::new(), vec![left, right])).collect();
    table(title, heads, &[], &rows)
}

/// A table; each row has the class of its memory.
fn rows(title: &str, heads: &[&str], numeric: &[usize], rows: &[Row]) -> String {
    let class = |egm: bool| if egm { "egm".to_owned() } else { String::new() };
    let rows: Vec<_> = rows.iter().map(|row| (class(row.egm), row.cells.clone())).collect();
    table(title, heads, numeric, &rows)
}

/// The guest's address space, lowest address first.
fn memory(plan: &Plan) -> String {
    let row = |block: model::Block| {
        let (from, to) = (model::address(plan, block.span.start()), model::address(plan, block.span.end()));
        let cells = vec![from, to, size(block.span.size()), block.what, block.detail];
        (format!("address {}", block.tone.class()), cells)
    };
    let rows: Vec<_> = model::blocks(plan).into_iter().map(row).collect();
    table("Memory map", &["from", "up to", "size", "what", "where"], &[2], &rows)
}

fn backings(plan: &Plan) -> String {
    let rows: Vec<_> = plan
        .backings
        .iter()
        .map(|b| (String::new(), vec![b.id.clone(), size(b.size), model::backing(b)]))
        .collect();
    table("Backing", &["memory", "size", "from"], &[1], &rows)
}

fn pci(plan: &Plan, view: &View<'_>) -> String {
    let mut out = "<section>\n<h2>PCI</h2>\n<ul class=\"tree\">".to_owned();
    for (address, words, tree) in model::trees(plan) {
        let _ = writeln!(out, "<li><code>{address}</code> {words}");
        branches(plan, view, &tree, &mut out);
        out.push_str("</li>\n");
    }
    out.push_str("</ul>\n</section>\n");
    out
}

fn branches(plan: &Plan, view: &View<'_>, tree: &[model::Branch<'_>], out: &mut String) {
    if tree.is_empty() {
        return;
    }
    out.push_str("<ul>\n");
    for branch in tree {
        out.push_str("<li>");
        let name = model::function(branch.function, view.facts);
        let _ = write!(out, "<code>{}</code> {}", branch.function.address, escape(&name));
        holdings(plan, branch.function, out);
        branches(plan, view, &branch.behind, out);
        out.push_str("</li>\n");
    }
    out.push_str("</ul>");
}

fn holdings(plan: &Plan, function: &FunctionPlan, out: &mut String) {
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

/// Distances as a heat map: 10, a node's own memory, is plain, the farthest is darkest.
fn distances(distances: &Distances) -> String {
    let all = distances.rows.iter().flatten().map(|cell| cell.farthest);
    let farthest = all.max().unwrap_or(10).max(11);
    let mut out = "<section>\n<h2>Distances</h2>\n<div class=\"scroll\"><table class=\"heat\">\n<thead><tr>\
                   <th scope=\"col\">from \\ to</th>"
        .to_owned();
    for name in &distances.names {
        let _ = write!(out, "<th scope=\"col\">{name}</th>");
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (name, row) in distances.names.iter().zip(&distances.rows) {
        let _ = write!(out, "<tr><th scope=\"row\">{name}</th>");
        for cell in row {
            let heat = u32::from(cell.farthest.saturating_sub(10)) * 100 / u32::from(farthest - 10);
            let _ = write!(out, "<td style=\"--heat: {heat}%\">{}</td>", cell.text);
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
    if let Some(legend) = distances.legend() {
        let _ = writeln!(out, "<p class=\"note\">{legend}</p>");
    }
    out.push_str("</section>\n");
    out
}

fn access(plan: &Plan, view: &View<'_>) -> String {
    let figures = nodes::access(plan, view.wide);
    if figures.is_empty() { String::new() } else { rows("Memory access", &ACCESS, &[0, 1, 2, 3], &figures) }
}
