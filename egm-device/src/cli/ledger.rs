//! `egm-device ledger show` and `repair`.

use std::process::ExitCode;

use Side::{Left, Right};
use clap::Subcommand;
use egm_address::Printable;
use egm_report::program::{Outcome, print_json};
use egm_report::show::print;
use egm_report::show::{Screen, Side, Style, Table, size};
use serde::Serialize;

use crate::cli::access::{LedgerArgs, open};
use crate::cli::unretire;
use crate::free::Evidence;
use crate::ledger::record::{Doubt, GrantState};
use crate::ledger::{HeldBytes, Ledger, LedgerError, Repair, States};
use crate::region::Region;

/// Show and repair the record of owners
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the state and the owner of every byte of every region
    Show(LedgerArgs),
    /// Move an unreadable record aside, remove grants of ended owners, and review quarantined memory
    ///
    /// Bytes of unknown state are scrubbed before the next grant. Bad pages stay recorded, in a file of their own.
    Repair(LedgerArgs),
    Unretire(unretire::Args),
}

pub(super) fn run(args: &Args) -> Outcome {
    match &args.command {
        Command::Show(args) => show(args),
        Command::Repair(args) => repair(args),
        Command::Unretire(args) => unretire::run(args),
    }
}

/// One region, as `--json` prints it.
#[derive(Debug, Serialize)]
struct RegionStates<'a> {
    region: &'a str,
    /// Whether a holder of one slice has a descriptor of all of them.
    shares_file: bool,
    #[serde(flatten)]
    states: &'a States,
}

