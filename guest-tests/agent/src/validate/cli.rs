//! The command line of `egm-guest validate`.

use std::process::ExitCode;

use clap::Args;
use egm_address::ByteSize;
use egm_report::{Outcome, Verdict};

use super::process::{self, Given};
use super::{all, find, select};
use crate::cmdline::Arguments;

/// Exit code for a command line that is not understood.
const USAGE: u8 = 2;

/// What a person asks for.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Groups, names or patterns of validations, comma separated; `-WORD` takes away. All without one.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    select: Vec<String>,
    /// Names the validations and what each claims.
    #[arg(long)]
    list: bool,
    /// The largest buffer: `64MiB`.
    #[arg(long, default_value = "64MiB")]
    size: ByteSize,
    /// Repeats what was random in another run.
    #[arg(long)]
    seed: Option<u64>,
    /// An argument of a validation.
    #[arg(long = "arg", value_name = "KEY=VALUE")]
    args: Vec<String>,
    /// One JSON document a validation instead of a table.
    #[arg(long)]
    json: bool,
}

/// Validates, and says by the exit code whether nothing failed.
pub(crate) fn main(options: &Options) -> ExitCode {
    match validate(options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(wrong) => {
            eprintln!("error: {wrong}");
            ExitCode::from(USAGE)
        }
    }
}

fn validate(options: &Options) -> Result<bool, String> {
    let names: Vec<&str> = all().map(|validation| validation.name).collect();
    let chosen = select::select(&names, &options.select)?;
    Arguments::from_pairs(&options.args).map_err(|broken| broken.to_string())?;
    if options.list {
        for validation in chosen.iter().filter_map(|name| find(name)) {
            println!("{:<24} {}", validation.name, validation.claim);
        }
        return Ok(true);
    }
    let seed = options.seed.unwrap_or_else(random_seed);
    let most = options.size.get();
    eprintln!("seed {seed}");
    let mut good = true;
    for validation in chosen.iter().filter_map(|name| find(name)) {
        let given = Given { name: validation.name.to_owned(), seed, most, args: options.args.clone() };
        let verdict = process::run(validation, &given);
        good &= matches!(verdict.outcome, Outcome::Passed | Outcome::Waived);
        if options.json { println!("{}", verdict.to_json()) } else { print_row(&verdict) }
    }
    Ok(good)
}

fn print_row(verdict: &Verdict) {
    println!("{:<24} {:<7} {}", verdict.name, verdict.outcome, verdict.reason);
}

/// A seed that nobody chose.
fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    // Without the kernel's randomness, the time: a seed needs to be another one, no more.
    let random = std::fs::File::open("/dev/urandom")
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut bytes));
    let time = || std::time::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos());
    match random {
        Ok(()) => u64::from_le_bytes(bytes),
        Err(_) => u64::try_from(time() & u128::from(u64::MAX)).unwrap_or(1),
    }
}
