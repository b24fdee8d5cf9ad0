//! The table of cores and of the mutants that may survive, and the verdict on a run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::engine::error::LabError;

/// Viable mutants of a core that its tests must catch, in percent.
const REQUIRED: usize = 95;

/// Content of `guest-tests/mutants.json`: cores, and mutants that may survive.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    cores: Vec<Core>,
    survivors: Vec<Survivor>,
}

/// Code without side effects, and the tests that must notice a change of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Core {
    /// Value of `--core` that selects it.
    pub(crate) name: String,
    /// Globs of its files, from the root of the checkout.
    pub(crate) files: Vec<String>,
    /// Arguments of `cargo nextest run` that select the programs with its tests, which alone are built.
    pub(crate) targets: Vec<String>,
    /// Its tests among those, as nextest's filter; all by default.
    pub(crate) filter: Option<String>,
}

/// A mutant that may survive. It covers all mutants of that description in that line.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Survivor {
    core: String,
    file: PathBuf,
    /// As `cargo mutants --list` prints it after file, line and column.
    mutant: String,
    /// The line that it changes, without indentation.
    line: String,
    reason: String,
}

/// A mutant as `cargo mutants` reports it.
#[derive(Debug, Deserialize)]
pub(crate) struct Mutant {
    file: PathBuf,
    name: String,
    span: Lines,
    #[serde(skip)]
    line: String,
}

#[derive(Debug, Deserialize)]
struct Lines {
    start: Line,
}

#[derive(Debug, Deserialize)]
struct Line {
    line: usize,
}

impl Mutant {
    /// Reads the line that the mutant changes.
    pub(crate) fn read_line(&mut self, tree: &Path) -> Result<(), LabError> {
        let path = tree.join(&self.file);
        let text = std::fs::read_to_string(&path).map_err(LabError::file("read", path))?;
        let line = text.lines().nth(self.span.start.line.saturating_sub(1));
        line.unwrap_or_default().trim().clone_into(&mut self.line);
        Ok(())
    }

    fn description(&self) -> &str {
        self.name.splitn(4, ':').nth(3).unwrap_or(&self.name).trim()
    }
}

impl Survivor {
    fn is(&self, mutant: &Mutant) -> bool {
        self.file == mutant.file && self.mutant == mutant.description() && self.line == mutant.line
    }
}

/// Content of `outcomes.json`, from `cargo mutants`.
#[derive(Debug, Deserialize)]
pub(crate) struct Outcomes {
    outcomes: Vec<Outcome>,
}

#[derive(Debug, Deserialize)]
struct Outcome {
    scenario: Scenario,
    summary: Summary,
}

#[derive(Debug, Deserialize)]
enum Scenario {
    Baseline,
    Mutant(Mutant),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum Summary {
    Success,
    Failure,
    CaughtMutant,
    MissedMutant,
    Unviable,
    Timeout,
}

impl Outcomes {
    /// The mutants, without the baseline.
    pub(crate) fn mutants_mut(&mut self) -> impl Iterator<Item = &mut Mutant> {
        self.outcomes.iter_mut().filter_map(|outcome| match &mut outcome.scenario {
            Scenario::Mutant(mutant) => Some(mutant),
            Scenario::Baseline => None,
        })
    }
}

/// Verdict on a run of a core.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// One line for the reader.
    pub(crate) summary: String,
    /// Reasons for the run to fail.
    pub(crate) problems: Vec<String>,
}

impl Table {
    pub(crate) fn read(path: &Path) -> Result<Self, LabError> {
        let text = std::fs::read(path).map_err(LabError::file("read", path))?;
        LabError::json(path.display().to_string(), &text)
    }

    /// The cores of these names, or all without a name.
    pub(crate) fn cores(&self, names: &[String]) -> Result<Vec<&Core>, LabError> {
        let known = |name: &String| self.cores.iter().any(|core| core.name == *name);
        if let Some(name) = names.iter().find(|name| !known(name)) {
            let known: Vec<_> = self.cores.iter().map(|core| core.name.as_str()).collect();
            let known = known.join(", ");
            return Err(LabError::Usage(format!("no core is named \"{name}\"\n  help: use one of {known}")));
        }
        Ok(self.cores.iter().filter(|core| names.is_empty() || names.contains(&core.name)).collect())
    }

    /// Rows of `core` with mutants that are no longer in its files.
    pub(crate) fn stale(&self, core: &Core, all: &[Mutant]) -> Vec<String> {
        let rows = self.survivors.iter().filter(|row| row.core == core.name);
        rows.filter(|row| !all.iter().any(|mutant| row.is(mutant)))
            .map(|row| {
                format!(
                    "{}: {} in `{}`: no such mutant; it may survive because: {}\n  help: remove its row from guest-tests/mutants.json",
                    row.file.display(),
                    row.mutant,
                    row.line,
                    row.reason
                )
            })
            .collect()
    }

