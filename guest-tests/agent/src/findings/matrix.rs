//! Figures of every ordered pair of GPUs as matrices: one table per direction and unit, at the largest size.

use std::collections::{BTreeMap, BTreeSet};

use crate::findings::text::{escaped, number, size};
use crate::findings::{Figure, visible};

/// Columns of a row's name, and of a cell with the blank before it.
const NAME: usize = 8;
const CELL: usize = 8;

/// One figure of every ordered pair.
#[derive(Debug, PartialEq)]
pub(crate) struct Matrix<'a> {
    /// Measured quantity: `copy engine write`.
    what: &'a str,
    unit: &'a str,
    bytes: Option<u64>,
    /// Values by pair: the GPU that works, the GPU that has the memory.
    cells: BTreeMap<(u32, u32), f64>,
}

/// The pair and the direction of a series such as `GPU 0 to GPU 1: copy engine write`.
fn pair(series: &str) -> Option<((u32, u32), &str)> {
    let (from, rest) = series.strip_prefix("GPU ")?.split_once(" to GPU ")?;
    let (to, what) = rest.split_once(": ")?;
    Some(((from.parse().ok()?, to.parse().ok()?), what))
}

/// Whether the figure belongs in a matrix.
pub(crate) fn is_of_pair(figure: &Figure) -> bool {
    pair(&figure.series).is_some()
}

impl<'a> Matrix<'a> {
    /// The matrices of these figures, in the order in which their first figures come.
    pub(crate) fn all(figures: &'a [Figure]) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for figure in figures.iter().filter(|figure| figure.rounds > 0) {
            let Some((pair, what)) = pair(&figure.series) else { continue };
            let found = all.iter().position(|matrix| matrix.what == what && matrix.unit == figure.unit);
            match found.and_then(|at| all.get_mut(at)) {
                Some(matrix) if figure.bytes < matrix.bytes => {}
                Some(matrix) => {
                    if figure.bytes > matrix.bytes {
                        matrix.cells.clear();
                    }
                    matrix.bytes = figure.bytes;
                    matrix.cells.insert(pair, figure.value);
                }
                None => all.push(Self {
                    what,
                    unit: &figure.unit,
                    bytes: figure.bytes,
                    cells: BTreeMap::from([(pair, figure.value)]),
                }),
            }
        }
        all
    }

    fn gpus(&self) -> Vec<u32> {
        let both = self.cells.keys().flat_map(|(from, to)| [*from, *to]);
        both.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn title(&self) -> String {
        let size = self.bytes.map(|bytes| format!(", {}", size(bytes))).unwrap_or_default();
        format!("{}{size}, {}", self.what, self.unit)
    }

    fn cell(&self, from: u32, to: u32) -> String {
        self.cells.get(&(from, to)).map_or_else(|| "-".to_owned(), |value| number(*value))
    }

    /// A table of at most `columns` columns; a matrix that is wider comes in parts.
    pub(crate) fn text(&self, columns: usize) -> String {
        let gpus = self.gpus();
        let mut text =
            format!("  {} (row: GPU that works; column: GPU with the memory)\n", visible(&self.title()));
        for part in gpus.chunks((columns.saturating_sub(NAME) / CELL).max(1)) {
            text.push_str(&" ".repeat(NAME));
            part.iter().for_each(|to| text.push_str(&format!("{:>CELL$}", format!("GPU {to}"))));
            text.push('\n');
            for from in &gpus {
                text.push_str(&format!("{:<NAME$}", format!("  GPU {from}")));
                part.iter().for_each(|to| text.push_str(&format!("{:>CELL$}", self.cell(*from, *to))));
                text.push('\n');
            }
        }
        text
    }

    /// A table of a page.
    pub(crate) fn html(&self) -> String {
        let gpus = self.gpus();
        let heads: String = gpus.iter().map(|to| format!("<th class=\"number\">GPU {to}</th>")).collect();
        let row = |from: &u32| {
            let cells = gpus.iter().map(|to| format!("<td class=\"number\">{}</td>", self.cell(*from, *to)));
            format!("<tr><th>GPU {from}</th>{}</tr>", cells.collect::<String>())
        };
        format!(
            "<figure><figcaption>{} (row: GPU that works; column: GPU with the memory)</figcaption><div class=\"scroll\">\
             <table><thead><tr><th></th>{heads}</tr></thead><tbody>{}</tbody></table></div></figure>",
            escaped(&self.title()),
            gpus.iter().map(row).collect::<String>()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(from: u32, to: u32, bytes: u64, value: f64) -> Figure {
        Figure::of(format!("GPU {from} to GPU {to}: SM read"), Some(bytes), "GB/s", &mut [value])
    }

    #[test]
    fn the_largest_size_of_every_ordered_pair_is_in_its_cell() {
        let figures = [
            figure(0, 1, 4096, 1.0),
            figure(0, 1, 1 << 30, 396.8),
            figure(1, 0, 1 << 30, 374.9),
            figure(1, 0, 4096, 2.0),
            Figure::of("GPU 0, latency", Some(4096), "ns", &mut [1.0]),
        ];
        let all = Matrix::all(&figures);
        assert_eq!(all.len(), 1);
        assert_eq!(
            all[0].text(80),
            "  SM read, 1 GiB, GB/s (row: GPU that works; column: GPU with the memory)\n\
             \u{20}          GPU 0   GPU 1\n  GPU 0        -     397\n  GPU 1      375       -\n"
        );
        assert!(all[0].html().contains("<tr><th>GPU 1</th><td class=\"number\">375</td>"));
    }

    #[test]
    fn eight_gpus_fit_80_columns_and_more_come_in_parts() {
        let of = |gpus: u32| {
            let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
            let figures: Vec<_> =
                pairs.filter(|(a, b)| a != b).map(|(a, b)| figure(a, b, 4096, 1234.5)).collect();
            Matrix::all(&figures)[0].text(80)
        };
        assert!(of(8).lines().all(|line| line.chars().count() <= 80) && of(8).lines().count() == 10);
        assert!(
            of(16).lines().all(|line| line.chars().count() <= 80) && of(16).lines().count() == 1 + 2 * 17
        );
    }

    #[test]
    fn what_is_no_pair_has_no_matrix() {
        for series in ["GPU 0 to GPU x: SM read", "GPU 0, SM read", "GPU 0 to GPU 1", "to GPU 1: read"] {
            assert!(Matrix::all(&[Figure::of(series, None, "GB/s", &mut [1.0])]).is_empty(), "{series}");
        }
    }
}
