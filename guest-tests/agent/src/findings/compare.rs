//! Two runs side by side: ratios of their figures, entries of only one run, and changed outcomes.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::findings::text::{amount, number, shortened, size};
use crate::findings::{Figure, Outcome, Run, visible};

/// Two runs, the second measured against the first.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Differences of machines and arguments: name, first value, second value.
    pub machines: Vec<(String, String, String)>,
    /// Validations of both with different outcomes.
    pub changed: Vec<Change>,
    /// Validations and figures that only the first has.
    pub only_first: Vec<String>,
    /// Validations and figures that only the second has.
    pub only_second: Vec<String>,
    /// Figures of both.
    pub ratios: Vec<Ratio>,
}

/// A changed outcome.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The validation.
    pub name: String,
    /// Its outcome in the first run.
    pub first: Outcome,
    /// Its outcome in the second run.
    pub second: Outcome,
    /// The second run's reason.
    pub reason: String,
}

/// A figure of both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ratio {
    /// The validation.
    pub name: String,
    /// The series, as the first run calls it.
    pub series: String,
    /// Size in bytes.
    pub bytes: Option<u64>,
    /// Unit of both.
    pub unit: String,
    /// The first run's.
    pub first: f64,
    /// The second run's.
    pub second: f64,
    /// Speed of the second run, relative to the first: second divided by first, for times first divided by second.
    pub ratio: f64,
}

impl Ratio {
    /// Name of the figure: `memory.bandwidth: read, node 0, 64 KiB`.
    pub fn what(&self) -> String {
        what(&self.name, &self.series, self.bytes)
    }
}

fn what(name: &str, series: &str, bytes: Option<u64>) -> String {
    let at = bytes.map_or_else(String::new, |bytes| format!(", {}", size(bytes)));
    visible(&format!("{name}: {series}{at}"))
}

/// Whether a smaller value is better.
fn is_time(unit: &str) -> bool {
    matches!(unit, "ns" | "us" | "µs" | "ms" | "s")
}

/// Identity of a figure across runs: validation, series, size, unit.
type Key<'a> = (&'a str, String, Option<u64>, &'a str);

impl Comparison {
    /// Compares `second` with `first`. With `rename`, a pair of texts, only series of `second` with the former in their
    /// name count, and the latter replaces it: this compares "node 1" with "node 0", in one run or two.
    pub fn of(first: &Run, second: &Run, rename: Option<(&str, &str)>) -> Self {
        let mut comparison = Self { machines: machines(first, second), ..Self::default() };
        if rename.is_none() {
            comparison.outcomes(first, second);
        }
        let (one, two) = (figures(first, None), figures(second, rename));
        for (key, a) in &one {
            let Some(b) = two.get(key) else {
                // With `rename`, series without the text in their name were not requested, so they are not missing.
                if rename.is_none() {
                    comparison.only_first.push(what(key.0, &key.1, key.2));
                }
                continue;
            };
            let (name, series, bytes, unit) = (key.0.to_owned(), key.1.clone(), key.2, key.3.to_owned());
            let ratio = if is_time(&unit) { a.value / b.value } else { b.value / a.value };
            comparison.ratios.push(Ratio {
                name,
                series,
                bytes,
                unit,
                first: a.value,
                second: b.value,
                ratio,
            });
        }
        let new = two.keys().filter(|key| !one.contains_key(*key));
        comparison.only_second.extend(new.map(|key| what(key.0, &key.1, key.2)));
        comparison
    }

    fn outcomes(&mut self, first: &Run, second: &Run) {
        for a in &first.verdicts {
            match second.verdicts.iter().find(|b| b.name == a.name) {
                None => self.only_first.push(visible(&a.name)),
                Some(b) if b.outcome != a.outcome => self.changed.push(Change {
                    name: a.name.clone(),
                    first: a.outcome,
                    second: b.outcome,
                    reason: b.reason.clone(),
                }),
                Some(_) => {}
            }
        }
        let known = |name: &str| first.verdicts.iter().any(|a| a.name == name);
        let new = second.verdicts.iter().filter(|b| !known(&b.name));
        self.only_second.extend(new.map(|b| visible(&b.name)));
    }

    /// The ratios below `least`, the worst first.
    pub fn below(&self, least: f64) -> Vec<&Ratio> {
        let mut below: Vec<&Ratio> = self.ratios.iter().filter(|ratio| ratio.ratio < least).collect();
        below.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
        below
    }

    /// Lines of text for the terminal; those of figures are at most `columns` long (60 or more).
    pub fn to_text(&self, columns: usize) -> String {
        /// Columns of a row without the name of the figure.
        const OTHERS: usize = 33;
        let longest = self.ratios.iter().map(|ratio| ratio.what().chars().count()).max().unwrap_or(0);
        let wide = longest.min(columns.saturating_sub(OTHERS)).max(20);
        let mut text = String::new();
        let mut line = |words: String| {
            text.push_str(&words);
            text.push('\n');
        };
        for (what, first, second) in &self.machines {
            line(format!("{what}: {} | {}", visible(first), visible(second)));
        }
        for change in &self.changed {
            let (name, reason) = (visible(&change.name), visible(&change.reason));
            line(format!("{name}: was {}, is {}: {reason}", change.first, change.second));
        }
        for (which, list) in [("first", &self.only_first), ("second", &self.only_second)] {
            list.iter().for_each(|what| line(format!("only in the {which}: {what}")));
        }
        if self.ratios.is_empty() {
            line("no figure is in both".to_owned());
        } else {
            line(format!("{:<wide$} {:>8} {:>8} {:<6} {:>7}", "figure", "first", "second", "unit", "ratio"));
        }
        for ratio in &self.ratios {
            let (first, second) = (number(ratio.first), number(ratio.second));
            let unit = visible(&ratio.unit);
            let what = shortened(&ratio.what(), wide);
            line(format!("{what:<wide$} {first:>8} {second:>8} {unit:<6} {:>7.3}", ratio.ratio));
        }
        text
    }
}

