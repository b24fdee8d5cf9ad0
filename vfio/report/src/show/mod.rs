//! Output for people: columns that line up, colour where the reader is a terminal, sizes, text in a page.

mod out;
pub mod page;

pub use out::{Unwritten, print, printable_lines, written};

use std::fmt::Write;
use std::io::IsTerminal;

use egm_address::{ByteSize, Printable};

/// Whether escape sequences for colour are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// The reader is a terminal.
    On,
    /// The reader is a file or a program.
    Off,
}

impl Colour {
    /// The setting for standard output; `NO_COLOR` turns it off (no-color.org).
    #[must_use]
    pub fn of_stdout() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        if wanted && std::io::stdout().is_terminal() { Self::On } else { Self::Off }
    }

    /// `text`, printable, in `style`.
    #[must_use]
    pub fn paint(self, style: Style, text: &str) -> String {
        let text = Printable(text);
        match self {
            Self::On => format!("\x1b[{}m{text}\x1b[0m", style as u8),
            Self::Off => text.to_string(),
        }
    }
}

/// Emphasis of text; the discriminant is ANSI X3.64's select graphic rendition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Style {
    /// A heading.
    Strong = 1,
    /// Less important text.
    Faint = 2,
    /// An error.
    Red = 31,
    /// Memory that can be granted.
    Green = 32,
    /// A warning.
    Yellow = 33,
    /// The kernel's memory.
    Blue = 34,
    /// Devices' memory.
    Cyan = 36,
}

/// Alignment of a cell in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Text.
    Left,
    /// Numbers.
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

    /// Adds the table to `out`, indented by two columns, without spaces at line ends.
    pub fn write(&self, out: &mut String, colour: Colour) {
        let wide = |column: usize| {
            let cells = self.rows.iter().filter_map(|(_, cells)| cells.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.sides.len()).map(wide).collect();
        for (style, cells) in &self.rows {
            let mut line = String::new();
            for ((cell, side), width) in cells.iter().zip(self.sides).zip(&widths) {
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                let (before, after) =
                    if *side == Side::Left { ("", pad.as_str()) } else { (pad.as_str(), "") };
                let _ = write!(line, "  {before}{cell}{after}"); // a String takes everything
            }
            let line = line.trim_end();
            out.push_str(&style.map_or_else(|| line.to_owned(), |style| colour.paint(style, line)));
            out.push('\n');
        }
    }
}

/// A number of bytes for a person: exact with at most three decimals (`2.25 GiB`, `511.625 MiB`), or rounded to two
/// where that would need a long number (`~256.09 GiB`).
#[must_use]
pub fn size(bytes: u64) -> String {
    let units = [("TiB", 40u32), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let large = units.iter().filter(|(_, shift)| bytes >> shift > 0);
    let Some((unit, shift)) = large.clone().next() else { return format!("{bytes} B") };
    for (unit, shift) in large {
        let thousandths = (u128::from(bytes) * 1000) >> shift;
        let short = thousandths < if thousandths.is_multiple_of(1000) { 100_000_000 } else { 10_000_000 };
        if short && u128::from(bytes) * 1000 == thousandths << shift {
            let (whole, rest) = (thousandths / 1000, format!(".{:03}", thousandths % 1000));
            return format!("{whole}{} {unit}", rest.trim_end_matches('0').trim_end_matches('.'));
        }
    }
    let hundredths = (u128::from(bytes) * 100 + (1 << shift) / 2) >> shift;
    format!("~{}.{:02} {unit}", hundredths / 100, hundredths % 100)
}

/// Text as HTML shows it, printable but for its newlines; names, paths and descriptions come from files of any origin.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' => out.push(c),
            c => {
                let _ = write!(out, "{}", Printable(c.encode_utf8(&mut [0; 4]))); // a String takes everything
            }
        }
    }
    out
}

/// A number of things whose plural ends in an s.
///
/// ```
/// use egm_report::show::counted;
/// assert_eq!([0, 1, 2].map(|slices| counted(slices, "slice")), ["0 slices", "1 slice", "2 slices"]);
/// ```
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Exactly this many bytes, in a command line's notation: `64MiB`, and `4097B` where no unit divides them.
#[must_use]
pub fn exact(bytes: u64) -> String {
    let text = ByteSize::new(bytes).to_string();
    if text.ends_with('B') { text } else { text + "B" }
}

/// Names that [`first_of`] lists at most.
const MAX_NAMES: usize = 4;

/// `a, b, c, d and 2 more`: an error is one line, however many are in the way.
#[must_use]
pub fn first_of(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(MAX_NAMES);
    let named = names.take(MAX_NAMES).collect::<Vec<_>>().join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_the_first_are_told() {
        let names = |n: u32| first_of((0..n).map(|n| n.to_string()).collect::<Vec<_>>().into_iter());
        assert_eq!([names(1), names(4), names(6)], ["0", "0, 1, 2, 3", "0, 1, 2, 3 and 2 more"]);
    }

    #[test]
    fn what_a_person_is_told_to_write_is_the_same_size_when_it_is_read() {
        for (bytes, text) in
            [(0, "0B"), (4097, "4097B"), (64 << 20, "64MiB"), (u64::MAX, "18446744073709551615B")]
        {
            assert_eq!(exact(bytes), text);
            assert_eq!(text.parse(), Ok(ByteSize::new(bytes)));
        }
    }

    #[test]
    fn sizes_are_exact_and_short() {
        let shown = [
            0,
            1000,
            4096,
            0xa0000,
            0x1ffa_0000,
            2304 << 20,
            2044 << 10,
            262_240 << 20,
            245_761 << 18,
            255 << 40,
        ]
        .map(size);
        assert_eq!(
            shown,
            [
                "0 B",
                "1000 B",
                "4 KiB",
                "640 KiB",
                "511.625 MiB",
                "2.25 GiB",
                "2044 KiB",
                "~256.09 GiB",
                "~60.00 GiB",
                "255 TiB"
            ]
        );
    }
}
