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

    /// Adds the table to `out` as [`Table::write`] does where it fits `screen`. On a narrower one, columns with `-` in every
    /// row are left out, and columns for which there is still no room follow in further tables, which have the first
    /// column too.
    pub fn write_in_parts(&self, out: &mut String, screen: Screen) {
        for (number, columns) in self.parts(screen.columns()).iter().enumerate() {
            let sides: Vec<Side> =
                columns.iter().filter_map(|column| self.sides.get(*column).copied()).collect();
            let part = |cells: &[String]| -> Vec<String> {
                columns.iter().filter_map(|column| cells.get(*column).cloned()).collect()
            };
            let rows = self.rows.iter().map(|(style, cells)| (*style, part(cells))).collect();
            if number > 0 {
                out.push('\n');
            }
            Table { sides: &sides, rows }.write(out, screen);
        }
    }

    /// The columns of each part that fits `most` columns of text; all of them where that is impossible.
    fn parts(&self, most: Option<usize>) -> Vec<Vec<usize>> {
        let all: Vec<usize> = (0..self.sides.len()).collect();
        let most = most.unwrap_or(usize::MAX);
        let fits = |columns: &[usize], length: &dyn Fn(usize) -> usize| {
            columns.iter().fold(0usize, |sum, column| sum.saturating_add(length(*column) + GAP.len())) <= most
        };
        let (least, full) = (|column| self.least(column), |column| self.widest(column, whole));
        if fits(&all, &least) {
            return vec![all];
        }
        let filled: Vec<usize> =
            all.into_iter().filter(|column| *column == 0 || self.has_value(*column)).collect();
        let Some((first, others)) = filled.split_first() else { return vec![filled] };
        if fits(&filled, &least) || !others.iter().all(|other| fits(&[*first, *other], &least)) {
            return vec![filled];
        }
        let mut parts: Vec<Vec<usize>> = Vec::new();
        for other in others {
            match parts.last_mut() {
                Some(part) if fits(&[part.as_slice(), &[*other]].concat(), &full) => part.push(*other),
                _ => parts.push(vec![*first, *other]),
            }
        }
        parts
    }

    /// Whether a row has something other than `-` in `column`.
    fn has_value(&self, column: usize) -> bool {
        self.rows.iter().skip(1).filter_map(|(_, cells)| cells.get(column)).any(|cell| cell != "-")
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
        let least: Vec<usize> = columns.map(|column| self.least(column)).collect();
        let used = widths.iter().fold(0usize, |sum, width| sum.saturating_add(width + GAP.len()));
        for _ in most.unwrap_or(usize::MAX)..used {
            let shrinkable = widths.iter_mut().zip(&least).filter(|(width, least)| **width > **least);
            let Some((width, _)) = shrinkable.max_by_key(|(width, _)| **width) else { break };
            *width -= 1;
        }
        widths
    }

    /// Least width of `column`: that of its longest word, and of its longest cell if it has numbers.
    fn least(&self, column: usize) -> usize {
        let is_text = self.sides.get(column) == Some(&Side::Left);
        self.widest(column, if is_text { longest_word } else { whole })
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
    fn in_parts(columns: usize) -> String {
        let sides = [Side::Left, Side::Right, Side::Right, Side::Right, Side::Left];
        let mut table = Table::new(&sides, &["name", "size", "free", "retired", "GPUs"]);
        for name in ["first", "second"] {
            let cells = [name, "479 GiB", "-", "0 B", "0008:01:00.0 0009:01:00.0"];
            table.row(None, cells.map(str::to_owned).into());
        }
        let mut out = String::new();
        table.write_in_parts(&mut out, Screen::plain(columns));
        out
    }

    #[test]
    fn a_table_in_parts_is_one_table_where_its_words_fit() {
        let gpus = "0008:01:00.0 0009:01:00.0";
        let whole = in_parts(66);
        assert!(whole.starts_with("  name       size  free  retired  GPUs\n"), "{whole}");
        assert!(whole.contains(&format!("  first   479 GiB     -      0 B  {gpus}\n")), "{whole}");
        // The addresses are words, which may stand below each other.
        let narrow = in_parts(46);
        assert!(narrow.contains("     -      0 B  0008:01:00.0\n") && !narrow.contains(gpus), "{narrow}");
    }

    #[test]
    fn a_table_in_parts_leaves_out_empty_columns_before_it_is_split() {
        let begin = "  name       size  retired  GPUs\n  first   479 GiB      0 B  0008:01:00.0\n";
        assert!(in_parts(45).starts_with(begin), "{}", in_parts(45));
        assert!(in_parts(40).starts_with(begin), "{}", in_parts(40));
        assert_eq!(
            in_parts(39),
            "  name       size  retired\n  first   479 GiB      0 B\n  second  479 GiB      0 B\n\n\
             \x20 name    GPUs\n  first   0008:01:00.0 0009:01:00.0\n  second  0008:01:00.0 0009:01:00.0\n"
        );
        // No part would have room for an address: the table stays whole.
        assert!(in_parts(21).starts_with(begin), "{}", in_parts(21));
    }
}