    /// The verdict on the outcomes of `core`; the share of caught mutants counts only for the `whole` core.
    pub(crate) fn judge(&self, core: &Core, outcomes: &Outcomes, whole: bool) -> Verdict {
        let mut counts: BTreeMap<Summary, usize> = BTreeMap::new();
        let (mut listed, mut problems) = (0, Vec::new());
        for outcome in &outcomes.outcomes {
            let Scenario::Mutant(mutant) = &outcome.scenario else { continue };
            *counts.entry(outcome.summary).or_default() += 1;
            if outcome.summary == Summary::MissedMutant {
                match self.survivors.iter().find(|row| row.core == core.name && row.is(mutant)) {
                    Some(_) => listed += 1,
                    None => problems.push(format!(
                        "{}: survived, in `{}`\n  help: add a test, or a row to guest-tests/mutants.json",
                        mutant.name, mutant.line
                    )),
                }
            }
        }
        let count = |summary| counts.get(&summary).copied().unwrap_or_default();
        let [caught, missed, unviable, timeout] =
            [Summary::CaughtMutant, Summary::MissedMutant, Summary::Unviable, Summary::Timeout].map(count);
        let viable = caught + timeout + missed;
        let tenths = ((caught + timeout) * 1000).checked_div(viable).unwrap_or(1000);
        if whole && tenths < REQUIRED * 10 {
            problems.push(format!("{}: fewer than {REQUIRED} % of the viable mutants are caught", core.name));
        }
        let summary = format!(
            "{}: {caught} caught, {timeout} timed out, {missed} missed ({listed} listed), {unviable} unviable: {}.{} % of {viable}",
            core.name,
            tenths / 10,
            tenths % 10
        );
        Verdict { summary, problems }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        serde_json::from_str(
            r#"{"cores": [{"name": "span", "files": ["a.rs"], "targets": ["--lib"]}], "survivors": [{"core": "span",
                "file": "a.rs", "mutant": "replace < with <= in f", "line": "a < b", "reason": "equal"}]}"#,
        )
        .unwrap()
    }

    fn mutant(line: &str) -> Mutant {
        let text = r#"{"file": "a.rs", "name": "a.rs:7:3: replace < with <= in f", "span": {"start": {"line": 7, "column": 3}}}"#;
        Mutant { line: line.to_owned(), ..serde_json::from_str(text).unwrap() }
    }

    fn run(summaries: &[(Summary, &str)]) -> Outcomes {
        let outcome = |&(summary, line): &(Summary, &str)| Outcome {
            scenario: Scenario::Mutant(mutant(line)),
            summary,
        };
        Outcomes { outcomes: summaries.iter().map(outcome).collect() }
    }

    #[test]
    fn a_survivor_without_a_row_is_a_problem() {
        let table = table();
        let judge =
            |line| table.judge(&table.cores[0], &run(&[(Summary::MissedMutant, line)]), false).problems;
        assert!(judge("a < b").is_empty());
        assert_eq!(judge("b < c").len(), 1);
    }

    #[test]
    fn fewer_than_95_percent_of_the_viable_mutants_are_a_problem_of_a_whole_core() {
        let table = table();
        for (caught, problems) in [(18, 1), (19, 0)] {
            let mut all = vec![(Summary::CaughtMutant, ""); caught];
            all.extend([(Summary::MissedMutant, "a < b"), (Summary::Unviable, "")]);
            let verdict = table.judge(&table.cores[0], &run(&all), true);
            assert_eq!(verdict.problems.len(), problems, "{}", verdict.summary);
            assert!(table.judge(&table.cores[0], &run(&all), false).problems.is_empty());
        }
    }

    #[test]
    fn a_row_without_its_mutant_is_named() {
        let table = table();
        assert!(table.stale(&table.cores[0], &[mutant("a < b")]).is_empty());
        let stale = table.stale(&table.cores[0], &[mutant("a < c")]);
        assert!(stale[0].starts_with("a.rs: replace < with <= in f in `a < b`: no such mutant"), "{stale:?}");
    }

    #[test]
    fn the_table_of_the_checkout_names_cores_and_reasons() {
        let table = Table::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../mutants.json")).unwrap();
        for row in &table.survivors {
            assert!(table.cores.iter().any(|core| core.name == row.core), "{row:?}");
            assert!(!row.reason.is_empty() && !row.line.starts_with(' '), "{row:?}");
        }
        assert!(table.cores(&["no such".to_owned()]).is_err());
    }
}
