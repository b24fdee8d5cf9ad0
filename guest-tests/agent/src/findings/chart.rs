//! Bars of figures for a terminal.

use crate::findings::figure::{largest, units};
use crate::findings::matrix::is_in_matrix;
use crate::findings::text::{number, shortened, size};
use crate::findings::{Comparison, Figure, Run, visible};

/// Cells of the longest bar, at least and at most.
const CELLS: (usize, usize) = (10, 30);
/// Columns of a row without its label and its bar: two blanks, a size, a value, and blanks between.
const OTHERS: usize = 22;
/// Columns of a ratio to an earlier run.
const RATIO: usize = 16;

/// A row; its final width depends on the other rows.
struct Row {
    label: String,
    at: String,
    part: f64,
    value: String,
}

/// One bar for each series, at its largest size, on one scale by validation and unit. Figures that [`matrices`] has are
/// left out. With an earlier run, all are bars with ratios. Lines have at most `columns`, from 52 on (68 with ratios).
///
/// [`matrices`]: crate::findings::matrices
pub fn bars(run: &Run, before: Option<&Comparison>, columns: usize) -> String {
    let mut text = String::new();
    for verdict in &run.verdicts {
        let in_bars = |figure: &&Figure| before.is_some() || !is_in_matrix(figure);
        for unit in units(verdict.figures.iter().filter(in_bars)) {
            let mut shown = largest(&verdict.figures, unit);
            shown.retain(in_bars);
            let most = shown.iter().map(|figure| figure.value).fold(0.0, f64::max);
            text.push_str(&format!("{} ({})\n", visible(&verdict.name), visible(unit)));
            let row = |figure: &&Figure| {
                let ratio = before.and_then(|before| ratio_of(before, &verdict.name, figure));
                let ratio = ratio.map(|ratio| format!(" {ratio:.3} of before")).unwrap_or_default();
                let value = format!("{:>8}{ratio}", number(figure.value));
                let at = figure.bytes.map(size).unwrap_or_default();
                Row { label: visible(&figure.series), at, part: figure.value / most, value }
            };
            let more = if before.is_some() { RATIO } else { 0 };
            text.push_str(&lines(&shown.iter().map(row).collect::<Vec<_>>(), columns.saturating_sub(more)));
        }
    }
    text
}

/// The rows under one another: labels as wide as the longest, unless that leaves too little for bars.
fn lines(rows: &[Row], columns: usize) -> String {
    let room = columns.saturating_sub(OTHERS);
    let longest = rows.iter().map(|row| row.label.chars().count()).max().unwrap_or(0);
    let label = longest.min(room.saturating_sub(CELLS.0)).max(10);
    let cells = room.saturating_sub(label).clamp(CELLS.0, CELLS.1);
    let line = |row: &Row| {
        let bar = bar(row.part, cells);
        format!("  {:<label$} {:>9} {bar} {}\n", shortened(&row.label, label), row.at, row.value)
    };
    rows.iter().map(line).collect()
}

/// A bar of `cells`, filled up to `part`, 0 to 1.
fn bar(part: f64, cells: usize) -> String {
    let whole = u32::try_from(cells).map_or(0.0, f64::from);
    let filled = if part.is_finite() { (part.clamp(0.0, 1.0) * whole).round() } else { 0.0 };
    (0u32..).take(cells).map(|cell| if f64::from(cell) < filled { '#' } else { '.' }).collect()
}

fn ratio_of(before: &Comparison, name: &str, figure: &Figure) -> Option<f64> {
    let is_it = |ratio: &&crate::findings::Ratio| {
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
    use crate::findings::run::tests::run;

    #[test]
    fn the_best_of_a_unit_has_a_full_bar_at_its_largest_size() {
        let text = bars(&run(), None, 80);
        let line =
            |start: &str| text.lines().find(|line| line.contains(start)).unwrap_or_default().to_owned();
        assert!(line("read, node 0").contains("1 MiB ############################## "), "{text}");
        assert!(line("write, node 0").contains(" ###############............... "), "{text}");
        assert!(text.contains("memory.bandwidth (ns)") && line("huge pages").contains("0.5000"), "{text}");
    }

    #[test]
    fn ratios_to_an_earlier_run_are_printed_and_bad_numbers_have_no_bar() {
        let comparison = Comparison::of(&run(), &run(), None);
        assert!(bars(&run(), Some(&comparison), 80).contains("1.000 of before"));
        assert_eq!(bar(f64::NAN, 4), "....");
    }

    #[test]
    fn no_line_is_longer_than_the_terminal_and_long_names_keep_both_ends() {
        let mut long = run();
        for figure in &mut long.verdicts[0].figures {
            figure.series = format!("HOST_NUMA memory of node 0 of pinned: copy engine, {}", figure.series);
        }
        let comparison = Comparison::of(&run(), &run(), None);
        let same = Comparison::of(&long, &long, None);
        for columns in [68, 80, 132, 200] {
            let texts = [
                bars(&long, None, columns),
                bars(&long, Some(&same), columns),
                bars(&run(), Some(&comparison), columns),
            ];
            for line in texts.iter().flat_map(|text| text.lines()) {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
        }
        let narrow = bars(&long, None, 80);
        assert!(
            narrow.contains("HOST_NUMA") && narrow.contains("..") && narrow.contains("read, node 0 "),
            "{narrow}"
        );
    }

    #[test]
    fn a_figure_of_a_matrix_has_a_bar_only_beside_an_earlier_run() {
        let mut gpu = run();
        gpu.verdicts[0].figures = vec![Figure::of("GPU 0, pinned memory: SM read", None, "GB/s", &mut [1.0])];
        let comparison = Comparison::of(&gpu, &gpu, None);
        assert_eq!(bars(&gpu, None, 80), "");
        assert!(bars(&gpu, Some(&comparison), 80).contains("pinned memory"));
        assert!(crate::findings::matrices(&gpu, 80).contains("pinned memory"));
    }

    #[test]
    fn a_hostile_name_sends_the_terminal_nothing() {
        let mut hostile = run();
        hostile.verdicts[0].figures[0].series = "\u{1b}]0;x\u{7}".into();
        hostile.verdicts[0].figures[0].bytes = Some(u64::MAX);
        assert!(bars(&hostile, None, 80).chars().all(|c| c == '\n' || !c.is_control()));
    }
}
