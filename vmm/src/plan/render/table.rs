//! Columns of text that line up, with colour where the reader is a terminal.

use std::fmt::Write;

use crate::plan::render::model::Tone;

/// Whether escape sequences for colour are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// The reader is a terminal.
    On,
    /// The reader is a file or a program.
    Off,
}

impl Colour {
    /// `text` in the colour of `tone` (ANSI X3.64 select graphic rendition).
    pub(super) fn tone(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Ram => "34",
            Tone::Egm => "32",
            Tone::Pci => "36",
            Tone::System => "33",
            Tone::Free => "2",
        };
        self.code(code, text)
    }

    pub(super) fn strong(self, text: &str) -> String {
        self.code("1", text)
    }

    fn code(self, code: &str, text: &str) -> String {
        match self {
            Self::On => format!("\x1b[{code}m{text}\x1b[0m"),
            Self::Off => text.to_owned(),
        }
    }
}

/// Which side of its column a cell keeps to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// Rows whose columns get as wide as their widest cell.
pub(super) struct Table<'a> {
    sides: &'a [Side],
    rows: Vec<(Option<Tone>, Vec<String>)>,
}

impl<'a> Table<'a> {
    pub(super) fn new(sides: &'a [Side], heads: &[&str]) -> Self {
        Self { sides, rows: vec![(Some(Tone::Free), heads.iter().map(|&head| head.to_owned()).collect())] }
    }

    pub(super) fn row(&mut self, tone: Option<Tone>, cells: Vec<String>) {
        self.rows.push((tone, cells));
    }

    /// Adds the table to `out`, indented by two columns, without spaces at line ends.
    pub(super) fn write(&self, out: &mut String, colour: Colour) {
        let wide = |column: usize| {
            let cells = self.rows.iter().filter_map(|(_, cells)| cells.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.sides.len()).map(wide).collect();
        for (tone, cells) in &self.rows {
            let mut line = String::new();
            for ((cell, side), width) in cells.iter().zip(self.sides).zip(&widths) {
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                let (before, after) =
                    if *side == Side::Left { ("", pad.as_str()) } else { (pad.as_str(), "") };
                let _ = write!(line, "  {before}{cell}{after}"); // a String takes everything
            }
            let line = line.trim_end();
            out.push_str(&tone.map_or_else(|| line.to_owned(), |tone| colour.tone(tone, line)));
            out.push('\n');
        }
    }
}
