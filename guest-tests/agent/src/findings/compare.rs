//! Two runs side by side: ratios of their figures, entries of only one run, and changed outcomes.

use std::collections::BTreeMap;

use egm_report::show::wrap;
use serde::Serialize;

use crate::findings::text::{amount, continued, number, shortened, size};
use crate::findings::{Figure, Outcome, Run, visible, wrapped};

/// Two runs, the second measured against the first.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// The result in a few numbers.
    pub summary: Summary,
    /// Differences of machines and arguments: name, first value, second value.
    pub machines: Vec<(String, String, String)>,
    /// Validations of both with different outcomes.
    pub changed: Vec<Change>,
    /// Validations and figures that only the first has.
    pub only_first: Vec<String>,
    /// Validations and figures that only the second has.
    pub only_second: Vec<String>,
    /// Figures that both runs have, in the order of validation, series, size and unit.
    pub ratios: Vec<Ratio>,
}

/// The result of a comparison in a few numbers.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Figures of both runs.
    pub figures: usize,
    /// Figures with a ratio from 0.98 to 1.02.
    pub within_2_percent: usize,
    /// The figure with the lowest ratio.
    pub worst: Option<Extreme>,
    /// The figure with the highest ratio.
    pub best: Option<Extreme>,
    /// Validations with different outcomes; `None` where series were renamed, because outcomes are then not compared.
    pub changed: Option<usize>,
}

/// A figure at an end of the order by ratio.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Extreme {
    /// Its name, as [`Ratio::what`] has it.
    pub figure: String,
    /// Its ratio, as [`Ratio::ratio`] defines it.
    pub ratio: f64,
}

impl Summary {
    /// Text of at most `columns` columns; reasons of changed outcomes are wrapped.
    fn to_text(&self, changes: &[Change], columns: usize) -> String {
        /// Column in which the name of a figure begins.
        const NAME: usize = 15;
        let mut text = match self.figures {
            0 => "no figure is in both\n".to_owned(),
            figures => format!("{figures} figures in both, {} within 2 %\n", self.within_2_percent),
        };
        for (word, extreme) in [("worst", &self.worst), ("best", &self.best)] {
            if let Some(Extreme { figure, ratio }) = extreme {
                let figure = wrapped(figure, NAME, columns);
                text.push_str(&format!("  {word:<5} {ratio:>6.3} {}", figure.trim_start()));
            }
        }
        match self.changed {
            Some(0) => text.push_str("no verdict changed\n"),
            Some(1) => text.push_str("1 verdict changed\n"),
            Some(changed) => text.push_str(&format!("{changed} verdicts changed\n")),
            None => {}
        }
        for Change { name, first, second, reason } in changes {
            let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
            let words = visible(&format!("{name}: was {first}, is {second}{why}"));
            text.push_str(&wrapped(&words, 2, columns));
        }
        text
    }
}

/// A validation of both runs with different outcomes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Name of the validation, such as `memory.pattern`.
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
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Ratio {
    pub name: String,
    /// The series, as the first run calls it.
    pub series: String,
    /// Size of the buffer or message, in bytes, as [`Figure::bytes`].
    pub bytes: Option<u64>,
    /// Unit of `first` and `second`.
    pub unit: String,
    pub first: f64,
    pub second: f64,
    /// Speed of the second run, relative to the first: second divided by first, for times first divided by second.
    pub ratio: f64,
}

impl Ratio {
    /// Name of the figure: `memory.bandwidth: read, node 0, 64 KiB`.
    pub fn what(&self) -> String {
        what(&self.name, &self.series, self.bytes)
    }

    /// The same in lines of at most `columns` columns: without the validation where that needs several lines.
    fn name_within(&self, columns: usize) -> Vec<String> {
        let whole = self.what();
        if whole.chars().count() <= columns {
            return vec![whole];
        }
        cell(&at_size(&self.series, self.bytes), columns)
    }

    /// Lines of the table: the name in `wide` columns, the unit in `unit_wide`; figures are in the first line.
    fn rows(&self, wide: usize, unit_wide: usize) -> String {
        let (name, unit) = (self.name_within(wide), cell(&self.unit, unit_wide));
        let mut figures = [number(self.first), number(self.second), format!("{:.3}", self.ratio)];
        let mut text = String::new();
        for line in 0..name.len().max(unit.len()) {
            let part = |cell: &[String]| cell.get(line).cloned().unwrap_or_default();
            let (name, unit, [first, second, ratio]) =
                (part(&name), part(&unit), std::mem::take(&mut figures));
            let row = format!("{name:<wide$} {first:>8} {second:>8} {unit:<unit_wide$} {ratio:>7}");
            text.push_str(row.trim_end());
            text.push('\n');
        }
        text
    }
}

