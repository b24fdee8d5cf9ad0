//! The findings for a terminal.

use std::collections::BTreeMap;
use std::fmt::Write;

use egm_address::{PciAddress, Printable};
use egm_report::show::{Screen, Side, Style, Table, size};

use super::model::{Checked, Function};

use Side::{Left, Right};

/// The findings in tables, what is wrong last.
pub(super) fn text(checked: &Checked, colour: Screen) -> String {
    let mut out = String::new();
    let heading = |out: &mut String, title: &str| {
        if !out.is_empty() {
            out.push('\n');
        }
        let _ = writeln!(out, "{}", colour.paint(Style::Strong, title));
    };
    heading(&mut out, "Host functions");
    functions(checked).write(&mut out, colour);
    let shared: Vec<&Function> = checked.functions.iter().filter(|f| !f.others.is_empty()).collect();
    if !shared.is_empty() {
        heading(&mut out, "Also in their IOMMU groups");
        for function in shared {
            let others = function.others.join(", ");
            let _ = writeln!(out, "  {} with {}", function.address, Printable(&others));
        }
    }
    if !checked.peers.is_empty() {
        heading(&mut out, "Peer to peer, row writes to column");
        matrix(checked, colour, &mut out);
        for line in LEGEND {
            let _ = writeln!(out, "  {}", colour.paint(Style::Faint, line));
        }
        heading(&mut out, "Why");
        reasons(checked, &mut out);
    }
    if checked.functions.iter().any(|function| !function.acs.is_empty() || function.ats == Some(true)) {
        heading(&mut out, "Access control (ACS) above them, and address translation (ATS)");
        access(checked).write(&mut out, colour);
    }
    if !checked.advice.is_empty() {
        heading(&mut out, "Advice");
        checked.advice.iter().for_each(|line| out.push_str(&format!("  {}\n", Printable(line))));
    }
    if let Some(pinned) = checked.pinned {
        heading(&mut out, "Memory");
        let limit = checked.memlock.map(|limit| format!("; this user may lock {}", size(limit)));
        let _ = writeln!(out, "  the machine pins {}{}", size(pinned), limit.unwrap_or_default());
    }
    heading(&mut out, "Verdict");
    verdict(checked, colour, &mut out);
    out
}

const LEGEND: [&str; 2] = [
    "PIX one switch, PXB several, PHB a host bridge, NODE two of one NUMA node, SYS between nodes",
    "D stays in the switch, R by the root port that both are behind, C through the root complex, - does not arrive",
];

fn functions(checked: &Checked) -> Table<'static> {
    let heads = ["function", "ids", "class", "driver", "group", "node", "link", "resets", "BARs"];
    let mut table = Table::new(&[Left, Left, Left, Left, Right, Right, Left, Left, Left], &heads);
    let number = |number: Option<u32>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let list = |parts: Vec<String>| if parts.is_empty() { "-".to_owned() } else { parts.join(" ") };
    for function in &checked.functions {
        let row = vec![
            function.address.to_string(),
            function.ids.clone(),
            function.class.to_owned(),
            function.driver.clone().unwrap_or_else(|| "-".to_owned()),
            number(function.group),
            number(function.node),
            function.link.clone().unwrap_or_else(|| "-".to_owned()),
            list(function.resets.clone()),
            list(function.bars.iter().map(|bytes| size(*bytes).replace(' ', "")).collect()),
        ];
        table.row(None, row);
    }
    table
}

fn matrix(checked: &Checked, colour: Screen, out: &mut String) {
    let numbers: Vec<String> = (0..checked.functions.len()).map(|number| number.to_string()).collect();
    let heads: Vec<&str> = std::iter::once("from \\ to").chain(numbers.iter().map(String::as_str)).collect();
    let sides = vec![Left; heads.len()];
    let mut table = Table::new(&sides, &heads);
    for (number, from) in numbers.iter().zip(&checked.functions) {
        let cell = |to: &Function| {
            let pair = checked.peers.iter().find(|peer| (peer.from, peer.to) == (from.address, to.address));
            pair.map_or_else(|| "X".to_owned(), |peer| format!("{} {}", peer.relation, peer.route))
        };
        let name = format!("{number} {}", from.address);
        table.row(None, std::iter::once(name).chain(checked.functions.iter().map(cell)).collect());
    }
    table.write(out, colour);
}

/// Each reason once, with an example and how many pairs it holds for.
fn reasons(checked: &Checked, out: &mut String) {
    let mut seen: BTreeMap<&str, (PciAddress, PciAddress, usize)> = BTreeMap::new();
    for peer in &checked.peers {
        for reason in &peer.reasons {
            let entry = seen.entry(reason).or_insert((peer.from, peer.to, 0));
            entry.2 = entry.2.saturating_add(1);
        }
    }
    for (reason, (from, to, count)) in seen {
        let more = if count > 1 { format!(" and {} more", count.saturating_sub(1)) } else { String::new() };
        let _ = writeln!(out, "  {from} to {to}{more}: {}", Printable(reason));
    }
}

fn access(checked: &Checked) -> Table<'static> {
    let mut table = Table::new(&[Left, Left, Left], &["function", "ATS", "ACS on"]);
    for function in &checked.functions {
        let ats = match function.ats {
            Some(true) => "yes",
            Some(false) => "no",
            None => "unknown",
        };
        let acs = if function.acs.is_empty() { "-".to_owned() } else { function.acs.join("; ") };
        table.row(None, vec![function.address.to_string(), ats.to_owned(), acs]);
    }
    table
}

fn verdict(checked: &Checked, colour: Screen, out: &mut String) {
    for problem in &checked.problems {
        let _ = writeln!(out, "  {} {}", colour.paint(Style::Yellow, "lacks"), Printable(&problem.problem));
        let _ = writeln!(out, "        help: {}", Printable(&problem.help));
    }
    if checked.problems.is_empty() {
        let what = if checked.functions.is_empty() {
            "no function to judge"
        } else {
            "all of them can be given to a guest"
        };
        let _ = writeln!(out, "  {} {what}", colour.paint(Style::Green, "ok"));
    }
}
