//! Tables of text.

use std::fmt::Write;

use egm_address::Printable;

use crate::show::{Screen, Style, page, wrap};

/// Alignment of a cell in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Aligned to the left, as text is.
    Left,
    /// Aligned to the right, as numbers are.
    Right,
}

/// Rows with columns as wide as their widest cell.
#[derive(Debug)]
pub struct Table<'a> {
    sides: &'a [Side],
    rows: Vec<(Option<Style>, Vec<String>)>,
}

impl<'a> Table<'a> {
    /// A table without rows; a column for each of `sides`.
    #[must_use]
    pub fn new(sides: &'a [Side], heads: &[&str]) -> Self {
        Self { sides, rows: vec![(Some(Style::Faint), heads.iter().map(|&head| head.to_owned()).collect())] }
    }

    /// Adds a row; its cells become printable.
    pub fn row(&mut self, style: Option<Style>, cells: Vec<String>) {
        self.rows.push((style, cells.iter().map(|cell| Printable(cell).to_string()).collect()));
    }

    /// The table as a section of a page; a row's style becomes its colour there.
    #[must_use]
    pub fn html(&self, title: &str) -> String {
        let mut rows = self.rows.iter();
        let heads: Vec<&str> =
            rows.next().into_iter().flat_map(|(_, heads)| heads).map(String::as_str).collect();
        let numeric = self.sides.iter().enumerate().filter(|(_, side)| **side == Side::Right);
        let class = |style: Option<Style>| match style {
            Some(Style::Green) => "egm",
            Some(Style::Red) => "bad",
            _ => "",
        };
        let rows: Vec<_> = rows.map(|(style, cells)| (class(*style).to_owned(), cells.clone())).collect();
        page::table(title, &heads, &numeric.map(|(column, _)| column).collect::<Vec<_>>(), &rows)
    }

    /// Adds the table to `out`, indented by two columns, without spaces at line ends. Text breaks between words where the
    /// table is wider than `screen`.
    pub fn write(&self, out: &mut String, screen: Screen) {
        let widths = self.widths(screen.columns());
        for (style, cells) in &self.rows {
            let cells: Vec<Vec<&str>> =
                cells.iter().zip(&widths).map(|(cell, width)| wrap(cell, *width)).collect();
            for number in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
                let line = self.line(&cells, &widths, number);
                out.push_str(&style.map_or_else(|| line.clone(), |style| screen.paint(style, &line)));
                out.push('\n');
            }
        }
    }

    /// Line `number` of the row with `cells`, which are in lines.
    fn line(&self, cells: &[Vec<&str>], widths: &[usize], number: usize) -> String {
        let mut line = String::new();
        for ((cell, side), width) in cells.iter().zip(self.sides).zip(widths) {
            let text = cell.get(number).copied().unwrap_or_default();
            let pad = " ".repeat(width.saturating_sub(text.chars().count()));
            let (before, after) = if *side == Side::Left { ("", pad.as_str()) } else { (pad.as_str(), "") };
            let _ = write!(line, "{GAP}{before}{text}{after}"); // a String takes everything
        }
        line.truncate(line.trim_end().len());
        line
    }

    /// Widths of the columns. Where they exceed `most` together, the widest columns of text shrink, down to their longest
    /// word.
    fn widths(&self, most: Option<usize>) -> Vec<usize> {
        let columns = 0..self.sides.len();
        let mut widths: Vec<usize> = columns.clone().map(|column| self.widest(column, whole)).collect();
        let words = columns.map(|column| self.widest(column, longest_word));
        let least: Vec<usize> = words
            .zip(self.sides)
            .zip(&widths)
            .map(|((word, side), width)| if *side == Side::Left { word } else { *width })
            .collect();
        let used = widths.iter().fold(0usize, |sum, width| sum.saturating_add(width + GAP.len()));
        for _ in most.unwrap_or(usize::MAX)..used {
            let shrinkable = widths.iter_mut().zip(&least).filter(|(width, least)| **width > **least);
            let Some((width, _)) = shrinkable.max_by_key(|(width, _)| **width) else { break };
            *width -= 1;
        }
        widths
    }

    /// The largest `length` of a column's cells.
    fn widest(&self, column: usize, length: fn(&str) -> usize) -> usize {
        let cells = self.rows.iter().filter_map(|(_, cells)| cells.get(column));
        cells.map(|cell| length(cell)).max().unwrap_or(0)
    }
}

/// Space before each column.
const GAP: &str = "  ";

fn whole(cell: &str) -> usize {
    cell.chars().count()
}

fn longest_word(cell: &str) -> usize {
    cell.split(' ').map(whole).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(screen: Screen) -> String {
        let mut table = Table::new(&[Side::Left, Side::Right, Side::Left], &["name", "size", "how"]);
        table.row(None, ["a".into(), "1024 MiB of all".into(), "huge pages of a pool".into()].into());
        table.row(Some(Style::Green), ["bc".into(), "4 KiB".into(), "one file".into()].into());
        let mut out = String::new();
        table.write(&mut out, screen);
        out
    }

    #[test]
    fn a_table_has_its_full_width_in_a_file_and_where_it_fits() {
        let text = "  name             size  how\n  a     1024 MiB of all  huge pages of a pool\n  \
                    bc              4 KiB  one file\n";
        assert_eq!(written(Screen::FILE), text);
        assert_eq!(written(Screen::plain(45)), text);
    }

    #[test]
    fn text_breaks_between_words_on_a_narrow_terminal_and_numbers_do_not_break() {
        assert_eq!(
            written(Screen::plain(36)),
            "  name             size  how\n  a     1024 MiB of all  huge pages\n                         of a pool\n  \
             bc              4 KiB  one file\n"
        );
        // The longest words are wider than this terminal: none is cut.
        let narrow = written(Screen::plain(1));
        assert!(narrow.contains("1024 MiB of all  huge\n") && narrow.contains("  pages\n"), "{narrow}");
    }

    #[test]
    fn each_line_of_a_row_has_the_rows_colour() {
        let text = written(Screen::coloured(30));
        let lines: Vec<&str> = text.lines().collect();
        let green = lines.iter().filter(|line| line.starts_with("\u{1b}[32m") && line.ends_with("\u{1b}[0m"));
        assert!(green.count() == 2 && lines.iter().any(|line| line.contains(" file")), "{text:?}");
    }
}
