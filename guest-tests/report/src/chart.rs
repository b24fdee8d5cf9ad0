//! Bars of figures for a terminal.

use crate::text::{number, size};
use crate::{Comparison, Figure, Run, visible};

/// Cells of the longest bar.
const CELLS: f64 = 30.0;
/// Longest label.
const LABEL: usize = 36;

/// One bar a series, at its largest size; the bars of one validation and unit have one scale. With a comparison against
/// a run before, each says its ratio.
pub fn bars(run: &Run, before: Option<&Comparison>) -> String {
    let mut text = String::new();
    for verdict in &run.verdicts {
        for unit in units(&verdict.figures) {
            let shown = largest(&verdict.figures, unit);
            let most = shown.iter().map(|figure| figure.value).fold(0.0, f64::max);
            text.push_str(&format!("{} ({})\n", visible(&verdict.name), visible(unit)));
            for figure in shown {
                let at = figure.bytes.map(size).unwrap_or_default();
                let ratio = before.and_then(|before| ratio_of(before, &verdict.name, figure));
                let ratio = ratio.map(|ratio| format!("  {ratio:.3} of before")).unwrap_or_default();
                let value = number(figure.value);
                text.push_str(&row(&figure.series, &at, figure.value / most, &format!("{value:>8}{ratio}")));
            }
        }
    }
    text
}

/// One bar a ratio; a full bar is the best one, or 1.
pub fn comparison_bars(comparison: &Comparison) -> String {
    let most = comparison.ratios.iter().map(|ratio| ratio.ratio).fold(1.0, f64::max);
    let line = |ratio: &crate::Ratio| {
        let at = ratio.bytes.map(size).unwrap_or_default();
        row(&ratio.series, &at, ratio.ratio / most, &format!("{:>8.3}", ratio.ratio))
    };
    comparison.ratios.iter().map(line).collect()
}

fn row(label: &str, at: &str, part: f64, value: &str) -> String {
    let filled = if part.is_finite() { (part.clamp(0.0, 1.0) * CELLS).round() } else { 0.0 };
    let bar: String = (0..30u8).map(|cell| if f64::from(cell) < filled { '#' } else { '.' }).collect();
    let label: String = visible(label).chars().take(LABEL).collect();
    format!("  {label:<LABEL$} {at:>9} {bar} {value}\n")
}

/// Units in the order in which they come.
fn units(figures: &[Figure]) -> Vec<&str> {
    let mut units: Vec<&str> = Vec::new();
    for figure in figures.iter().filter(|figure| figure.rounds > 0) {
        if !units.contains(&figure.unit.as_str()) {
            units.push(&figure.unit);
        }
    }
    units
}

/// The figure of each series with the most bytes.
fn largest<'a>(figures: &'a [Figure], unit: &str) -> Vec<&'a Figure> {
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

fn ratio_of(before: &Comparison, name: &str, figure: &Figure) -> Option<f64> {
    let is_it = |ratio: &&crate::Ratio| {
        ratio.name == name
            && ratio.series == figure.series
            && ratio.bytes == figure.bytes
            && ratio.unit == figure.unit
    };
    before.ratios.iter().find(is_it).map(|ratio| ratio.ratio)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::run;

    #[test]
    fn the_best_of_a_unit_has_a_full_bar_at_its_largest_size() {
        let text = bars(&run(), None);
        let line =
            |start: &str| text.lines().find(|line| line.contains(start)).unwrap_or_default().to_owned();
        assert!(line("read, node 0").contains("1 MiB ############################## "), "{text}");
        assert!(line("write, node 0").contains(" ###############............... "), "{text}");
        assert!(text.contains("memory.bandwidth (ns)") && line("huge pages").contains("0.5000"), "{text}");
    }

    #[test]
    fn ratios_to_a_run_before_are_said_and_bad_numbers_have_no_bar() {
        let comparison = Comparison::of(&run(), &run(), None);
        assert!(bars(&run(), Some(&comparison)).contains("1.000 of before"));
        assert!(comparison_bars(&comparison).lines().all(|line| line.contains("1.000")));
        assert!(row("x", "", f64::NAN, "").contains(" .............................. "));
    }

    #[test]
    fn a_hostile_name_sends_the_terminal_nothing() {
        let mut hostile = run();
        hostile.verdicts[0].figures[0].series = "\u{1b}]0;x\u{7}".into();
        hostile.verdicts[0].figures[0].bytes = Some(u64::MAX);
        assert!(bars(&hostile, None).chars().all(|c| c == '\n' || !c.is_control()));
    }
}
