//! `egm-guest compare A B`: two runs side by side.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use egm_guest::findings::Comparison;
use egm_report::show::{COLUMNS, Screen};

use crate::output::{self, Misuse, Output};
use crate::validate::read_run;

/// Arguments of `egm-guest compare`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Run to compare with, from "egm-guest validate --json".
    first: PathBuf,
    /// Other run, or the same one with --rename.
    second: PathBuf,
    /// Select the series of the second run with OLD in their name and rename it to NEW: "node 1=node 0" compares memory of
    /// node 1 with that of node 0.
    #[arg(long, value_name = "OLD=NEW")]
    rename: Option<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Write a page with plots of both runs.
    #[arg(long, value_name = "FILE", conflicts_with = "rename")]
    html: Option<PathBuf>,
}

/// Prints what is different; a difference is no failure.
pub(crate) fn main(options: &Options) -> ExitCode {
    let compared = compare(options).and_then(|compared| {
        let page = options.html.as_deref().map(Output::open).transpose()?;
        Ok((compared, page))
    });
    match compared {
        Err(wrong) => output::misused(&wrong),
        Ok(((text, html), page)) => match page.map_or(Ok(()), |file| file.write(&html)) {
            Err(wrong) => output::complain(&wrong, ExitCode::FAILURE),
            Ok(()) => output::printed(&text),
        },
    }
}

/// The text and the page.
fn compare(options: &Options) -> Result<(String, String), Misuse> {
    let rename = match &options.rename {
        None => None,
        Some(text) => match text.split_once('=') {
            Some((old, new)) if !old.is_empty() => Some((old, new)),
            _ => return Err(format!("--rename {text:?} is not OLD=NEW, say `node 1=node 0`").into()),
        },
    };
    let (first, second) = (read_run(&options.first)?, read_run(&options.second)?);
    let comparison = Comparison::of(&first, &second, rename);
    let text = if options.json {
        serde_json::to_string_pretty(&comparison)
            .map(|text| text + "\n")
            .map_err(|error| format!("cannot write the comparison: {error}"))?
    } else {
        comparison.to_text(Screen::of_stdout().columns().unwrap_or(COLUMNS))
    };
    Ok((text, egm_guest::findings::html(&second, Some(&comparison))))
}
