//! `egm-device carve verify`: whether a split took.

use std::path::PathBuf;
use std::process::ExitCode;

use egm_report::Blame;
use egm_report::program::{Outcome, print_json};
use egm_report::show::{Screen, Side, Style, Table, print};

use crate::carve::advise::Split;
use crate::carve::verify::{SplitCheck, verify};
use crate::host::{Host, load};

/// Verify after the reboot that the split of "carve advise --json" is in effect
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes:\n\n  0  the split is in effect\n  2  the file is wrong\n  3  the split is not in effect"
)]
pub(super) struct Args {
    /// Output of "carve advise --json"
    #[arg(value_name = "FILE")]
    split: PathBuf,
    #[command(flatten)]
    host: Host,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Outcome {
    let split: Split =
        load(&args.split, "a split", "egm-device carve advise --hypervisor SIZE --json > split.json")?;
    let checks = verify(&split, &args.host.survey()?);
    let took = checks.iter().all(|check| check.ok);
    if args.json {
        print_json(&checks)
    } else {
        print(text(&checks, Screen::of_stdout()))
    }
    Ok(if took { ExitCode::SUCCESS } else { Blame::Host.into() })
}

fn text(checks: &[SplitCheck], screen: Screen) -> String {
    let mut table = Table::new(&[Side::Left; 3], &["", "must be", "is"]);
    for check in checks {
        let (style, sign) = if check.ok { (Style::Green, "ok") } else { (Style::Red, "no") };
        table.row(Some(style), vec![sign.to_owned(), check.what.clone(), check.found.clone()]);
    }
    let mut out = String::new();
    table.write(&mut out, screen);
    let wrong = checks.iter().filter(|check| !check.ok).count();
    let verdict = if wrong == 0 {
        "The split took.\n".to_owned()
    } else {
        format!("{wrong} of {} differ: the split did not take.\n", checks.len())
    };
    out + "\n" + &verdict
}
