//! Tables of a host's sockets, regions and slices, for a terminal and for a page.

use Side::{Left, Right};
use egm_address::ByteSize;
use egm_report::show::{Side, Style, Table, size};

use crate::region::usage::{Socket, Usage, Usages};
use crate::region::{Region, RegionKind, Survey};

pub(super) fn socket_table(sockets: &[Socket]) -> Table<'static> {
    let heads = [
        "node",
        "CPUs",
        "total",
        "visible",
        "aside",
        "invisible",
        "granted",
        "dirty",
        "retired",
        "pages",
        "GPUs",
    ];
    let sides = &[Right, Left, Right, Right, Right, Right, Right, Right, Right, Right, Left];
    let mut table = Table::new(sides, &heads);
    for socket in sockets {
        let cpus = if socket.cpus.is_empty() { "-".to_owned() } else { socket.cpus.to_string() };
        let bytes = |of: ByteSize| size(of.get());
        table.row(
            (socket.invisible.get() > 0).then_some(Style::Green),
            vec![
                node(socket.node),
                cpus,
                bytes(socket.total),
                bytes(socket.visible),
                bytes(socket.aside),
                bytes(socket.invisible),
                known(socket.granted.map(ByteSize::get)),
                known(socket.dirty.map(ByteSize::get)),
                bytes(socket.retired),
                list(socket.page_sizes.iter().map(|page| size(page.get()))),
                list(socket.functions.iter().map(ToString::to_string)),
            ],
        );
    }
    table
}

pub(super) fn region_table(survey: &Survey, usages: &Usages) -> Table<'static> {
    let heads =
        ["region", "kind", "node", "size", "free", "pages", "base", "granted", "dirty", "retired", "GPUs"];
    let sides = &[Left, Left, Right, Right, Right, Right, Left, Right, Right, Right, Left];
    let mut table = Table::new(sides, &heads);
    for region in &survey.regions {
        let usage = usages.get(&region.name);
        let style = if region.kind.is_invisible() { Some(Style::Green) } else { None };
        table.row(
            style,
            vec![
                region.name.clone(),
                region.kind.word().to_owned(),
                node(region.node),
                size(region.size.get()),
                known(free(survey, region)),
                size(region.page_size.get()),
                region.base.map_or_else(|| "-".to_owned(), |base| base.to_string()),
                known(usage.map(Usage::granted)),
                known(usage.map(Usage::dirty)),
                size(region.retired.spans().size()),
                list(region.functions.iter().map(ToString::to_string)),
            ],
        );
    }
    table
}

/// Slices and their holders; `None` while there are none.
pub(super) fn slice_table(usages: &Usages) -> Option<Table<'static>> {
    let mut slices = usages
        .iter()
        .flat_map(|(region, usage)| usage.held.iter().map(move |held| (region, held)))
        .peekable();
    slices.peek()?;
    let mut table = Table::new(&[Left, Right, Right, Left], &["region", "offset", "size", "owner"]);
    for (region, held) in slices {
        let offset = format!("{:#x}", held.part.offset);
        table.row(None, vec![region.clone(), offset, size(held.part.size.get()), held.owner.clone()]);
    }
    Some(table)
}

/// Memory that looks like a region and is none; `None` while there is none of it.
pub(super) fn refused_table(survey: &Survey) -> Option<Table<'static>> {
    survey.refused.first()?;
    let mut table = Table::new(&[Left, Left], &["name", "why"]);
    for refused in &survey.refused {
        table.row(Some(Style::Red), vec![refused.name.clone(), refused.reason.to_string()]);
    }
    Some(table)
}

/// Unused bytes of a pool, where the kernel counts them.
fn free(survey: &Survey, region: &Region) -> Option<u64> {
    let node = survey.host.nodes.iter().find(|node| Some(node.id) == region.node)?;
    let pool = node.pools.iter().find(|pool| pool.page_size == region.page_size)?;
    (region.kind == RegionKind::Hugetlb).then(|| pool.free.saturating_mul(pool.page_size.get()))
}

/// A size, and `-` for what is not known.
fn known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), size)
}

fn list(items: impl Iterator<Item = String>) -> String {
    let text = items.collect::<Vec<_>>().join(" ");
    if text.is_empty() { "-".to_owned() } else { text }
}

fn node(node: Option<u32>) -> String {
    node.map_or_else(|| "-".to_owned(), |node| node.to_string())
}
