//! `egm-device regions`: memory of this host for guests, and its holders.

use std::process::ExitCode;

use egm_report::program::{Outcome, print_json};
use egm_report::show::{Screen, Style, print};
use egm_report::{Chain, Report};

use crate::cli::html::html;
use crate::cli::tables::{refused_table, region_table, slice_table, socket_table};
use crate::host::{Host, LocalHost};
use crate::region::usage::{Socket, Usage, Usages, sockets};
use crate::region::{DaxFiles, Region, RegionKind, Survey};

/// Show which memory of this host guests can get, per socket and per region
#[derive(Debug, clap::Args)]
#[command(after_help = COLUMNS)]
pub(super) struct Args {
    #[command(flatten)]
    host: Host,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print a page for a browser, with the memory of each socket drawn to scale
    #[arg(long, conflicts_with = "json")]
    html: bool,
    /// Show the kernel's command line in the page; it can have secrets
    #[arg(long, requires = "html")]
    with_kernel_command_line: bool,
}

const COLUMNS: &str = "\
Columns:

  visible    memory of the kernel's allocator, hugetlb pools included
  aside      device-DAX: the kernel has a struct page for each page, and uses none
  invisible  memory without struct pages: EGM, and what mem= and memmap= hide
  free       unused pages of a hugetlb pool
  granted    memory of owners, which \"egm-device ledger show\" lists
  dirty      memory that is scrubbed before the next grant
  retired    bad memory, which is never granted
  kind       name of the kind for \"region\" of a configuration

On a narrow terminal, columns without a value are left out, and columns that have no room follow in a second table.";

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
        tracing::info!("granted and dirty are not known: {}", why.trim_start_matches("error: "));
        Usages::new()
    });
    if let Some(why) = args.host.local().and_then(LocalHost::no_kvm) {
        tracing::info!("whether there is guest-memfd is not known: /dev/kvm cannot be opened: {why}");
    }
    let sockets = sockets(&survey, &usages);
    if args.json {
        print_json(&Record { survey: &survey, sockets: &sockets, usage: &usages });
    } else if args.html {
        print(html(&survey, &sockets, &usages, args.with_kernel_command_line));
    } else {
        print(text(&survey, &sockets, &usages, Screen::of_stdout()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Usage of each region by the ledger, which has more retired pages than the kernel.
fn usages(host: &Host, survey: &mut Survey) -> Result<Usages, Box<dyn Report>> {
    let mut usages = Usages::new();
    let ledger = host.local().map(LocalHost::ledger).transpose()?;
    let Some(ledger) = ledger.flatten() else { return Ok(usages) };
    for region in &mut survey.regions {
        let states = ledger.states(region)?;
        let exclusive = states.exclusive(&region.name);
        usages.insert(region.name.clone(), Usage { exclusive, ..Usage::from(&states) });
        region.retired = states.retired;
    }
    Ok(usages)
}

fn text(survey: &Survey, sockets: &[Socket], usages: &Usages, screen: Screen) -> String {
    let tables = [
        ("Sockets", Some(socket_table(sockets))),
        ("Regions", Some(region_table(survey, usages))),
        ("Slices", slice_table(usages)),
        ("Refused", refused_table(survey)),
    ];
    let mut out = String::new();
    for (title, table) in tables.iter().filter_map(|(title, table)| Some((title, table.as_ref()?))) {
        let before = if out.is_empty() { "" } else { "\n" };
        out += &format!("{before}{}\n", screen.paint(Style::Strong, title));
        table.write_in_parts(&mut out, screen);
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use egm_address::ByteSize;

    use super::*;
    use crate::record;
    use crate::region::usage::RegionPart;

    /// The recorded hosts of this repository.
    fn surveys() -> Vec<Survey> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/facts");
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files.map(|path| record::survey(&path).unwrap()).collect()
    }

    #[test]
    fn tables_of_recorded_hosts_fit_80_columns_and_no_word_is_cut() {
        let surveys = surveys();
        assert!(surveys.iter().any(|survey| !survey.regions.is_empty()));
        for survey in surveys {
            let dirty = vec![RegionPart { offset: 0, size: ByteSize::new(1 << 30) }];
            let usage = Usage { dirty, ..Usage::default() };
            let names = survey.regions.iter().map(|region| region.name.clone());
            let granted: Usages = names.map(|name| (name, usage.clone())).collect();
            for usages in [Usages::new(), granted] {
                let sockets = sockets(&survey, &usages);
                let [file, terminal] =
                    [Screen::FILE, Screen::plain(80)].map(|screen| text(&survey, &sockets, &usages, screen));
                let words: BTreeSet<&str> = file.split_whitespace().collect();
                assert!(terminal.lines().all(|line| line.chars().count() <= 80), "{terminal}");
                assert!(terminal.split_whitespace().all(|word| words.contains(word)), "{terminal}");
                for region in &survey.regions {
                    let mut functions = region.functions.iter().map(ToString::to_string);
                    assert!(functions.all(|function| terminal.contains(&function)), "{terminal}");
                }
            }
        }
    }
}
