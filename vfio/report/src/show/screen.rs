//! The reader of a text: a terminal with its columns and colours, or a file.

use std::env;
use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;

use egm_address::Printable;
use rustix::termios::tcgetwinsize;

/// Columns of a terminal that reports none.
pub const COLUMNS: usize = 80;
/// The fewest and the most columns that a terminal plausibly has.
const PLAUSIBLE: RangeInclusive<usize> = 40..=400;

/// What a text is shown on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Screen {
    has_colour: bool,
    columns: Option<usize>,
}

impl Screen {
    /// A file or another program: no escape sequences, and lines of any length, which can be searched.
    pub const FILE: Self = Self { has_colour: false, columns: None };

    /// A terminal with colours.
    #[must_use]
    pub const fn coloured(columns: usize) -> Self {
        Self { has_colour: true, columns: Some(columns) }
    }

    /// A terminal without colours.
    #[must_use]
    pub const fn plain(columns: usize) -> Self {
        Self { has_colour: false, columns: Some(columns) }
    }

    /// The screen behind `stream`. All programs decide about colour here.
    #[must_use]
    pub fn of(stream: &(impl AsFd + IsTerminal)) -> Self {
        if !stream.is_terminal() {
            return Self::FILE;
        }
        let has_colour = has_colour(env::var_os("NO_COLOR").as_deref(), env::var_os("TERM").as_deref());
        let reported = tcgetwinsize(stream).map_or(0, |size| usize::from(size.ws_col));
        let columns = [reported, exported_columns()].into_iter().find(|columns| PLAUSIBLE.contains(columns));
        Self { has_colour, columns: Some(columns.unwrap_or(COLUMNS)) }
    }

    /// The screen behind standard output.
    #[must_use]
    pub fn of_stdout() -> Self {
        Self::of(&io::stdout())
    }

    /// The screen behind standard error.
    #[must_use]
    pub fn of_stderr() -> Self {
        Self::of(&io::stderr())
    }

    /// Columns of the terminal; `None` for a file.
    #[must_use]
    pub const fn columns(self) -> Option<usize> {
        self.columns
    }

    /// `text`, printable, in `style`.
    #[must_use]
    pub fn paint(self, style: Style, text: &str) -> String {
        let text = Printable(text);
        if self.has_colour { format!("\x1b[{}m{text}\x1b[0m", style.code()) } else { text.to_string() }
    }

    /// `line` of a message, which is printable, with its first word in colour if that is a label, as `error:` is.
    #[must_use]
    pub fn message(self, line: &str) -> String {
        let text = line.trim_start_matches(' ');
        let indent = line.get(..line.len() - text.len()).unwrap_or_default();
        match LABELS.iter().find_map(|(label, style)| Some((label, style, text.strip_prefix(label)?))) {
            Some((label, style, rest)) => format!("{indent}{}{rest}", self.paint(*style, label)),
            None => line.to_owned(),
        }
    }
}

/// Whether a terminal gets colours: `NO_COLOR` turns them off (no-color.org), and a dumb terminal has none.
fn has_colour(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_some_and(|term| term != "dumb")
}

/// The value of `COLUMNS`, or 0.
pub(crate) fn exported_columns() -> usize {
    env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(0)
}

/// First words of messages.
const LABELS: [(&str, Style); 7] = [
    ("error:", Style::Error),
    ("warning:", Style::Yellow),
    ("note:", Style::Strong),
    ("debug:", Style::Faint),
    ("caused by:", Style::Faint),
    ("help:", Style::Cyan),
    ("tip:", Style::Cyan),
];

/// Emphasis of text on a terminal with colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A heading, or a word to type.
    Strong,
    /// Less important text, such as the heads of a table.
    Faint,
    /// The label of an error: bold and red.
    Error,
    /// A failure, or an entry that cannot be used.
    Red,
    /// Memory that can be granted; success.
    Green,
    /// A warning, or a check that was skipped.
    Yellow,
    /// Ordinary memory: the bright blue, as the dark one is unreadable on black.
    Blue,
    /// Memory of devices; the label of a remedy.
    Cyan,
}

impl Style {
    /// ANSI X3.64's select graphic rendition.
    const fn code(self) -> &'static str {
        match self {
            Self::Strong => "1",
            Self::Faint => "2",
            Self::Error => "1;31",
            Self::Red => "31",
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Blue => "94",
            Self::Cyan => "36",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_color_and_a_dumb_terminal_turn_colours_off() {
        let has = |no_color: Option<&str>, term: Option<&str>| {
            has_colour(no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert!(has(None, Some("xterm")) && has(Some(""), Some("xterm")));
        assert!(!has(Some("1"), Some("xterm")) && !has(None, Some("dumb")) && !has(None, None));
    }

    #[test]
    fn a_message_has_its_label_in_colour_on_a_screen_with_colours() {
        let screen = Screen::coloured(80);
        assert_eq!(screen.message("error: no error: no"), "\u{1b}[1;31merror:\u{1b}[0m no error: no");
        assert_eq!(screen.message("  help: mv"), "  \u{1b}[36mhelp:\u{1b}[0m mv");
        assert_eq!(screen.message("  as an error: no"), "  as an error: no");
        assert_eq!(Screen::plain(80).message("error: no"), "error: no");
        assert_eq!(Screen::FILE.message("  note: no"), "  note: no");
    }

    #[test]
    fn ordinary_memory_is_not_dark_blue() {
        assert_eq!(Screen::coloured(80).paint(Style::Blue, "RAM"), "\u{1b}[94mRAM\u{1b}[0m");
    }
}
