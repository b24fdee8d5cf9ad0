//! A figure: measured quantity, number of rounds, and their spread.

use serde::{Deserialize, Serialize};

/// A measured figure; one with `bytes` is a point of its series' curve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Measured quantity: `write, node 1, 2 MiB pages`. Figures of one series differ in `bytes`.
    pub series: String,
    /// Size of the buffer or message, in bytes: the x axis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Median of the rounds, in `unit`.
    pub value: f64,
    /// `GB/s` (10^9 bytes a second), `ns`, `us`, or the quantities of a ratio.
    pub unit: String,
    /// Number of rounds; 0 means that nothing was measured.
    pub rounds: u32,
    /// The least of the rounds, in `unit`.
    pub least: f64,
    /// The most of the rounds, in `unit`.
    pub most: f64,
}

impl Figure {
    /// A figure of its rounds, which this sorts. It ignores rounds that are not finite numbers.
    pub fn of(
        series: impl Into<String>,
        bytes: Option<u64>,
        unit: impl Into<String>,
        rounds: &mut [f64],
    ) -> Self {
        rounds.sort_by(f64::total_cmp);
        let good: Vec<f64> = rounds.iter().copied().filter(|round| round.is_finite()).collect();
        Self {
            series: series.into(),
            bytes,
            value: median(&good),
            unit: unit.into(),
            rounds: u32::try_from(good.len()).unwrap_or(u32::MAX),
            least: good.first().copied().unwrap_or(0.0),
            most: good.last().copied().unwrap_or(0.0),
        }
    }
}

impl Figure {
    /// Reason why this cannot be a measurement, if so: the clock stood still, ran backwards, or gave an implausible
    /// value. A ratio, or a figure with another unit, only has to be a positive number.
    pub fn nonsense(&self) -> Option<String> {
        let Self { series, unit, rounds, least, most, .. } = self;
        // No memory, link or GPU of today comes within a factor of ten of these.
        let (fewest, greatest) = match unit.as_str() {
            "GB/s" => (0.0, 1e5),
            "ns" => (0.1, 1e12),
            "us" => (1e-4, 1e9),
            _ => (0.0, f64::MAX),
        };
        if *rounds == 0 {
            return Some(format!("{series}: no round took a time that can be measured"));
        }
        let good = *least > fewest && *most < greatest;
        (!good).then(|| format!("{series}: {least} to {most} {unit} cannot be"))
    }
}

/// Units in the order in which they come.
pub(crate) fn units<'a>(figures: impl Iterator<Item = &'a Figure>) -> Vec<&'a str> {
    let mut units: Vec<&str> = Vec::new();
    for figure in figures.filter(|figure| figure.rounds > 0) {
        if !units.contains(&figure.unit.as_str()) {
            units.push(&figure.unit);
        }
    }
    units
}

/// The figure of each series with the most bytes.
pub(crate) fn largest<'a>(figures: &'a [Figure], unit: &str) -> Vec<&'a Figure> {
    let mut shown: Vec<&Figure> = Vec::new();
    for figure in figures.iter().filter(|figure| figure.unit == unit && figure.rounds > 0) {
        match shown.iter_mut().find(|other| other.series == figure.series) {
            Some(other) if other.bytes < figure.bytes => *other = figure,
            Some(_) => {}
            None => shown.push(figure),
        }
    }
    shown
}

/// The middle of sorted numbers, of two the mean; 0 without any.
fn median(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(at(half.saturating_sub(1)), at(half))
    } else {
        at(half)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_the_median_of_the_rounds() {
        let odd = Figure::of("read", Some(4096), "GB/s", &mut [9.0, 1.0, 2.0]);
        assert_eq!((odd.value, odd.rounds, odd.least, odd.most), (2.0, 3, 1.0, 9.0));
        assert_eq!(Figure::of("read", None, "ns", &mut [4.0, 1.0, 2.0, 9.0]).value, 3.0);
    }

    #[test]
    fn what_a_broken_clock_gives_is_nonsense() {
        let nonsense =
            |unit: &str, round: f64| Figure::of("x", None, unit, &mut [round]).nonsense().is_some();
        assert!(!nonsense("GB/s", 55.6) && !nonsense("GB/s", 0.001) && !nonsense("ns", 80.0));
        assert!(nonsense("GB/s", 0.0) && nonsense("GB/s", -55.6) && nonsense("GB/s", 1e6));
        assert!(nonsense("ns", 0.000_05) && nonsense("us", -1.0) && nonsense("GB/s", f64::INFINITY));
        assert!(!nonsense("of pinned", 0.99) && nonsense("of pinned", 0.0));
    }

    #[test]
    fn what_is_no_number_is_no_round() {
        let figure = Figure::of("read", None, "ns", &mut [f64::NAN, 7.0, f64::INFINITY]);
        assert_eq!((figure.value, figure.rounds, figure.least, figure.most), (7.0, 1, 7.0, 7.0));
        let none = Figure::of("read", None, "ns", &mut []);
        assert_eq!((none.value, none.rounds), (0.0, 0));
    }
}
