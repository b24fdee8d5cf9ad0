//! Key figures as nvbandwidth prints them: a matrix for each transfer, with the memory in rows and the GPUs in columns.

use std::collections::{BTreeMap, BTreeSet};

use crate::findings::series::{Ends, ends};
use crate::findings::text::{escaped, number, shortened, size};
use crate::findings::{Figure, Run, visible};

/// Columns of a cell with the blank before it.
const CELL: usize = 8;
/// Most columns of a row's name, with the blanks around it.
const NAME: usize = 32;

/// Most matrices of a run. A run that was not written by us has any number, and each figure is compared with all.
const MOST: usize = 64;

/// Meaning of rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axes {
    Memory,
    Pairs,
}

impl Axes {
    const fn note(self) -> &'static str {
        match self {
            Self::Memory => "(row: memory, column: GPU)",
            Self::Pairs => "(row: active GPU, column: memory)",
        }
    }
}

/// Figures of one memory, by GPU.
#[derive(Debug, PartialEq)]
struct Row {
    name: String,
    bytes: Option<u64>,
    cells: BTreeMap<u32, f64>,
}

/// The figures of one transfer, each row at its largest size.
#[derive(Debug, PartialEq)]
pub(crate) struct Matrix<'a> {
    transfer: &'a str,
    unit: &'a str,
    axes: Axes,
    rows: Vec<Row>,
}

/// Whether a figure has a cell in a matrix.
pub(crate) fn is_in_matrix(figure: &Figure) -> bool {
    figure.rounds > 0 && ends(&figure.series).is_some()
}

/// The matrices of a run as lines of text, none longer than `columns` (60 or more); empty without any.
pub fn matrices(run: &Run, columns: usize) -> String {
    Matrix::of_run(run).iter().map(|matrix| matrix.text(columns)).collect()
}

impl<'a> Matrix<'a> {
    /// The matrices of a run, in the order in which their first figures come.
    pub(crate) fn of_run(run: &'a Run) -> Vec<Self> {
        Self::all(run.verdicts.iter().flat_map(|verdict| &verdict.figures))
    }

    fn all(figures: impl Iterator<Item = &'a Figure>) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for figure in figures.filter(|figure| figure.rounds > 0) {
            let Some((ends, transfer)) = ends(&figure.series) else { continue };
            let unit = figure.unit.as_str();
            let (axes, name, column) = match ends {
                Ends::Pair { from, to } => (Axes::Pairs, format!("GPU {from}"), to),
                Ends::Memory { name, gpu } => {
                    // The name of a ratio ends with its unit: `HOST_NUMA memory of node 0 of pinned`.
                    let name = name.strip_suffix(unit).map_or(name, str::trim_end);
                    (Axes::Memory, visible(name), gpu)
                }
            };
            let is_it = |matrix: &&mut Self| {
                matrix.transfer == transfer && matrix.unit == unit && matrix.axes == axes
            };
            let is_full = all.len() >= MOST;
            match all.iter_mut().find(is_it) {
                Some(matrix) => matrix.add(name, column, figure),
                None if is_full => {}
                None => {
                    let mut matrix = Self { transfer, unit, axes, rows: Vec::new() };
                    matrix.add(name, column, figure);
                    all.push(matrix);
                }
            }
        }
        all
    }

    /// Adds a figure to its row, unless the row has figures of a larger size.
    fn add(&mut self, name: String, column: u32, figure: &Figure) {
        let (bytes, value) = (figure.bytes, figure.value);
        match self.rows.iter_mut().find(|row| row.name == name) {
            None => self.rows.push(Row { name, bytes, cells: BTreeMap::from([(column, value)]) }),
            Some(row) if bytes < row.bytes => {}
            Some(row) => {
                if bytes > row.bytes {
                    row.cells.clear();
                }
                row.bytes = bytes;
                row.cells.insert(column, value);
            }
        }
    }

    fn columns(&self) -> Vec<u32> {
        let columns = self.rows.iter().flat_map(|row| row.cells.keys().copied());
        columns.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Size of the first row; rows of other sizes have theirs in their name.
    fn bytes(&self) -> Option<u64> {
        self.rows.first().and_then(|row| row.bytes)
    }

    fn title(&self) -> String {
        let size = self.bytes().map(|bytes| format!(", {}", size(bytes))).unwrap_or_default();
        format!("{}{size}, {}", visible(self.transfer), visible(self.unit))
    }

    fn name(&self, row: &Row) -> String {
        match row.bytes {
            Some(bytes) if row.bytes != self.bytes() => format!("{}, {}", row.name, size(bytes)),
            _ => row.name.clone(),
        }
    }

    /// A table of at most `columns` columns; a matrix that is wider comes in parts.
    fn text(&self, columns: usize) -> String {
        let names: Vec<String> = self.rows.iter().map(|row| self.name(row)).collect();
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let wide = (longest + 3).min(NAME);
        let title = format!("  {}", self.title());
        let noted = format!("{title} {}", self.axes.note());
        let heading = if noted.chars().count() <= columns { noted } else { shortened(&title, columns) };
        let mut text = format!("{heading}\n");
        for part in self.columns().chunks((columns.saturating_sub(wide) / CELL).max(1)) {
            text.push_str(&" ".repeat(wide));
            part.iter().for_each(|gpu| text.push_str(&format!("{:>CELL$}", format!("GPU {gpu}"))));
            text.push('\n');
            for (row, name) in self.rows.iter().zip(&names) {
                text.push_str(&format!("  {:<1$}", shortened(name, wide - 3), wide - 2));
                part.iter().for_each(|gpu| text.push_str(&format!("{:>CELL$}", cell(row, *gpu))));
                text.push('\n');
            }
        }
        text
    }

    /// A table of a page.
    pub(crate) fn html(&self) -> String {
        let columns = self.columns();
        let heads: String =
            columns.iter().map(|gpu| format!("<th class=\"number\">GPU {gpu}</th>")).collect();
        let row = |row: &Row| {
            let cells = columns.iter().map(|gpu| format!("<td class=\"number\">{}</td>", cell(row, *gpu)));
            format!("<tr><th>{}</th>{}</tr>", escaped(&self.name(row)), cells.collect::<String>())
        };
        format!(
            "<figure><figcaption>{} {}</figcaption><div class=\"scroll\">\
             <table class=\"matrix\"><thead><tr><th></th>{heads}</tr></thead><tbody>{}</tbody></table></div></figure>",
            escaped(&self.title()),
            self.axes.note(),
            self.rows.iter().map(row).collect::<String>()
        )
    }
}

