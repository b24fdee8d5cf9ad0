//! `egm-device carve free`: memory available to a user without access to the ledger.

use std::path::PathBuf;
use std::process::ExitCode;

use egm_report::program::{Outcome, print_json};
use egm_report::show::{print, size};
use serde_json::json;

use crate::broker::Client;
use crate::cli::broker::SOCKET;

/// Show how much memory the broker would grant this user now
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Socket of the broker
    #[arg(long, value_name = "SOCKET", default_value = SOCKET)]
    broker: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Outcome {
    let (total, largest) = Client::connect(&args.broker)?.free()?;
    if args.json {
        print_json(&json!({ "total": total, "largest": largest }));
    } else {
        print(format!("available: {}; largest contiguous block: {}\n", size(total), size(largest)));
    }
    Ok(ExitCode::SUCCESS)
}