/// The text of a cell in lines of at most `columns`, broken between words; a longer word loses its middle.
fn cell(text: &str, columns: usize) -> Vec<String> {
    wrap(&visible(text), columns).into_iter().map(|line| shortened(line, columns)).collect()
}

fn what(name: &str, series: &str, bytes: Option<u64>) -> String {
    visible(&format!("{name}: {}", at_size(series, bytes)))
}

/// A series with the size of a point of it.
fn at_size(series: &str, bytes: Option<u64>) -> String {
    bytes.map_or_else(|| series.to_owned(), |bytes| format!("{series}, {}", size(bytes)))
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
        comparison.summary = comparison.summarized(rename.is_none());
        comparison
    }

    fn summarized(&self, has_outcomes: bool) -> Summary {
        let ordered = self.worst_first();
        let extreme = |ratio: &&Ratio| Extreme { figure: ratio.what(), ratio: ratio.ratio };
        Summary {
            figures: ordered.len(),
            within_2_percent: ordered.iter().filter(|ratio| (0.98..=1.02).contains(&ratio.ratio)).count(),
            worst: ordered.first().map(extreme),
            best: ordered.last().map(extreme),
            changed: has_outcomes.then_some(self.changed.len()),
        }
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

    /// The ratios, the worst first.
    pub fn worst_first(&self) -> Vec<&Ratio> {
        let mut ratios: Vec<&Ratio> = self.ratios.iter().collect();
        ratios.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
        ratios
    }

    /// The ratios below `minimum`, the worst first.
    pub fn below(&self, minimum: f64) -> Vec<&Ratio> {
        let mut below = self.worst_first();
        below.retain(|ratio| ratio.ratio < minimum);
        below
    }

    /// Text for the terminal: the summary, differences of the machines, figures from the worst ratio on, and entries
    /// of one run only. Lines are at most `columns` long (60 or more), but for a word that is longer.
    pub fn to_text(&self, columns: usize) -> String {
        let mut text = self.summary.to_text(&self.changed, columns);
        if !self.machines.is_empty() {
            text.push_str("\ndifferences of the machines\n");
        }
        for (what, first, second) in &self.machines {
            let words = format!("  {what}: {} | {}", visible(first), visible(second));
            text.push_str(&continued(&words, columns));
        }
        text.push_str(&self.table(columns));
        let only = only("first", &self.only_first, columns) + &only("second", &self.only_second, columns);
        if !only.is_empty() {
            text.push_str(&format!("\n{only}"));
        }
        text
    }

    /// The figures of both, the worst ratio first.
    fn table(&self, columns: usize) -> String {
        /// Columns of a row without the name and the unit of the figure.
        const OTHERS: usize = 27;
        /// Most columns of a unit; a longer one is broken between words.
        const UNIT: usize = 9;
        if self.ratios.is_empty() {
            return String::new();
        }
        let longest = |length: fn(&Ratio) -> usize| self.ratios.iter().map(length).max().unwrap_or(0);
        let unit_wide = longest(|ratio| ratio.unit.chars().count()).clamp(4, UNIT);
        let wide = longest(|ratio| ratio.what().chars().count());
        let wide = wide.min(columns.saturating_sub(OTHERS + unit_wide)).max(20);
        let heads = format!(
            "{:<wide$} {:>8} {:>8} {:<unit_wide$} {:>7}",
            "figure", "first", "second", "unit", "ratio"
        );
        let mut text = format!("\n{heads}\n");
        for ratio in self.worst_first() {
            text.push_str(&ratio.rows(wide, unit_wide));
        }
        text
    }
}

