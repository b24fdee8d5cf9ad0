//! The findings for a terminal.

use std::fmt::Write;

use egm_address::Printable;
use egm_report::show::{Screen, Side, Style, Table, size, wrap};

use super::model::{Checked, Function};
use super::peers;
use super::row::{Row, RowState};

use Side::{Left, Right};

/// The findings in tables, the verdict last.
pub(super) fn text(checked: &Checked, screen: Screen) -> String {
    let mut out = String::new();
    if checked.machine.is_some() {
        heading(&mut out, screen, "Preflight");
        items(checked).write(&mut out, screen);
    }
    if !checked.functions.is_empty() {
        heading(&mut out, screen, "Host functions");
        functions(checked).write(&mut out, screen);
        out.push('\n');
        resources(checked).write(&mut out, screen);
    }
    if checked.functions.iter().any(|function| !function.others.is_empty()) {
        heading(&mut out, screen, "Also in their IOMMU groups");
        groups(checked).write(&mut out, screen);
    }
    if !checked.peers.is_empty() {
        heading(&mut out, screen, "Peer to peer, row writes to column");
        peers::matrix(checked, screen, &mut out);
        heading(&mut out, screen, "Why");
        peers::reasons(checked).write(&mut out, screen);
    }
    if checked.functions.iter().any(|function| !function.acs.is_empty() || function.ats == Some(true)) {
        heading(&mut out, screen, "Access control (ACS) above them, and address translation (ATS)");
        access(checked).write(&mut out, screen);
    }
    if !checked.advice.is_empty() {
        heading(&mut out, screen, "Advice");
        advice(checked).write(&mut out, screen);
    }
    heading(&mut out, screen, "Verdict");
    verdict(checked, screen, &mut out);
    out
}

fn heading(out: &mut String, screen: Screen, title: &str) {
    if !out.is_empty() {
        out.push('\n');
    }
    let _ = writeln!(out, "{}", screen.paint(Style::Strong, title)); // a String takes everything
}

/// The items of a machine. The remedies for those that stand in the way are part of the verdict.
fn items(checked: &Checked) -> Table<'static> {
    let mut table = Table::new(&[Left, Left, Left], &["item", "state", "found"]);
    for row in checked.items() {
        let style = match row.state {
            RowState::Ok => None,
            RowState::Note => Some(Style::Yellow),
            RowState::Cannot => Some(Style::Red),
            RowState::NotJudged => Some(Style::Faint),
        };
        let found = match (row.state, &row.help) {
            (RowState::Note, Some(help)) => format!("{}; help: {help}", row.found),
            _ => row.found.clone(),
        };
        table.row(style, vec![row.subject.clone(), row.state.word().to_owned(), found]);
    }
    table
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn functions(checked: &Checked) -> Table<'static> {
    let heads = ["name", "function", "ids", "class", "group", "node", "state"];
    let mut table = Table::new(&[Left, Left, Left, Left, Right, Right, Left], &heads);
    for function in &checked.functions {
        let usable =
            checked.judged().any(|row| row.function == Some(function.address) && row.state == RowState::Ok);
        let vendor = function.vendor.map_or_else(String::new, |vendor| format!("{vendor} "));
        let row = vec![
            function.name.clone(),
            function.address.to_string(),
            format!("{vendor}{}", function.ids),
            function.class.trim_end_matches(" controller").to_owned(),
            or_dash(function.group.map(|group| group.to_string())),
            or_dash(function.node.map(|node| node.to_string())),
            if usable { "ready" } else { "not ready" }.to_owned(),
        ];
        table.row((!usable).then_some(Style::Red), row);
    }
    table
}

fn resources(checked: &Checked) -> Table<'static> {
    let mut table = Table::new(&[Left; 5], &["name", "driver", "link", "resets", "BARs"]);
    for function in &checked.functions {
        let bars: Vec<String> = function.bars.iter().map(|bytes| size(*bytes).replace(' ', "")).collect();
        let list = |parts: &[String]| or_dash(Some(parts.join(" ")).filter(|text| !text.is_empty()));
        let row = vec![
            function.name.clone(),
            or_dash(function.driver.clone()),
            or_dash(function.link.clone()),
            list(&function.resets),
            list(&bars),
        ];
        table.row(None, row);
    }
    table
}

