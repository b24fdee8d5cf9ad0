//! How a run is reported: `validate` has just made it, `report` reads one that was written before.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use egm_guest::findings::{Comparison, MAX_RUN, Run, RunError, Verdict, visible};
use egm_report::json::JsonError;
use egm_report::show::Screen;

use super::{select, show};
use crate::finding::Finding;
use crate::output::{self, Misuse, Output};

/// Form of a report, its baseline and its files.
#[derive(Debug, Args)]
pub(super) struct Form {
    /// Earlier run of "validate --json", to show its figures beside the new ones.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Minimum ratio of a figure to the baseline's, such as 0.95; the run fails below it.
    #[arg(long, alias = "least", value_name = "RATIO", requires = "baseline", value_parser = ratio)]
    min_ratio: Option<f64>,
    /// Print a table, bars and reasons (default).
    #[arg(long, group = "format")]
    table: bool,
    /// Print one JSON document.
    #[arg(long, group = "format")]
    json: bool,
    /// Print JUnit XML for continuous integration.
    #[arg(long, group = "format")]
    junit: bool,
    /// Keep only the largest size of each series, with four digits and without claims, for publication.
    #[arg(long)]
    brief: bool,
    /// Write to this file instead of standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a page with plots as well.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse::<f64>().ok().filter(|ratio| ratio.is_finite() && *ratio > 0.0);
    ratio.ok_or_else(|| "not a number above 0".to_owned())
}

/// A form with its files open, so that one that cannot be used is known before a run begins.
#[derive(Debug)]
pub(super) struct Report<'f> {
    form: &'f Form,
    before: Option<Run>,
    out: Option<Output>,
    html: Option<Output>,
}

impl Form {
    /// Reads the baseline and opens what will be written.
    ///
    /// # Errors
    /// Which file cannot be used, and why.
    pub(super) fn open(&self) -> Result<Report<'_>, Misuse> {
        if let (Some(out), Some(html)) = (&self.out, &self.html)
            && out == html
        {
            return Err(format!(
                "--out and --html are both {}: the page would replace the run",
                out.display()
            )
            .into());
        }
        let before = self.baseline.as_deref().map(read_run).transpose()?;
        let out = self.out.as_deref().map(Output::open).transpose()?;
        let html = self.html.as_deref().map(Output::open).transpose()?;
        Ok(Report { form: self, before, out, html })
    }
}

impl Report<'_> {
    /// Writes a run; the exit code shows whether nothing in it failed.
    pub(super) fn write(self, mut run: Run) -> ExitCode {
        let Self { form, before, out, html } = self;
        let comparison = before.as_ref().map(|before| Comparison::of(before, &run, None));
        if let (Some(before), Some(comparison), Some(minimum)) = (&before, &comparison, form.min_ratio) {
            let gone = gone(before, &run, comparison);
            run.verdicts.push(regressions(comparison, &gone, minimum, run.seed));
        }
        if form.brief {
            run = run.brief();
        }
        let text = if form.json && form.brief {
            run.to_json_lines()
        } else if form.json {
            run.to_json()
        } else if form.junit {
            egm_guest::findings::junit(&run)
        } else {
            let screen = if out.is_some() { Screen::FILE } else { Screen::of_stdout() };
            show::table(&run, comparison.as_ref(), screen)
        };
        let written = match out {
            Some(file) => file.write(&text),
            None => output::print(&text),
        };
        let page =
            html.map_or(Ok(()), |file| file.write(&egm_guest::findings::html(&run, comparison.as_ref())));
        let mut code = if run.totals().is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        for wrong in [written, page].into_iter().filter_map(Result::err) {
            code = output::complain(&wrong, ExitCode::FAILURE);
        }
        code
    }
}

/// Arguments of `egm-guest report`.
#[derive(Debug, Args)]
pub(crate) struct Again {
    /// Output of "egm-guest validate --json".
    run: PathBuf,
    /// Groups, names or patterns of validations to show, as for "validate" [default: all].
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    select: Vec<String>,
    #[command(flatten)]
    form: Form,
}

/// Reports a run that was written before.
pub(crate) fn again(options: &Again) -> ExitCode {
    let opened = read_run(&options.run)
        .and_then(|run| selected(run, &options.select).map_err(Misuse::from))
        .and_then(|run| Ok((run, options.form.open()?)));
    opened.map_or_else(|wrong| output::misused(&wrong), |(run, report)| report.write(run))
}

/// The run with the verdicts that `words` select.
fn selected(mut run: Run, words: &[String]) -> Result<Run, String> {
    let names: Vec<&str> = run.verdicts.iter().map(|verdict| verdict.name.as_str()).collect();
    let chosen: BTreeSet<String> =
        select::select("--select", &names, words)?.into_iter().map(str::to_owned).collect();
    run.verdicts.retain(|verdict| chosen.contains(&verdict.name));
    Ok(run)
}

