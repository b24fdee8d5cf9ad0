//! `egm-device carve verify`: whether a split is in effect.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use egm_report::json::{self, JsonError};
use egm_report::program::{Outcome, print_json};
use egm_report::show::{Screen, Side, Style, Table, print};
use egm_report::{Blame, Remedy, Report};

use crate::bounded;
use crate::carve::advise::Split;
use crate::carve::verify::{SplitCheck, verify};
use crate::host::Host;

/// Largest file of a split, in bytes.
const MAX_SPLIT: u64 = 16 << 20;

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
    let split = load(&args.split)?;
    let checks = verify(&split, &args.host.survey()?);
    let is_in_effect = checks.iter().all(|check| check.ok);
    if args.json {
        print_json(&checks)
    } else {
        print(text(&checks, Screen::of_stdout()))
    }
    Ok(if is_in_effect { ExitCode::SUCCESS } else { Blame::Host.into() })
}

/// A file that is not a split.
#[derive(Debug, thiserror::Error)]
enum SplitError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}:{}:{}: not a split as this program writes it", path.display(), source.line, source.column)]
    Json { path: PathBuf, source: Box<JsonError> },
}

impl Report for SplitError {
    fn remedy(&self) -> Remedy {
        Blame::Configuration.help("make it: egm-device carve advise --hypervisor SIZE --json > split.json")
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Json { source, .. } => Some(source.excerpt.clone()),
            Self::Read { .. } => None,
        }
    }
}

fn load(path: &Path) -> Result<Split, SplitError> {
    let text = File::open(path)
        .and_then(|file| bounded::read(file, MAX_SPLIT))
        .map_err(|source| SplitError::Read { path: path.to_owned(), source })?;
    json::from_slice(&text).map_err(|source| SplitError::Json { path: path.to_owned(), source })
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
        "The split is in effect.\n".to_owned()
    } else {
        format!("{wrong} of {} differ: the split is not in effect.\n", checks.len())
    };
    out + "\n" + &verdict
}
