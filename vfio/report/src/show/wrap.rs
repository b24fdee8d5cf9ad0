//! Lines that break between words.

use crate::show::Screen;

/// Columns beside other text that are too few for sentences.
const NARROW: usize = 24;
/// Indent of a text that stands below instead.
const BELOW: usize = 4;

/// `text`, which begins in column `indent` of a line on `screen`. What the terminal has no room for follows on lines with the
/// same indent; where they would be narrow, all of it follows below.
#[must_use]
pub fn hanging(text: &str, indent: usize, screen: Screen) -> String {
    let Some(columns) = screen.columns().filter(|columns| text.chars().count() + indent > *columns) else {
        return text.to_owned();
    };
    let room = columns.saturating_sub(indent);
    if room >= NARROW {
        return wrap(text, room).join(&format!("\n{:indent$}", ""));
    }
    let lines = wrap(text, columns.saturating_sub(BELOW));
    lines.iter().map(|line| format!("\n{:BELOW$}{line}", "")).collect()
}

/// `text` in lines of at most `columns`; a word that is longer has a line of its own. Spaces inside a line stay.
#[must_use]
pub fn wrap(text: &str, columns: usize) -> Vec<&str> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while rest.chars().count() > columns {
        let Some((line, after)) = split(rest, columns) else { break };
        lines.push(line);
        rest = after;
    }
    lines.push(rest);
    lines
}

/// `text` at its last space that lets the first part fit into `columns`, or at its first space.
fn split(text: &str, columns: usize) -> Option<(&str, &str)> {
    let begin = text.len() - text.trim_start_matches(' ').len();
    let end = text.trim_end_matches(' ').len();
    let spaces = text.char_indices().enumerate();
    let mut spaces = spaces.filter(|(_, (at, c))| *c == ' ' && (begin..end).contains(at));
    let first = spaces.next()?;
    let fitting = spaces.take_while(|(column, _)| *column <= columns);
    let (_, (at, _)) = fitting.last().unwrap_or(first);
    let (line, rest) = text.split_at(at);
    Some((line.trim_end_matches(' '), rest.trim_start_matches(' ')))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two  three", 8), ["one two", "three"]);
        assert_eq!(wrap("one two", 7), ["one two"]);
        assert_eq!(wrap("one two", 6), ["one", "two"]);
        assert_eq!(wrap("indivisible a b", 3), ["indivisible", "a b"]);
        assert_eq!(wrap("  a  bc d ", 7), ["  a  bc", "d "]);
        assert_eq!((wrap("", 3), wrap("indivisible", 3)), (vec![""], vec!["indivisible"]));
    }

    #[test]
    fn text_hangs_beside_its_name_or_below_where_there_is_no_room() {
        let text = "a sentence that is longer than the terminal";
        assert_eq!(hanging(text, 10, Screen::FILE), text);
        assert_eq!(hanging(text, 10, Screen::plain(60)), text);
        let beside = "a sentence that is longer than\n          the terminal";
        assert_eq!(hanging(text, 10, Screen::plain(41)), beside);
        let below = "\n    a sentence that is longer than the\n    terminal";
        assert_eq!(hanging(text, 30, Screen::plain(41)), below);
    }

    proptest! {
        #[test]
        fn every_word_stays_whole_and_a_line_is_too_long_only_if_it_is_one_word(
            text in "[a-zé ]{0,60}", columns in 0usize..30,
        ) {
            let lines = wrap(&text, columns);
            let words: Vec<&str> = lines.iter().flat_map(|line| line.split_whitespace()).collect();
            prop_assert_eq!(words, text.split_whitespace().collect::<Vec<_>>());
            for line in lines {
                prop_assert!(line.chars().count() <= columns || line.split_whitespace().count() <= 1, "{:?}", line);
            }
        }
    }
}