/// Differences between the machines and the arguments of two runs.
fn machines(first: &Run, second: &Run) -> Vec<(String, String, String)> {
    let facts = |run: &Run| {
        let machine = &run.machine;
        let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "none seen".to_owned());
        let nodes: Vec<String> =
            machine.nodes.iter().map(|n| format!("{} ({})", n.number, amount(n.memory))).collect();
        let gpus: Vec<String> =
            machine.gpus.iter().map(|gpu| gpu.name.clone().unwrap_or_else(|| gpu.id.clone())).collect();
        [
            ("date", run.date.clone()),
            ("program", run.program.clone()),
            ("kernel", machine.kernel.clone()),
            ("architecture", machine.architecture.clone()),
            ("hypervisor", or(&machine.hypervisor)),
            ("product", or(&machine.product)),
            ("CPU", format!("{} × {}", machine.cpus, machine.cpu)),
            ("memory", size(machine.memory)),
            ("nodes", nodes.join(", ")),
            ("GPUs", gpus.join(", ")),
            ("GPU driver", or(&machine.driver)),
        ]
    };
    let pairs = facts(first).into_iter().zip(facts(second));
    pairs.filter(|((_, a), (_, b))| a != b).map(|((what, a), (_, b))| (what.to_owned(), a, b)).collect()
}

/// The measured figures of a run, by key.
fn figures<'a>(run: &'a Run, rename: Option<(&str, &str)>) -> BTreeMap<Key<'a>, &'a Figure> {
    let named = |figure: &Figure| match rename {
        None => Some(figure.series.clone()),
        Some((from, to)) => figure.series.contains(from).then(|| figure.series.replace(from, to)),
    };
    let of = |name: &'a str, figure: &'a Figure| {
        let measured = figure.rounds > 0 && figure.value > 0.0;
        let series = measured.then(|| named(figure)).flatten()?;
        Some(((name, series, figure.bytes, figure.unit.as_str()), figure))
    };
    run.verdicts.iter().flat_map(|v| v.figures.iter().filter_map(move |figure| of(&v.name, figure))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::run::tests::run;

    #[test]
    fn ratios_say_how_good_the_second_is() {
        let (first, mut second) = (run(), run());
        second.verdicts[0].figures.iter_mut().for_each(|figure| figure.value *= 2.0);
        let comparison = Comparison::of(&first, &second, None);
        assert_eq!(comparison.ratios.len(), first.verdicts[0].figures.len());
        for ratio in &comparison.ratios {
            assert_eq!(ratio.ratio, if ratio.unit == "ns" { 0.5 } else { 2.0 }, "{}", ratio.what());
        }
        assert_eq!(comparison.below(1.0).len(), 1, "the time");
        assert!(
            comparison.changed.is_empty()
                && comparison.only_first.is_empty()
                && comparison.machines.is_empty()
        );
    }

    #[test]
    fn what_is_in_one_only_and_what_changed_is_said() {
        let (mut first, mut second) = (run(), run());
        first.verdicts.remove(3);
        second.verdicts[0].figures.remove(0);
        second.verdicts[1].outcome = Outcome::Passed;
        second.machine.kernel = "Linux 7.2".into();
        let comparison = Comparison::of(&first, &second, None);
        assert_eq!(comparison.only_first, ["memory.bandwidth: read, node 0, 4 KiB"]);
        assert_eq!(comparison.only_second, ["pci.links"]);
        assert_eq!((comparison.changed.len(), &*comparison.changed[0].name), (1, "numa.nodes"));
        let text = comparison.to_text(80);
        for words in
            ["kernel: Linux 6.12 | Linux 7.2", "numa.nodes: was failed, is passed", "only in the second"]
        {
            assert!(text.contains(words), "{words} in {text}");
        }
    }

    #[test]
    fn one_series_is_held_against_another_by_renaming() {
        let mut both = run();
        for figure in both.verdicts[0].figures.clone() {
            let series = figure.series.replace("node 0", "node 1");
            if series != figure.series {
                both.verdicts[0].figures.push(Figure { series, value: figure.value / 4.0, ..figure });
            }
        }
        let comparison = Comparison::of(&both, &both, Some(("node 1", "node 0")));
        assert_eq!(comparison.ratios.len(), 7);
        assert!(comparison.ratios.iter().filter(|r| r.unit == "GB/s").all(|r| r.ratio == 0.25));
        assert!(comparison.only_first.is_empty() && comparison.only_second.is_empty());
    }

    #[test]
    fn a_figure_that_was_not_measured_has_no_ratio() {
        let mut second = run();
        second.verdicts[0].figures.iter_mut().for_each(|figure| figure.rounds = 0);
        let comparison = Comparison::of(&run(), &second, None);
        assert!(comparison.ratios.is_empty());
        assert!(comparison.to_text(80).contains("no figure is in both"));
    }
}
