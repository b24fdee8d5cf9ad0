//! Text from outside the program, in a message.

use std::fmt::{self, Write};

/// Characters of a text that a message quotes.
const MOST: usize = 64;

/// An untrusted text in quotes: escaped, since terminals obey control characters, and cut after 64 characters.
#[derive(Debug, Clone, Copy)]
pub struct Quoted<'t>(pub &'t str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        shown(self.0, f)?;
        f.write_char('"')
    }
}

/// The same without quotes, for what has a form of its own: `memory.nodes[0].size`.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'t>(pub &'t str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown(self.0, f)
    }
}

/// A text of any length and origin for a terminal or a page: control and format characters are escaped, newlines too.
#[derive(Debug, Clone, Copy)]
pub struct Printable<'t>(pub &'t str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '\'' | '"' | '\\' => f.write_char(c),
            _ if crate::fault!("printable-as-it-is") => f.write_char(c),
            _ => write!(f, "{}", c.escape_debug()),
        })
    }
}

fn shown(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (start, rest) = text.char_indices().nth(MOST).map_or((text, ""), |(end, _)| text.split_at(end));
    start
        .chars()
        .try_for_each(|c| if c == '\'' { f.write_char(c) } else { write!(f, "{}", c.escape_debug()) })?;
    f.write_str(if rest.is_empty() { "" } else { "…" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printable_text_is_whole_and_without_what_a_terminal_obeys() {
        let text = "C:\\a 'b' \"c\" é\n\u{1b}[2J\u{9b}2J\u{202e}\u{7f}";
        let escaped = r#"C:\a 'b' "c" é\n\u{1b}[2J\u{9b}2J\u{202e}\u{7f}"#;
        assert_eq!(Printable(text).to_string(), escaped);
        let long = "ü".repeat(1000);
        assert_eq!(Printable(&long).to_string(), long);
    }

    #[test]
    fn a_text_is_escaped_and_cut_after_64_characters() {
        assert_eq!(Quoted("it's a \"b\" \u{1b}[2J").to_string(), r#""it's a \"b\" \u{1b}[2J""#);
        let long = "ü".repeat(64);
        assert_eq!(Quoted(&long).to_string(), format!("\"{long}\""));
        assert_eq!(Quoted(&format!("{long}x")).to_string(), format!("\"{long}…\""));
        assert_eq!(Shown(&format!("{long}x")).to_string(), format!("{long}…"));
    }
}
