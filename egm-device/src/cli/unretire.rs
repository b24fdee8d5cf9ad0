//! `egm-device ledger unretire`: retired pages that are sound go back into use.

use std::process::ExitCode;

use egm_address::{ByteSize, Offset, Span};
use egm_report::program::{Outcome, print_json};
use egm_report::show::{print, size};

use crate::cli::access::{LedgerArgs, find, open};
use crate::ledger::{UnretireError, Unretired};
use crate::owner::Owner;

/// Put retired bytes of a region back into use if they can be read
///
/// Refuses bytes that the kernel or the device itself lists as retired. The bytes are scrubbed before the next grant.
/// Without --yes the bytes are checked and nothing changes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n\n  egm-device ledger unretire egm4 0x40000000 64KiB --yes")]
pub(super) struct Args {
    /// Name of the region
    #[arg(value_name = "REGION")]
    region: String,
    /// Offset in the region, such as 0x40000000 or 1GiB
    #[arg(value_name = "OFFSET", value_parser = offset)]
    offset: u64,
    /// Size, such as 4KiB; pages of it that are not retired stay as they are
    #[arg(value_name = "SIZE")]
    size: ByteSize,
    /// Change the ledger; without it the bytes are only checked
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    common: LedgerArgs,
}

fn offset(text: &str) -> Result<u64, String> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16)
            .map_err(|_| "expected an offset in bytes, for instance 0x40000000 or 1GiB".to_owned()),
        None => text.parse::<ByteSize>().map(ByteSize::get).map_err(|error| error.to_string()),
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    let survey = args.common.host.survey()?;
    let region = find(&survey, &args.region)?;
    let ledger = open(&args.common.host)?;
    let not_retired = || UnretireError::NotRetired { region: region.name.clone() };
    let pages = Span::new(Offset::new(args.offset), args.size.get()).map_err(|_| not_retired())?;
    let memory = ledger.memory();
    let Unretired { bytes, changed } =
        ledger.unretire(memory.as_ref(), region, pages, &Owner::this("unretire"), args.yes)?;
    if args.common.json {
        print_json(&Unretired { bytes, changed });
    } else if changed {
        print(format!("{} of {} are back in use, dirty.\n", size(bytes), region.name));
    } else {
        print(format!(
            "{} of {} can be read. Nothing is changed: add --yes to put them back into use.\n",
            size(bytes),
            region.name
        ));
    }
    Ok(ExitCode::SUCCESS)
}