fn cell(row: &Row, column: u32) -> String {
    row.cells.get(&column).map_or_else(|| "-".to_owned(), |value| number(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(from: u32, to: u32, bytes: u64, value: f64) -> Figure {
        Figure::of(format!("GPU {from} to GPU {to}: SM read"), Some(bytes), "GB/s", &mut [value])
    }

    fn of_memory(gpu: u32, memory: &str, bytes: u64, value: f64) -> Figure {
        Figure::of(format!("GPU {gpu}, {memory}: SM read"), Some(bytes), "GB/s", &mut [value])
    }

    fn all(figures: &[Figure]) -> Vec<Matrix<'_>> {
        Matrix::all(figures.iter())
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
        let all = all(&figures);
        assert_eq!(all.len(), 1);
        assert_eq!(
            all[0].text(80),
            "  SM read, 1 GiB, GB/s (row: active GPU, column: memory)\n\
             \u{20}          GPU 0   GPU 1\n  GPU 0        -     397\n  GPU 1      375       -\n"
        );
        assert!(all[0].html().contains("<tr><th>GPU 1</th><td class=\"number\">375</td>"));
    }

    #[test]
    fn memory_is_in_rows_and_gpus_are_in_columns() {
        let figures = [
            of_memory(0, "HOST_NUMA memory of node 0", 1 << 30, 51.38),
            of_memory(1, "HOST_NUMA memory of node 0", 1 << 30, 51.39),
            of_memory(0, "managed memory", 256 << 20, 4338.0),
            of_memory(1, "managed memory", 1 << 20, 1.0),
        ];
        let ratio = [Figure::of("GPU 0, a pool of pinned: SM read", None, "of pinned", &mut [1.0])];
        assert_eq!(
            all(&ratio)[0].text(80),
            "  SM read, of pinned (row: memory, column: GPU)\n            GPU 0\n  a pool     1.00\n"
        );
        assert_eq!(
            all(&figures)[0].text(80),
            "  SM read, 1 GiB, GB/s (row: memory, column: GPU)\n\
             \u{20}                               GPU 0   GPU 1\n\
             \u{20} HOST_NUMA memory of node 0     51.4    51.4\n\
             \u{20} managed memory, 256 MiB        4338       -\n"
        );
    }

    #[test]
    fn eight_gpus_fit_80_columns_and_more_come_in_parts() {
        let of = |gpus: u32| {
            let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
            let figures: Vec<_> =
                pairs.filter(|(a, b)| a != b).map(|(a, b)| figure(a, b, 4096, 1234.5)).collect();
            all(&figures)[0].text(80)
        };
        assert!(of(8).lines().all(|line| line.chars().count() <= 80) && of(8).lines().count() == 10);
        assert!(
            of(16).lines().all(|line| line.chars().count() <= 80) && of(16).lines().count() == 1 + 2 * 17
        );
        let long = "HOST_NUMA memory of node 0, beyond the GPU's";
        let figures: Vec<_> = (0..8).map(|gpu| of_memory(gpu, long, 4096, 1234.5)).collect();
        assert!(all(&figures)[0].text(80).lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn a_recorded_run_of_two_gpus_fits_80_columns() {
        let run = Run::parse(include_bytes!("../../../results/2xh200.json")).unwrap();
        let text = matrices(&run, 80);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let begin = "  copy engine to GPU, 1 GiB, GB/s (row: memory, column: GPU)\n\
                     \u{20}                               GPU 0   GPU 1\n\
                     \u{20} the GPU's memory               2103    2102\n\
                     \u{20} HOST_NUMA memory of node 0     55.5    55.5\n\
                     \u{20} a pool on node 0               55.5    55.5\n\
                     \u{20} pinned memory                  55.5    55.5\n\
                     \u{20} registered memory              55.5    55.5\n\
                     \u{20} SM read, 1 GiB, GB/s (row: memory, column: GPU)\n";
        assert!(text.starts_with(begin), "{text}");
        let pairs = "  latency, 1 GiB, ns (row: active GPU, column: memory)\n\
                     \u{20}          GPU 0   GPU 1\n\
                     \u{20} GPU 0        -    1016\n\
                     \u{20} GPU 1     1016       -\n";
        assert!(text.ends_with(pairs), "{text}");
    }

    #[test]
    fn what_has_no_two_ends_has_no_matrix() {
        for series in ["GPU 0 to GPU x: SM read", "GPU 0, SM read", "GPU 0 to GPU 1", "to GPU 1: read"] {
            let figure = Figure::of(series, None, "GB/s", &mut [1.0]);
            assert!(!is_in_matrix(&figure) && all(&[figure]).is_empty(), "{series}");
        }
    }
}
