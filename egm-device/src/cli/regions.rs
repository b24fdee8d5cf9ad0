//! `egm-device regions`: memory of this host for guests, and its holders.

use std::process::ExitCode;

use Side::{Left, Right};
use egm_address::ByteSize;
use egm_report::program::{Outcome, print_json};
use egm_report::show::{Colour, Side, Style, Table, note, print, size};
use egm_report::{Chain, Report};

use crate::cli::html::html;
use crate::host::Host;
use crate::region::usage::{Socket, Usage, Usages, sockets};
use crate::region::{DaxFiles, Region, RegionKind, Survey};

/// Shows which memory of this host guests can get, per socket and per region
#[derive(Debug, clap::Args)]
#[command(after_help = COLUMNS)]
pub(super) struct Args {
    #[command(flatten)]
    host: Host,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print a page for a browser, with a map of each socket
    #[arg(long, conflicts_with = "json")]
    html: bool,
}

const COLUMNS: &str = "\
Columns:

  visible    memory of the kernel's allocator, hugetlb pools included
  aside      device-DAX: the kernel knows each page and gives none away
  invisible  memory that the kernel does not know: EGM, and what mem= and memmap= hide
  free       pages of a hugetlb pool that nobody uses
  granted    what somebody has; \"egm-device ledger show\" says who
  dirty      what is scrubbed before anybody gets it
  retired    bad memory, which nobody gets
  kind       the word for it in \"region\" of a configuration";

/// Output of `--json`; [`Survey`] can be read back from it.
#[derive(Debug, serde::Serialize)]
struct Record<'a> {
    #[serde(flatten)]
    survey: &'a Survey,
    sockets: &'a [Socket],
    usage: &'a Usages,
}

pub(super) fn run(args: &Args) -> Outcome {
    let mut survey = args.host.survey()?;
    let usages = usages(&args.host, &mut survey).unwrap_or_else(|error| {
        let why = Chain(error.as_ref()).to_string();
        note(format_args!("granted and dirty are not known: {}", why.trim_start_matches("error: ")));
        Usages::new()
    });
    if let Some(why) = args.host.no_kvm() {
        note(format_args!("whether there is guest-memfd is not known: /dev/kvm cannot be opened: {why}"));
    }
    let sockets = sockets(&survey, &usages);
    if args.json {
        print_json(&Record { survey: &survey, sockets: &sockets, usage: &usages });
    } else if args.html {
        print(html(&survey, &sockets, &usages));
    } else {
        print(text(&survey, &sockets, &usages, Colour::of_stdout()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Usage of each region by the ledger, which has more retired pages than the kernel.
fn usages(host: &Host, survey: &mut Survey) -> Result<Usages, Box<dyn Report>> {
    let mut usages = Usages::new();
    let Some(ledger) = host.ledger()? else { return Ok(usages) };
    for region in &mut survey.regions {
        let states = ledger.states(region)?;
        let exclusive = states.exclusive(&region.name);
        usages.insert(region.name.clone(), Usage { exclusive, ..Usage::from(&states) });
        region.retired = states.retired;
    }
    Ok(usages)
}

fn text(survey: &Survey, sockets: &[Socket], usages: &Usages, colour: Colour) -> String {
    let tables = [
        ("Sockets", Some(socket_table(sockets))),
        ("Regions", Some(region_table(survey, usages))),
        ("Slices", slice_table(usages)),
        ("Refused", refused_table(survey)),
    ];
    let mut out = String::new();
    for (title, table) in tables.iter().filter_map(|(title, table)| Some((title, table.as_ref()?))) {
        let before = if out.is_empty() { "" } else { "\n" };
        out += &format!("{before}{}\n", colour.paint(Style::Strong, title));
        table.write(&mut out, colour);
    }
    let shared: Vec<String> = survey.regions.iter().filter_map(file_note).collect();
    if !shared.is_empty() {
        out += &format!("\n{}\n", shared.join("\n"));
    }
    let exclusive: Vec<&str> =
        usages.values().flat_map(|usage| &usage.exclusive).map(String::as_str).collect();
    if !exclusive.is_empty() {
        out += &format!("\n{}\n", exclusive.join("\n"));
    }
    out
}

/// Note on the reason that the slices of a device-DAX region share a file, if they do.
fn file_note(region: &Region) -> Option<String> {
    let RegionKind::Devdax { files, .. } = region.kind else { return None };
    let reason = match files {
        DaxFiles::Static => "cannot be split into devices: static",
        DaxFiles::Whole => {
            "can be split into devices: unbind the device and write 0 to its size, after each boot"
        }
        DaxFiles::PerSlice => return None,
    };
    Some(format!("region {}: all slices are one file; it {reason}", region.name))
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
    let sides = &[Right, Left, Right, Right, Right, Right, Right, Right, Right, Left, Left];
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

/// Unused bytes of a pool, where the kernel counts them.
fn free(survey: &Survey, region: &Region) -> Option<u64> {
    let node = survey.host.nodes.iter().find(|node| Some(node.id) == region.node)?;
    let pool = node.pools.iter().find(|pool| pool.page_size == region.page_size)?;
    (region.kind == RegionKind::Hugetlb).then(|| pool.free.saturating_mul(pool.page_size.get()))
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
