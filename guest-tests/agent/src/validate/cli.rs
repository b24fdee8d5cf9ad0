//! The command line of `egm-guest validate`: what a person asks for, the run, and where it goes.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use egm_address::ByteSize;
use egm_report::{Comparison, MAX_RUN, Outcome, RUN_VERSION, Run, Verdict};

use super::process::{self, Given};
use super::progress::Progress;
use super::{Validation, all, find, select, show};
use crate::cmdline::Arguments;
use crate::finding::Finding;
use crate::tree::Tree;
use crate::{calendar, machine};

/// Exit code for a command line that is not understood.
pub(crate) const USAGE: u8 = 2;
/// Largest size that is chosen without `--size`, in bytes.
const MOST: u64 = 256 << 20;
/// Smallest one.
const LEAST: u64 = 1 << 20;

/// What a person asks for.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Groups, names or patterns (`*`, `?`) of validations, comma separated; `-WORD` takes away. All without one.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    select: Vec<String>,
    /// Names the validations and what each claims.
    #[arg(long)]
    list: bool,
    /// The largest buffer: `64MiB`. Without it a sixteenth of what is free, 1 MiB to 256 MiB.
    #[arg(long, value_name = "BYTES")]
    size: Option<ByteSize>,
    /// Repeats what was random in another run.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// A run written before, with --json: its figures stand beside these.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Fails the run when a figure is below this part of the baseline's: `0.95`.
    #[arg(long, value_name = "RATIO", requires = "baseline", value_parser = ratio)]
    least: Option<f64>,
    /// A table, bars and reasons. The default.
    #[arg(long, group = "format")]
    table: bool,
    /// One JSON document.
    #[arg(long, group = "format")]
    json: bool,
    /// JUnit XML.
    #[arg(long, group = "format")]
    junit: bool,
    /// Writes there, not to standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Writes a page with plots, too.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// An argument of validations; `deadline` is the seconds that each may take.
    #[arg(long = "arg", value_name = "KEY=VALUE")]
    args: Vec<String>,
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse::<f64>().ok().filter(|ratio| ratio.is_finite() && *ratio > 0.0);
    ratio.ok_or_else(|| "not a number above 0".to_owned())
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

/// Everything that may be wrong with the command line is found before the first validation runs.
fn validate(options: &Options) -> Result<bool, String> {
    let names: Vec<&str> = all().map(|validation| validation.name).collect();
    let chosen: Vec<&Validation> =
        select::select(&names, &options.select)?.into_iter().filter_map(find).collect();
    if options.list {
        chosen.iter().for_each(|validation| println!("{:<28} {}", validation.name, validation.claim));
        return Ok(true);
    }
    Arguments::from_pairs(&options.args).map_err(|broken| broken.to_string())?;
    let before = options.baseline.as_deref().map(read_run).transpose()?;
    let out = options.out.as_deref().map(create).transpose()?;
    let html = options.html.as_deref().map(create).transpose()?;
    let mut run = run(options, &chosen);
    let comparison = before.map(|before| Comparison::of(&before, &run, None));
    if let (Some(comparison), Some(least)) = (&comparison, options.least) {
        run.verdicts.push(regressions(comparison, least, run.seed));
    }
    let text = if options.json {
        run.to_json()
    } else if options.junit {
        egm_report::junit(&run)
    } else {
        show::table(&run, comparison.as_ref(), show::colours(out.is_some()))
    };
    write(out, &text)?;
    if let Some(file) = html {
        write(Some(file), &egm_report::html(&run, comparison.as_ref()))?;
    }
    Ok(run.totals().is_good())
}

/// What [`super::on_console`] found, as a run.
pub(super) fn document(seed: u64, most: u64, verdicts: Vec<Verdict>) -> Run {
    let machine = machine::machine(&Tree::live());
    Run { version: RUN_VERSION, date: calendar::now(), program: program(), seed, most, machine, verdicts }
}