/// Lines about entries of one run only: one for each validation, with the number of its figures.
fn only(which: &str, entries: &[String], columns: usize) -> String {
    let mut by_validation: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for entry in entries {
        let name = entry.split(": ").next().unwrap_or_default();
        by_validation.entry(name).or_default().push(entry);
    }
    let line = |(name, entries): (&str, Vec<&str>)| {
        let figures = entries.iter().filter(|entry| entry.contains(": ")).count();
        match entries.as_slice() {
            [one] => continued(&format!("only in the {which}: {one}"), columns),
            _ => continued(&format!("only in the {which}: {name}, {figures} figures"), columns),
        }
    };
    by_validation.into_iter().map(line).collect()
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
    fn a_ratio_above_1_means_that_the_second_is_better() {
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
    fn entries_of_one_run_and_changed_outcomes_are_printed() {
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
    fn one_series_is_compared_with_another_by_renaming() {
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
        assert_eq!(comparison.summary.changed, None);
    }

    /// The run with the figures of its first validation multiplied by these.
    fn scaled(factors: [f64; 8]) -> Run {
        let mut scaled = run();
        let figures = scaled.verdicts[0].figures.iter_mut();
        figures.zip(factors).for_each(|(figure, factor)| figure.value *= factor);
        scaled
    }

    #[test]
    fn the_summary_comes_first_and_rows_run_from_the_worst_ratio_to_the_best() {
        let mut second = scaled([0.5, 1.0, 1.25, 1.019, 1.021, 0.979, 1.0, 1.0]);
        second.verdicts[1].outcome = Outcome::Passed;
        let comparison = Comparison::of(&run(), &second, None);
        let text = comparison.to_text(80);
        let begin = "8 figures in both, 4 within 2 %\n\
                     \u{20} worst  0.500 memory.bandwidth: read, node 0, 4 KiB\n\
                     \u{20} best   1.250 memory.bandwidth: read, node 0, 64 KiB\n\
                     1 verdict changed\n\
                     \u{20} numa.nodes: was failed, is passed: reason of numa.nodes\n\
                     \n\
                     figure ";
        assert!(text.starts_with(begin), "{text}");
        let ratios: Vec<f64> = text
            .lines()
            .skip_while(|line| !line.starts_with("figure "))
            .skip(1)
            .map(|line| line.split_whitespace().next_back().unwrap().parse().unwrap())
            .collect();
        assert!(ratios.len() == 8 && ratios.is_sorted(), "{text}");
        let json = serde_json::to_value(&comparison).unwrap();
        assert_eq!(
            json["summary"],
            serde_json::json!({
                "figures": 8,
                "within_2_percent": 4,
                "worst": { "figure": "memory.bandwidth: read, node 0, 4 KiB", "ratio": 0.5 },
                "best": { "figure": "memory.bandwidth: read, node 0, 64 KiB", "ratio": 1.25 },
                "changed": 1,
            })
        );
    }

    #[test]
    fn recorded_runs_fit_80_columns_and_no_name_is_cut() {
        let one = Run::parse(include_bytes!("../../../results/1xh200.json")).unwrap();
        let two = Run::parse(include_bytes!("../../../results/2xh200.json")).unwrap();
        let comparison = Comparison::of(&one, &two, None);
        assert_eq!((comparison.summary.figures, comparison.summary.changed), (56, Some(6)));
        let text = comparison.to_text(80);
        let begin = "56 figures in both, 47 within 2 %\n\
                     \u{20} worst  0.859 cuda.managed.bandwidth: GPU 0, managed memory: SM read of pages\n\
                     \u{20}              that processors wrote, 256 MiB\n\
                     \u{20} best   6.878 nvshmem.buffer: get from the next PE's HOST_NUMA buffer, 512 MiB\n\
                     6 verdicts changed\n";
        assert!(text.starts_with(begin), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80) && !text.contains(".."), "{text}");
        let managed = "GPU 0, managed memory: SM read of pages that     9.07     7.79 GB/s        0.859\n\
                       processors wrote, 256 MiB\n";
        let huge = "in huge pages, node 0                            1.00     1.00 of what     1.000\n\
                    \x20                                                              can be\n";
        let only =
            "only in the second: cuda.registered.latency: GPU 1, registered memory:\n  latency, 1 GiB\n";
        for rows in ["GPU 0, pinned memory: SM write, 1 GiB  ", managed, huge, only] {
            assert!(text.contains(rows), "{rows:?} in {text}");
        }
        let wide = comparison.to_text(120);
        assert!(wide.lines().all(|line| line.chars().count() <= 120) && !wide.contains(".."), "{wide}");
    }

    #[test]
    fn entries_of_one_run_are_counted_by_validation() {
        let entries = ["a.b", "a.b: read, 4 KiB", "a.b: write, 4 KiB", "c.d: read"].map(str::to_owned);
        assert_eq!(
            only("second", &entries, 80),
            "only in the second: a.b, 2 figures\nonly in the second: c.d: read\n"
        );
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