fn show(args: &LedgerArgs) -> Outcome {
    let (survey, ledger) = (args.host.survey()?, open(&args.host)?);
    let states = survey.regions.iter().map(|region| Ok((region, ledger.states(region)?)));
    let states = states.collect::<Result<Vec<_>, LedgerError>>()?;
    if args.json {
        let lines = states.iter().map(|(region, states)| RegionStates {
            region: &region.name,
            shares_file: region.kind.shares_file(),
            states,
        });
        print_json(&lines.collect::<Vec<_>>());
    } else {
        print(text(&states, Screen::of_stdout()));
        for (region, _) in &states {
            print(files(&ledger, region)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lines on a region of files: small pages, and files that are set aside.
fn files(ledger: &Ledger, region: &Region) -> Result<String, LedgerError> {
    let (name, aside) = (&region.name, ledger.set_aside(region).get());
    let mut out = String::new();
    for (at, bytes) in ledger.small_pages(region)? {
        let bytes = size(bytes.get());
        out.push_str(&format!(
            "Region {name}: {bytes} of the slice at {at} have small pages; no 2 MiB of its file lie together there.\n"
        ));
    }
    if aside > 0 {
        out.push_str(&format!(
            "Region {name}: {} are set aside in bad-… files with bad pages.\n",
            size(aside)
        ));
    }
    Ok(out)
}

fn text(all: &[(&Region, States)], screen: Screen) -> String {
    let heads = ["region", "size", "granted", "scrubbing", "quarantined", "clean", "dirty", "retired"];
    let mut table = Table::new(&[Left, Right, Right, Right, Right, Right, Right, Right], &heads);
    let sides = [Left, Right, Right, Left, Right, Right, Left];
    let mut slices = Table::new(&sides, &["region", "offset", "size", "owner", "process", "user", "use"]);
    let mut gpus = Vec::new();
    for (region, states) in all {
        let held = |usage| {
            let spans = states.held.iter().filter(|held| held.usage == usage).map(|held| held.span.size());
            spans.fold(0, u64::saturating_add)
        };
        let bytes = [
            region.size.get(),
            held(GrantState::Granted),
            held(GrantState::Scrubbing),
            held(GrantState::Quarantined),
            states.clean.size(),
            states.dirty.size(),
            states.retired.spans().size(),
        ];
        table.row(None, [region.name.clone()].into_iter().chain(bytes.map(size)).collect());
        gpus.extend(states.exclusive(&region.name));
        for held in &states.held {
            slices.row(None, row(region, held));
        }
    }
    let mut out = String::new();
    table.write_in_parts(&mut out, screen);
    if !gpus.is_empty() {
        out.push_str(&format!("\n{}\n", gpus.join("\n")));
    }
    if all.iter().any(|(_, states)| !states.held.is_empty()) {
        out.push('\n');
        slices.write_in_parts(&mut out, screen);
    }
    if let Some(doubt) = all.iter().find_map(|(_, states)| states.doubt) {
        let note =
            format!("The record is not used: {doubt}. All that is free is scrubbed before it is granted.");
        out.push_str(&format!("\n{}\n", screen.paint(Style::Yellow, &note)));
    }
    out
}

/// Whether the holder has a descriptor of the whole region and is not root, which could open it anyway.
fn has_whole_device(region: &Region, held: &HeldBytes) -> bool {
    region.kind.shares_file() && held.owner.as_ref().is_some_and(|owner| owner.uid != 0)
}

fn row(region: &Region, held: &HeldBytes) -> Vec<String> {
    let owner = held.owner.as_ref();
    let number = |n: Option<u32>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    vec![
        region.name.clone(),
        held.span.start().to_string(),
        size(held.span.size()),
        owner.map_or_else(|| "unknown".to_owned(), |owner| owner.name.clone()),
        number(owner.map(|owner| owner.pid)),
        number(owner.map(|owner| owner.uid)),
        match held.usage {
            GrantState::Granted if has_whole_device(region, held) => {
                "granted, with the whole device".to_owned()
            }
            GrantState::Granted => "granted".to_owned(),
            GrantState::Scrubbing => "scrubbing".to_owned(),
            GrantState::Quarantined if held.evidence.is_empty() => "quarantined, not checked yet".to_owned(),
            GrantState::Quarantined => format!("quarantined: {}", Evidence::summary(&held.evidence)),
        },
    ]
}

fn repair(args: &LedgerArgs) -> Outcome {
    let (ledger, survey) = (open(&args.host)?, args.host.survey()?);
    let repair = ledger.repair(&survey.regions)?;
    if args.json {
        print_json(&repair);
    } else {
        print(repair_text(&repair, &survey.regions));
    }
    Ok(ExitCode::SUCCESS)
}

/// Changes of `repair`. Free bytes of a pool of `regions` are clean: its pages come zeroed from the kernel.
fn repair_text(repair: &Repair, regions: &[Region]) -> String {
    let is_pool = |name: &str| regions.iter().any(|region| region.name == name && region.kind.is_pool());
    let state = |name: &str| if is_pool(name) { "clean" } else { "dirty" };
    let mut out = repair.doubt.map_or_else(
        || "The record is sound.\n".to_owned(),
        |doubt| match doubt {
            Doubt::Missing => format!("The record is not used: {doubt}. A new one is begun.\n"),
            _ => format!(
                "The record is not used: {doubt}. It is kept as ledger.json.aside, a new one is begun.\n"
            ),
        },
    );
    for entry in &repair.forgotten {
        let (owner, span) = (&entry.owner, entry.span);
        let (bytes, region) = (size(span.size()), &entry.region);
        let line = format!("Forgotten: {owner} had {bytes} of {region}; it is {}.", state(region));
        out.push_str(&format!("{}\n", Printable(&line)));
    }
    for claim in &repair.gpus {
        out.push_str(&format!(
            "Forgotten: {} had GPU {} of {}.\n",
            claim.owner, claim.function, claim.region
        ));
    }
    for entry in &repair.freed {
        let (bytes, region) = (size(entry.span.size()), &entry.region);
        out.push_str(&format!("Out of quarantine: {bytes} of {region}; it is {}.\n", state(region)));
    }
    for left in &repair.files {
        let size = size(left.bytes);
        out.push_str(&format!(
            "Left: {size} of {} in files without an owner; they are dirty.\n",
            left.region
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use egm_address::{Offset, Span, SpanSet};

    use super::*;
    use crate::record;
    use crate::retired::Retired;

    #[test]
    fn tables_of_a_recorded_host_fit_80_columns_and_no_word_is_cut() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/facts/grace.json");
        let mut survey = record::survey(&path).unwrap();
        survey.regions[0].name = "hugetlb-2m-node0".to_owned();
        let states = |region: &Region| {
            let whole = Span::new(Offset::new(0), region.size.get()).unwrap();
            let usage = GrantState::Quarantined;
            let held = HeldBytes { span: whole, owner: None, usage, since: 0, evidence: Vec::new() };
            let (clean, dirty) = (SpanSet::from_iter([whole]), SpanSet::from_iter([whole]));
            States {
                held: vec![held],
                gpus: Vec::new(),
                clean,
                dirty,
                retired: Retired::default(),
                doubt: None,
            }
        };
        let all: Vec<_> = survey.regions.iter().map(|region| (region, states(region))).collect();
        let [file, terminal] = [Screen::FILE, Screen::plain(80)].map(|screen| text(&all, screen));
        let words: BTreeSet<&str> = file.split_whitespace().collect();
        assert!(file.lines().any(|line| line.chars().count() > 80), "{file}");
        assert!(terminal.lines().all(|line| line.chars().count() <= 80), "{terminal}");
        assert!(terminal.split_whitespace().all(|word| words.contains(word)), "{terminal}");
        let is_second = |line: &str| line.split_whitespace().eq(["region", "retired"]);
        assert!(terminal.lines().any(is_second), "{terminal}");
    }
}
