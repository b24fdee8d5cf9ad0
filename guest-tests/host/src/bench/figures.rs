//! Figures: samples, their peers and their targets, as data and as a table. Pure.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Summary of a list of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// The middle one, or the mean of the two in the middle.
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) n: usize,
}

impl Summary {
    /// Summary of `samples`; `None` without any.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let upper = *sorted.get(sorted.len() / 2)?;
        let lower = *sorted.get((sorted.len() - 1) / 2)?;
        Some(Self { median: f64::midpoint(lower, upper), min, max, n: sorted.len() })
    }

    /// Every sample goes through `change`, which must be monotonic.
    pub(crate) fn map(self, change: impl Fn(f64) -> f64) -> Self {
        let (a, b) = (change(self.min), change(self.max));
        Self { median: change(self.median), min: a.min(b), max: a.max(b), n: self.n }
    }
}

/// Target of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// Limit on our median, in the figure's unit.
    AtMost(f64),
    /// Lower limit on the row's ratio.
    RatioAtLeast(f64),
    /// Upper limit on the row's ratio.
    RatioAtMost(f64),
}

/// A peer that was measured in the same run, and its figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub(crate) name: String,
    /// Its figures, in the same unit.
    pub(crate) figures: Summary,
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Quantity that was measured.
    pub(crate) name: String,
    /// Unit of the figures.
    pub(crate) unit: String,
    pub(crate) ours: Summary,
    /// The peer's, if one was measured.
    pub(crate) peer: Option<Peer>,
    /// Our median divided by the peer's; or, where both took turns, the median of each round's ratio.
    pub(crate) ratio: Option<f64>,
    /// The target, if there is one.
    pub(crate) target: Option<Target>,
    /// Whether the figure reaches its target; `None` without a target.
    pub(crate) met: Option<bool>,
}

impl Row {
    /// A row with our figures alone.
    pub(crate) fn new(name: impl Into<String>, unit: &str, ours: Summary) -> Self {
        let (name, unit) = (name.into(), unit.to_owned());
        Self { name, unit, ours, peer: None, ratio: None, target: None, met: None }
    }

    /// Adds a peer's figures, if those were measured.
    pub(crate) fn beside(mut self, name: &str, figures: Option<Summary>) -> Self {
        self.ratio = figures.map(|figures| self.ours.median / figures.median).filter(|r| r.is_finite());
        self.peer = figures.map(|figures| Peer { name: name.to_owned(), figures });
        self
    }

    /// A row of rounds in which both took turns: a disturbance of a round slows both and cancels out in the ratio.
    pub(crate) fn in_turns(
        name: String,
        unit: &str,
        ours: &[f64],
        peer: &str,
        theirs: &[f64],
    ) -> Option<Self> {
        let row = Self::new(name, unit, Summary::of(ours)?).beside(peer, Summary::of(theirs));
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
        let ratio = Summary::of(&ratios).map(|ratios| ratios.median).filter(|ratio| ratio.is_finite());
        Some(Self { ratio, ..row })
    }

    /// Compares the row with `target`; call this last, after the peer's figures are set.
    pub(crate) fn should(mut self, target: Target) -> Self {
        self.met = match target {
            Target::AtMost(limit) => Some(self.ours.median <= limit),
            Target::RatioAtLeast(least) => self.ratio.map(|ratio| ratio >= least),
            Target::RatioAtMost(most) => self.ratio.map(|ratio| ratio <= most),
        };
        self.target = Some(target);
        self
    }

    fn cells(&self) -> [String; 7] {
        let range = |s: Summary| format!("{}..{} n={}", number(s.min), number(s.max), s.n);
        let verdict = match self.met {
            Some(true) => "target reached",
            Some(false) => "target missed",
            None => "not compared",
        };
        let target = match self.target {
            Some(Target::AtMost(limit)) => format!("at most {} {}: {verdict}", number(limit), self.unit),
            Some(Target::RatioAtLeast(least)) => format!("ratio at least {}: {verdict}", number(least)),
            Some(Target::RatioAtMost(most)) => format!("ratio at most {}: {verdict}", number(most)),
            None => String::new(),
        };
        let peer = self.peer.as_ref();
        [
            self.name.clone(),
            format!("{} {}", number(self.ours.median), self.unit),
            range(self.ours),
            peer.map_or_else(String::new, |peer| peer.name.clone()),
            peer.map_or_else(String::new, |peer| format!("{} {}", number(peer.figures.median), self.unit)),
            self.ratio.map_or_else(String::new, number),
            target,
        ]
    }
}

