//! A plan for a terminal.

use std::fmt::Write;

use egm_address::Printable;
use egm_report::show::{Side, Style, Table, printable_lines, size, wrap};

use crate::plan::render::nodes::{ACCESS, Distances, NODES, Row};
use crate::plan::render::{View, model, nodes};
use crate::plan::{FunctionPlan, FunctionRole, Plan};

use Side::{Left, Right};

/// Columns for text that is broken, however little the text before it leaves.
const LEAST_COLUMNS: usize = 20;

/// The plan in words and tables.
pub fn text(plan: &Plan, view: &View<'_>) -> String {
    let mut text = Text { plan, view, out: String::new() };
    text.summary();
    text.memory();
    text.backings();
    text.pci();
    text.passthrough();
    text.nodes();
    text.distances();
    text.access();
    text.pinning();
    text.lines_and_ports();
    text.out
}

struct Text<'a> {
    plan: &'a Plan,
    view: &'a View<'a>,
    out: String,
}

/// Beginnings of the lines of a text that is broken.
#[derive(Clone, Copy)]
struct Indents<'a> {
    first: &'a str,
    next: &'a str,
}

impl Text<'_> {
    fn columns(&self) -> usize {
        self.view.screen.columns().unwrap_or(usize::MAX)
    }

    fn heading(&mut self, title: &str) {
        self.out.push('\n');
        self.out.push_str(&self.view.screen.paint(Style::Strong, title));
        self.out.push('\n');
    }

    /// Name and facts, description, notes.
    fn summary(&mut self) {
        let name = self.view.screen.paint(Style::Strong, &self.plan.name);
        self.out.push_str(&name);
        let mut used = self.plan.name.chars().count();
        for fact in model::summary(self.plan) {
            let wide = fact.chars().count().saturating_add(3);
            if used.saturating_add(wide) > self.columns() {
                self.out.push_str("\n ");
                used = 1;
            }
            let _ = write!(self.out, " · {fact}");
            used = used.saturating_add(wide);
        }
        self.out.push('\n');
        if !self.plan.description.is_empty() {
            for line in printable_lines(&self.plan.description).split('\n') {
                self.broken(Indents { first: "", next: "" }, None, line);
            }
        }
        for note in &self.plan.notes {
            self.broken(Indents { first: "note: ", next: "      " }, None, note);
        }
    }

    /// Adds `text`, broken at spaces, in lines that begin with `indents`.
    fn broken(&mut self, indents: Indents<'_>, style: Option<Style>, text: &str) {
        let Indents { first, next } = indents;
        let indent = first.chars().count().max(next.chars().count());
        let columns = self.columns().saturating_sub(indent).max(LEAST_COLUMNS);
        for (number, line) in wrap(text, columns).iter().enumerate() {
            let line = match style {
                Some(style) => self.view.screen.paint(style, line),
                None => Printable(line).to_string(),
            };
            let _ = writeln!(self.out, "{}{line}", if number == 0 { first } else { next });
        }
    }

    fn table(&mut self, sides: &[Side], heads: &[&str], rows: &[Row]) {
        let mut table = Table::new(sides, heads);
        for Row { egm, cells } in rows {
            table.row(egm.then_some(Style::Green), cells.clone());
        }
        table.write(&mut self.out, self.view.screen);
    }

    fn pairs(&mut self, heads: &[&str], rows: Vec<(String, String)>) {
        let row = |(left, right)| Row { egm: false, cells: vec![left, right] };
        self.table(&[Left, Left], heads, &rows.into_iter().map(row).collect::<Vec<_>>());
    }

    /// The memory map, which is as wide as its addresses and names are.
    fn memory(&mut self) {
        self.heading("Guest physical memory");
        let heads = ["from", "up to", "size", "what", "where"];
        let mut table = Table::new(&[Left, Left, Right, Left, Left], &heads);
        for block in model::blocks(self.plan) {
            let from = model::address(self.plan, block.span.start());
            let to = model::address(self.plan, block.span.end());
            let cells = vec![from, to, size(block.span.size()), block.what, block.detail];
            table.row(Some(block.tone.style()), cells);
        }
        table.write(&mut self.out, self.view.screen);
    }

    fn backings(&mut self) {
        self.heading("Backing");
        let rows = self.plan.backings.iter().map(|backing| {
            let cells = vec![backing.id.clone(), size(backing.size), model::backing(backing)];
            Row { egm: false, cells }
        });
        self.table(&[Left, Right, Left], &["memory", "size", "from"], &rows.collect::<Vec<_>>());
    }

    fn pci(&mut self) {
        self.heading("PCI");
        for (address, words, tree) in model::trees(self.plan) {
            let _ = writeln!(self.out, "  {address} {}", Printable(&words));
            self.branches(&tree, "  ");
        }
    }

    /// Functions of one bus and those behind them, each line after `indent`.
    fn branches(&mut self, tree: &[model::Branch<'_>], indent: &str) {
        for (i, branch) in tree.iter().enumerate() {
            let last = i.saturating_add(1) == tree.len();
            let (first, below) = if last { ("└─", "   ") } else { ("├─", "│  ") };
            let held = if branch.behind.is_empty() { "   " } else { "│  " };
            let (first, next) = (format!("{indent}{first} "), format!("{indent}{below}{held}"));
            self.function(branch.function, Indents { first: &first, next: &next });
            self.branches(&branch.behind, &format!("{indent}{below}"));
        }
    }

    fn function(&mut self, function: &FunctionPlan, indents: Indents<'_>) {
        let style = match function.role {
            FunctionRole::Endpoint { .. } => Some(Style::Cyan),
            _ => None,
        };
        let Indents { first, next } = indents;
        let first = format!("{first}{} ", function.address);
        let (deeper, name) = (format!("{next}  "), model::function(function, self.view.facts));
        self.broken(Indents { first: &first, next: &deeper }, style, &name);
        for (what, span) in model::holdings(function) {
            let place = span.map_or_else(String::new, |span| {
                format!(" at {}, {}", model::address(self.plan, span.start()), size(span.size()))
            });
            let indents = Indents { first: next, next: &deeper };
            self.broken(indents, Some(Style::Faint), &format!("{what}{place}"));
        }
    }

    fn passthrough(&mut self) {
        let rows = model::passthrough(self.plan);
        if !rows.is_empty() {
            self.heading("Host functions");
            self.pairs(&["what", "how"], rows);
        }
    }

    fn nodes(&mut self) {
        self.heading("NUMA nodes");
        self.table(&[Right, Left, Right, Left], &NODES, &nodes::nodes(self.plan, self.view.wide));
    }

    fn distances(&mut self) {
        self.heading("Distances");
        let distances = Distances::of(self.plan, self.view.wide);
        let sides = vec![Right; distances.names.len().saturating_add(1)];
        let names = distances.names.iter().map(String::as_str);
        let heads: Vec<&str> = std::iter::once("from \\ to").chain(names).collect();
        let mut table = Table::new(&sides, &heads);
        for (name, row) in distances.names.iter().zip(&distances.rows) {
            let cells = row.iter().map(|cell| cell.text.clone());
            table.row(None, std::iter::once(name.clone()).chain(cells).collect());
        }
        table.write(&mut self.out, self.view.screen);
        if let Some(legend) = distances.legend() {
            self.broken(Indents { first: "  ", next: "  " }, Some(Style::Faint), &legend);
        }
    }

    fn access(&mut self) {
        let rows = nodes::access(self.plan, self.view.wide);
        if !rows.is_empty() {
            self.heading("Memory access");
            self.table(&[Right; 4], &ACCESS, &rows);
        }
    }

    fn pinning(&mut self) {
        let rows = model::pinning(self.plan);
        if !rows.is_empty() {
            self.heading("Pinning");
            self.pairs(&["vCPU", "host CPUs"], rows);
        }
    }

    fn lines_and_ports(&mut self) {
        self.heading("Lines and ports");
        self.pairs(&["owner", "has"], model::lines_and_ports(self.plan));
    }
}