fn groups(checked: &Checked) -> Table<'static> {
    let mut table = Table::new(&[Left, Left], &["name", "others"]);
    for function in checked.functions.iter().filter(|function| !function.others.is_empty()) {
        table.row(None, vec![function.name.clone(), function.others.join(", ")]);
    }
    table
}

/// Bridges in one row of the table of access control.
const BRIDGES: usize = 2;

fn access(checked: &Checked) -> Table<'static> {
    let mut table = Table::new(&[Left, Left, Left], &["name", "ATS", "ACS on"]);
    for function in &checked.functions {
        let mut rows = function.acs.chunks(BRIDGES).map(|bridges| bridges.join("; "));
        table.row(None, vec![function.name.clone(), ats(function).to_owned(), or_dash(rows.next())]);
        for row in rows {
            table.row(None, vec![String::new(), String::new(), row]);
        }
    }
    table
}

const fn ats(function: &Function) -> &'static str {
    match function.ats {
        Some(true) => "yes",
        Some(false) => "no",
        None => "unknown",
    }
}

fn advice(checked: &Checked) -> Table<'static> {
    let mut table = Table::new(&[Left], &["settings with which devices reach each other by a shorter way"]);
    for line in &checked.advice {
        table.row(None, vec![line.clone()]);
    }
    table
}

/// The result with its counts, then what stands in the way.
fn verdict(checked: &Checked, screen: Screen, out: &mut String) {
    let cannot: Vec<&Row> = checked.rows.iter().filter(|row| row.state == RowState::Cannot).collect();
    let style = if cannot.is_empty() { Style::Green } else { Style::Red };
    for line in summary(checked) {
        let _ = writeln!(out, "  {}", screen.paint(style, &line));
    }
    for row in cannot {
        let label = screen.paint(Style::Red, RowState::Cannot.word());
        labelled(&format!("{}: {}", row.subject, row.found), &label, screen, out);
        for line in row.help.iter().flat_map(|help| help.lines()) {
            labelled(&format!("help: {line}"), BESIDE, screen, out);
        }
    }
}

/// As wide as the label "cannot".
const BESIDE: &str = "      ";

/// Adds `text` after `label`, broken between words where the screen has too few columns.
fn labelled(text: &str, label: &str, screen: Screen, out: &mut String) {
    let room = screen.columns().map_or(usize::MAX, |columns| columns.saturating_sub(BESIDE.len() + 3));
    for (number, line) in wrap(text, room).into_iter().enumerate() {
        let label = if number == 0 { label } else { BESIDE };
        let _ = writeln!(out, "  {label} {}", Printable(line));
    }
}

/// `machine demo is ready: 7 ok, 1 note`, and `16 functions: 14 ready, 2 not ready`.
fn summary(checked: &Checked) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(name) = &checked.machine {
        let is_any = |state| checked.rows.iter().any(|row| row.state == state);
        let result = match (is_any(RowState::Cannot), is_any(RowState::NotJudged)) {
            (true, _) => "cannot start",
            (false, true) => "is ready as far as judged",
            (false, false) => "is ready",
        };
        let mut counts = Vec::new();
        for state in RowState::ALL {
            let count = checked.items().filter(|row| row.state == state).count();
            counts.extend((count > 0).then(|| state.counted(count)));
        }
        lines.push(format!("machine {name} {result}: {}", counts.join(", ")));
    }
    let all = checked.judged().count();
    let ready = checked.judged().filter(|row| row.state == RowState::Ok).count();
    let functions = if all == 1 { "1 function".to_owned() } else { format!("{all} functions") };
    match all.saturating_sub(ready) {
        0 if all == 0 && checked.machine.is_none() => lines.push("no functions to judge".to_owned()),
        0 if all == 0 => {}
        0 => lines.push(format!("{functions}: {ready} ready")),
        not => lines.push(format!("{functions}: {ready} ready, {not} not ready")),
    }
    lines
}