/// Series of the earlier run that this run lacks at every size, although it ran their validation: for instance a
/// measurement that is skipped now.
fn gone(before: &Run, run: &Run, comparison: &Comparison) -> BTreeSet<String> {
    let ratios = comparison.ratios.iter();
    let there: BTreeSet<_> = ratios.map(|ratio| (&*ratio.name, &*ratio.series, &*ratio.unit)).collect();
    let tried: BTreeSet<&str> = run.verdicts.iter().map(|verdict| verdict.name.as_str()).collect();
    let again = before.verdicts.iter().filter(|verdict| tried.contains(verdict.name.as_str()));
    let figures = again.flat_map(|verdict| verdict.figures.iter().map(move |figure| (verdict, figure)));
    figures
        .filter(|(_, figure)| figure.rounds > 0)
        .filter(|(verdict, figure)| !there.contains(&(&*verdict.name, &*figure.series, &*figure.unit)))
        .map(|(verdict, figure)| visible(&format!("{}: {}", verdict.name, figure.series)))
        .collect()
}

/// Verdict on figures below `minimum`, and on series that are gone.
fn regressions(comparison: &Comparison, gone: &BTreeSet<String>, minimum: f64, seed: u64) -> Verdict {
    const NAME: &str = "baseline.least";
    const CLAIM: &str = "no figure is below --min-ratio of the baseline's, and none is gone";
    /// Most that a reason names.
    const NAMED: usize = 6;
    let (ratios, below) = (&comparison.ratios, comparison.below(minimum));
    let mut wrong = Vec::new();
    if ratios.is_empty() {
        wrong.push(
            "the baseline has none of this run's figures: take one of the same validations and sizes"
                .to_owned(),
        );
    }
    if !below.is_empty() {
        let said =
            below.iter().take(NAMED).map(|ratio| format!("{} is {:.3} of before", ratio.what(), ratio.ratio));
        let said: Vec<String> = said.collect();
        wrong.push(format!(
            "{} of {} figures are below {minimum}: {}",
            below.len(),
            ratios.len(),
            said.join("; ")
        ));
    }
    if !gone.is_empty() {
        let named: Vec<&str> = gone.iter().take(NAMED).map(String::as_str).collect();
        wrong.push(format!("{} series of the baseline are gone: {}", gone.len(), named.join("; ")));
    }
    let finding = if wrong.is_empty() {
        Finding::passed(format!("{} figures, minimum {minimum}", ratios.len()))
    } else {
        Finding::failed(wrong.join("; "))
    };
    let worst = ratios.iter().map(|ratio| ratio.ratio).min_by(f64::total_cmp);
    let finding = match worst {
        Some(worst) => finding.with_value(worst, "of before"),
        None => finding,
    };
    finding.into_verdict(NAME, CLAIM, seed)
}

/// Remedy where a file is no run.
const WRITE_ONE: &str = "write one: egm-guest validate --json --out FILE";

/// Reads a run that was written before.
pub(crate) fn read_run(path: &Path) -> Result<Run, Misuse> {
    let file = File::open(path).map_err(|error| {
        Misuse::from(format!("cannot open {}: {error}", path.display())).with_help(WRITE_ONE)
    })?;
    let mut text = Vec::new();
    file.take(MAX_RUN as u64 + 1)
        .read_to_end(&mut text)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    if text.len() > MAX_RUN {
        return Err(format!("{} is longer than a run, {} MiB at most", path.display(), MAX_RUN >> 20).into());
    }
    Run::parse(&text).map_err(|error| no_run(path, error))
}

/// The error for the file at `path`, which is no run.
fn no_run(path: &Path, error: RunError) -> Misuse {
    let path = path.display();
    let wrong = match error {
        RunError::Json(mistake) => {
            let JsonError { line, column, reason, excerpt, .. } = *mistake;
            Misuse::from(format!("{path}:{line}:{column}: cannot read a run: {reason}"))
                .with_excerpt(&excerpt)
        }
        RunError::Refused(why) => Misuse::from(format!("cannot read {path}: it is {why}")),
    };
    wrong.with_help(WRITE_ONE)
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;

    #[test]
    fn a_ratio_is_a_number_above_zero() {
        assert_eq!(ratio("0.95"), Ok(0.95));
        assert!(["0", "-1", "NaN", "inf", "x"].iter().all(|text| ratio(text).is_err()));
    }

    #[test]
    fn a_figure_below_the_minimum_fails_and_is_named() {
        let ratio = |series: &str, ratio| egm_guest::findings::Ratio {
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
        let none = BTreeSet::new();
        let failed = regressions(&both, &none, 0.95, 1);
        assert_eq!((failed.outcome, failed.value), (Outcome::Failed, Some(0.5)));
        assert!(
            failed.reason.contains("1 of 2") && failed.reason.contains("write is 0.500"),
            "{}",
            failed.reason
        );
        assert_eq!(regressions(&both, &none, 0.5, 1).outcome, Outcome::Passed);
        assert_eq!(regressions(&Comparison::default(), &none, 0.5, 1).outcome, Outcome::Failed);
        let gone = BTreeSet::from(["memory.latency: step".to_owned()]);
        assert!(
            regressions(&both, &gone, 0.5, 1)
                .reason
                .contains("1 series of the baseline are gone: memory.latency")
        );
    }
}