fn run(options: &Options, chosen: &[&'static Validation]) -> Run {
    let tree = Tree::live();
    let seed = options.seed.unwrap_or_else(random_seed);
    let most =
        options.size.map_or_else(|| default_size(machine::meminfo(&tree, "MemAvailable")), ByteSize::get);
    let mut run = Run {
        version: RUN_VERSION,
        date: calendar::now(),
        program: program(),
        seed,
        most,
        machine: machine::machine(&tree),
        verdicts: Vec::new(),
    };
    let given = Given { name: String::new(), seed, most, args: options.args.clone() };
    let mut progress = Progress::new(chosen.len());
    for validation in chosen {
        let verdict = process::run(validation, &given, &mut |since| progress.told(validation.name, since));
        run.verdicts.push(verdict);
        progress.done();
    }
    run
}

fn program() -> String {
    let linked = if cfg!(target_feature = "crt-static") { "statically" } else { "dynamically" };
    format!("egm-guest {}, linked {linked}", env!("CARGO_PKG_VERSION"))
}

/// A power of two, a sixteenth of what is available.
fn default_size(available: Option<u64>) -> u64 {
    let part = available.unwrap_or(0) / 16;
    let power = part.checked_ilog2().map_or(0, |power| 1u64 << power);
    power.clamp(LEAST, MOST)
}

/// The verdict on figures that are worse than a person allows.
fn regressions(comparison: &Comparison, least: f64, seed: u64) -> Verdict {
    const NAME: &str = "baseline.least";
    const CLAIM: &str = "no figure is below --least of the baseline's";
    let below = comparison.below(least);
    let said: Vec<String> = below
        .iter()
        .take(6)
        .map(|ratio| format!("{} is {:.3} of before", ratio.what(), ratio.ratio))
        .collect();
    let mut finding = match (comparison.ratios.is_empty(), below.is_empty()) {
        (true, _) => Finding::waived(
            "the baseline has none of this run's figures: take one of the same validations and sizes",
        ),
        (false, true) => Finding::passed(format!("{} figures, least {least}", comparison.ratios.len())),
        (false, false) => Finding::failed(format!(
            "{} of {} figures are below {least}: {}",
            below.len(),
            comparison.ratios.len(),
            said.join("; ")
        )),
    };
    if let Some(worst) = comparison.ratios.iter().map(|ratio| ratio.ratio).min_by(f64::total_cmp) {
        finding = finding.with_value(worst, "of before");
    }
    finding.into_verdict(NAME, CLAIM, seed)
}

/// Reads a run that was written before.
pub(crate) fn read_run(path: &Path) -> Result<Run, String> {
    let file = File::open(path).map_err(|error| format!("cannot open {}: {error}", path.display()))?;
    let mut text = Vec::new();
    file.take(MAX_RUN as u64 + 1)
        .read_to_end(&mut text)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Run::parse(&text).map_err(|why| {
        format!("{} is {why}; write one with `egm-guest validate --json --out FILE`", path.display())
    })
}

fn create(path: &Path) -> Result<(File, &Path), String> {
    let file = File::create(path).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    Ok((file, path))
}

fn write(file: Option<(File, &Path)>, text: &str) -> Result<(), String> {
    match file {
        Some((mut file, path)) => file
            .write_all(text.as_bytes())
            .map_err(|error| format!("cannot write {}: {error}", path.display())),
        None => {
            // Nobody is left to tell when standard output is gone.
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            Ok(())
        }
    }
}

/// A seed that nobody chose.
fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    // Without the kernel's randomness, the time: a seed needs to be another one, no more.
    let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    let time = || std::time::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos());
    match random {
        Ok(()) => u64::from_le_bytes(bytes),
        Err(_) => u64::try_from(time() & u128::from(u64::MAX)).unwrap_or(1),
    }
}

/// Whether an outcome is one that a run can end well with.
pub(super) const fn is_good(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Passed | Outcome::Waived)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_a_power_of_two_within_bounds() {
        assert_eq!(default_size(None), LEAST);
        assert_eq!(default_size(Some(1000 << 20)), 32 << 20);
        assert_eq!(default_size(Some(u64::MAX)), MOST);
    }

    #[test]
    fn a_ratio_is_a_number_above_zero() {
        assert_eq!(ratio("0.95"), Ok(0.95));
        assert!(["0", "-1", "NaN", "inf", "x"].iter().all(|text| ratio(text).is_err()));
    }

    #[test]
    fn a_figure_below_the_least_fails_and_is_named() {
        let ratio = |series: &str, ratio| egm_report::Ratio {
            name: "memory.bandwidth".into(),
            series: series.into(),
            bytes: None,
            unit: "GB/s".into(),
            first: 1.0,
            second: ratio,
            ratio,
        };
        let both =
            Comparison { ratios: vec![ratio("read", 0.98), ratio("write", 0.5)], ..Comparison::default() };
        let failed = regressions(&both, 0.95, 1);
        assert_eq!((failed.outcome, failed.value), (Outcome::Failed, Some(0.5)));
        assert!(
            failed.reason.contains("1 of 2") && failed.reason.contains("write is 0.500"),
            "{}",
            failed.reason
        );
        assert_eq!(regressions(&both, 0.5, 1).outcome, Outcome::Passed);
        assert_eq!(regressions(&Comparison::default(), 0.5, 1).outcome, Outcome::Waived);
    }
}
