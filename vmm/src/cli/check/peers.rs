//! Which functions reach each other, and why, for a terminal.

use std::ops::Range;

use egm_address::PciAddress;
use egm_report::show::{Screen, Side, Style, Table, first_of};
use egm_vfio::topology::Reason;

use super::model::{Checked, Function, Peer};
use super::names::kind_in;

use Side::Left;

const LEGEND: [&str; 3] = [
    "PIX one switch, PXB several, PHB one host bridge, NODE one NUMA node, SYS two;",
    "D the write stays in the switch, R it turns at the root port above both, - it",
    "does not arrive. Between root ports it crosses the root complex.",
];

/// A table of the ways between functions. Columns that do not fit beside each other follow in a table of their own.
pub(super) fn matrix(checked: &Checked, screen: Screen, out: &mut String) {
    let columns = screen.columns().unwrap_or(COLUMNS);
    let head = checked.functions.iter().map(|function| function.name.len()).max().unwrap_or(0);
    let rows = rows(checked);
    let widths: Vec<usize> =
        checked.functions.iter().enumerate().map(|(to, function)| width(&rows, to, function)).collect();
    let mut start = 0;
    for count in parts(&widths, columns.saturating_sub(head.saturating_add(GAP))) {
        if start > 0 {
            out.push('\n');
        }
        let end = start + count;
        table(checked, &rows, start..end, screen, out);
        start = end;
    }
    for line in LEGEND {
        out.push_str(&format!("  {}\n", screen.paint(Style::Faint, line)));
    }
}

/// Columns of the matrix in a file.
const COLUMNS: usize = 120;
/// Space before each column of a table.
const GAP: usize = 2;

/// Columns of `widths` that fit beside each other into `room`, at least one in each part.
fn parts(widths: &[usize], room: usize) -> Vec<usize> {
    let (mut parts, mut used) = (Vec::new(), 0usize);
    for width in widths {
        used = used.saturating_add(width.saturating_add(GAP));
        match parts.last_mut() {
            Some(count) if used <= room => *count += 1,
            _ => {
                parts.push(1);
                used = width.saturating_add(GAP);
            }
        }
    }
    parts
}

/// The cells of each row.
fn rows(checked: &Checked) -> Vec<Vec<String>> {
    let others = checked.functions.len().saturating_sub(1).max(1);
    let mut rows = Vec::with_capacity(checked.functions.len());
    // Pairs are in the order of rows and columns, without the diagonal.
    for (position, peers) in checked.peers.chunks(others).enumerate() {
        let mut row: Vec<String> = peers.iter().map(Peer::way).collect();
        row.insert(position.min(row.len()), "X".to_owned());
        rows.push(row);
    }
    rows
}

/// The columns `to` of the matrix.
fn table(checked: &Checked, rows: &[Vec<String>], to: Range<usize>, screen: Screen, out: &mut String) {
    let names = checked.functions.get(to.clone()).unwrap_or_default().iter();
    let heads: Vec<&str> = std::iter::once("").chain(names.map(|function| function.name.as_str())).collect();
    let sides = vec![Left; heads.len()];
    let mut table = Table::new(&sides, &heads);
    for (from, row) in checked.functions.iter().zip(rows) {
        let cells = row.get(to.clone()).unwrap_or_default().iter().cloned();
        table.row(None, std::iter::once(from.name.clone()).chain(cells).collect());
    }
    table.write(out, screen);
}

fn width(rows: &[Vec<String>], column: usize, function: &Function) -> usize {
    let cells = rows.iter().filter_map(|row| row.get(column)).map(String::len);
    cells.max().unwrap_or(0).max(function.name.len())
}

/// Pairs that one reason holds for.
struct Group {
    way: String,
    /// The reason, without the addresses of ports.
    reason: String,
    pairs: Vec<String>,
    ports: Vec<PciAddress>,
}

/// Each reason once, with the pairs and the ports that it is about.
pub(super) fn reasons(checked: &Checked) -> Table<'static> {
    let mut groups: Vec<Group> = Vec::new();
    for peer in &checked.peers {
        for cause in &peer.causes {
            add(checked, peer, *cause, &mut groups);
        }
    }
    let mut table = Table::new(&[Left, Left], &["way", "from one to another: reason"]);
    for group in groups {
        let ports = first_of(group.ports.iter().map(ToString::to_string));
        let ports = if ports.is_empty() { ports } else { format!(" ({ports})") };
        let pairs = first_of(group.pairs.into_iter());
        table.row(None, vec![group.way, format!("{pairs}: {}{ports}", group.reason)]);
    }
    table
}

fn add(checked: &Checked, peer: &Peer, cause: Reason, groups: &mut Vec<Group>) {
    let (from, to) = (checked.name(peer.from), checked.name(peer.to));
    let (way, pair) = (peer.way(), format!("{from} to {to}"));
    let (reason, port) = match subject(cause) {
        Subject::Port(at) => {
            let above = format!("the switch port above {}", kind_in(&from));
            (cause.to_string().replace(&at.to_string(), &above), Some(at))
        }
        Subject::Function(at) => (cause.to_string().replace(&at.to_string(), &checked.name(at)), None),
        Subject::Pair => (cause.to_string(), None),
    };
    match groups.iter_mut().find(|group| group.way == way && group.reason == reason) {
        Some(group) => {
            group.pairs.push(pair);
            let new = port.filter(|port| !group.ports.contains(port));
            group.ports.extend(new);
        }
        None => groups.push(Group { way, reason, pairs: vec![pair], ports: port.into_iter().collect() }),
    }
}

/// What a reason is about.
enum Subject {
    /// A switch's port above the writer.
    Port(PciAddress),
    /// One of the two functions.
    Function(PciAddress),
    Pair,
}

const fn subject(cause: Reason) -> Subject {
    match cause {
        Reason::Translated(at)
        | Reason::Redirects(at)
        | Reason::Untranslated(at)
        | Reason::BlocksTranslated(at)
        | Reason::EgressControl(at)
        | Reason::Unknown(at) => Subject::Port(at),
        Reason::NoMemory(at) | Reason::NoIommu(at) => Subject::Function(at),
        Reason::OneDevice | Reason::OtherRootPort | Reason::OtherHostBridge | Reason::OtherNode => {
            Subject::Pair
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_split_where_they_do_not_fit_beside_each_other() {
        assert_eq!(parts(&[5; 16], 114), [16]);
        assert_eq!(parts(&[5; 16], 111), [15, 1]);
        assert_eq!(parts(&[5, 5, 3], 12), [1, 2]);
        assert_eq!(parts(&[5, 5], 0), [1, 1]);
        assert!(parts(&[], 80).is_empty());
    }
}