/// All results of a run.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The machine, in words.
    pub(crate) host: String,
    pub(crate) rows: Vec<Row>,
    /// Skipped measurements, with reasons.
    pub(crate) skipped: Vec<String>,
    /// Figures from elsewhere, not from this run.
    pub(crate) elsewhere: Vec<String>,
}

impl Report {
    /// Adds the figures of `section`; a section with an error is skipped with its reason.
    pub(crate) fn extend(&mut self, section: &str, outcome: Result<Self, crate::engine::error::LabError>) {
        match outcome {
            Ok(other) => {
                self.rows.extend(other.rows);
                self.skipped.extend(other.skipped);
            }
            Err(error) => self.skipped.push(format!("{section}: {}", crate::engine::error::chain(&error))),
        }
    }

    /// The host and the rows as text, in aligned columns.
    pub(crate) fn table(&self) -> String {
        let head = ["figure", "egm-vmm", "range", "beside", "its median", "ratio", "target"];
        let mut lines = vec![head.map(str::to_owned)];
        lines.extend(self.rows.iter().map(Row::cells));
        let width = |column: usize| {
            let cells = lines.iter().filter_map(|line| line.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: [usize; 7] = std::array::from_fn(width);
        let mut text = format!("{}\n\n", self.host);
        for line in &lines {
            let cells = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
        for (title, notes) in [("not measured", &self.skipped), ("measured elsewhere", &self.elsewhere)] {
            for note in notes {
                let _ = writeln!(text, "\n{title}: {note}");
            }
        }
        text
    }
}

/// Three significant digits.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 4,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(Summary::of(&[]), None);
        let odd = Summary::of(&[9.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max, odd.n), (2.0, 1.0, 9.0, 3));
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
    }

    #[test]
    fn seconds_become_speed_with_the_slowest_as_the_least() {
        let speed = Summary::of(&[1.0, 2.0, 4.0]).unwrap().map(|seconds| 8.0 / seconds);
        assert_eq!((speed.median, speed.min, speed.max), (4.0, 2.0, 8.0));
    }

    #[test]
    fn of_rounds_in_turns_the_ratio_is_the_median_of_each_rounds() {
        // The machine was busy in the second and third round.
        let row = Row::in_turns("x".into(), "ms", &[1.0, 40.0, 8.0], "QEMU", &[1.0, 20.0, 8.0]).unwrap();
        assert_eq!((row.ratio, row.ours.median), (Some(1.0), 8.0));
        assert!(Row::in_turns("x".into(), "ms", &[], "QEMU", &[1.0]).is_none());
        assert_eq!(Row::in_turns("x".into(), "ms", &[1.0], "QEMU", &[]).unwrap().ratio, None);
    }

    #[test]
    fn a_missed_target_is_reported_and_one_without_its_peer_is_not_judged() {
        let row = |target| {
            let ours = Summary::of(&[5.0]).unwrap();
            Row::new("start", "ms", ours).beside("QEMU", Summary::of(&[10.0])).should(target)
        };
        assert_eq!(row(Target::AtMost(4.0)).met, Some(false));
        assert_eq!(row(Target::RatioAtLeast(0.5)).met, Some(true));
        assert_eq!(row(Target::RatioAtMost(0.4)).met, Some(false));
        let alone = Row::new("x", "GiB/s", Summary::of(&[5.0]).unwrap()).beside("QEMU", None);
        let alone = alone.should(Target::RatioAtLeast(0.9));
        assert_eq!(alone.met, None);
        let report = Report {
            rows: vec![row(Target::AtMost(4.0)), alone],
            skipped: vec!["y".into()],
            ..Report::default()
        };
        let text = report.table();
        assert!(text.contains("target missed") && text.contains("not compared"), "{text}");
        assert!(text.contains("not measured: y") && text.contains("0.5"), "{text}");
        let back: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(back, report);
    }
}
