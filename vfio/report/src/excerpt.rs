//! The line of a text that an error is about, with a mark under the place.

use std::ops::Range;

use unicode_width::UnicodeWidthChar;

/// Columns of a terminal that an excerpt fits in.
const WIDTH: usize = 80;

/// Two lines: `line`, which is number `number` of its text, and a mark under its column `column` (from 1, in
/// characters).
///
/// A long line is cut around the mark. Tabs and characters that a terminal obeys or does not show are replaced, each by
/// one column.
#[must_use]
pub fn excerpt(line: &str, number: usize, column: usize) -> String {
    let number = number.to_string();
    // "  NUMBER | " before the text, and a column for a mark behind it.
    let room = WIDTH.saturating_sub(number.len().saturating_add("   | ".len()).saturating_add(1));
    // Nothing before or behind the room around the mark is looked at: a line can have a megabyte.
    let line = line.trim_end();
    let at = column.saturating_sub(1).min(line.chars().count());
    let skipped = at.saturating_sub(room);
    let most = room.saturating_mul(2).saturating_add(1);
    let line: Vec<char> = line.chars().skip(skipped).take(most).map(plain).collect();
    let at = at.saturating_sub(skipped);
    let Range { start, end } = visible(&line, at, room);
    let mut shown = line.get(start..end).unwrap_or_default().to_vec();
    if start > 0 || skipped > 0 {
        shown.first_mut().into_iter().for_each(|character| *character = '…');
    }
    if end < line.len() {
        shown.last_mut().into_iter().for_each(|character| *character = '…');
    }
    let (before, rest) = split(&shown, at.saturating_sub(start));
    let mark = "^".repeat(rest.get(..token(rest)).map_or(1, columns));
    let (margin, before) = (" ".repeat(number.len()), " ".repeat(columns(before)));
    let text: String = shown.into_iter().collect();
    format!("  {number} | {text}\n  {margin} | {before}{mark}")
}

/// The part of `line` around `at` that fits into `room` columns. A third of it is before `at`, or more at the end of the
/// line.
fn visible(line: &[char], at: usize, room: usize) -> Range<usize> {
    let (before, after) = split(line, at);
    let start = |room| at.saturating_sub(fitting(before.iter().rev(), room));
    let first = start(room / 3);
    let used = columns(line.get(first..at).unwrap_or_default());
    let end = at.saturating_add(fitting(after.iter(), room.saturating_sub(used)));
    let first = if end == line.len() { start(room.saturating_sub(columns(after))) } else { first };
    first..end
}

/// Number of the first `characters` that fit into `room` columns.
fn fitting<'c>(characters: impl Iterator<Item = &'c char>, room: usize) -> usize {
    let mut used = 0usize;
    let fits = |character: &&char| {
        used = used.saturating_add(width(**character));
        used <= room
    };
    characters.take_while(fits).count()
}

/// Columns that `text` takes on a terminal.
fn columns(text: &[char]) -> usize {
    text.iter().map(|character| width(*character)).sum()
}

fn width(character: char) -> usize {
    character.width().unwrap_or(1)
}

fn split(text: &[char], at: usize) -> (&[char], &[char]) {
    text.split_at_checked(at).unwrap_or((text, &[]))
}

/// Characters of the key, number or word that `text` begins with; 1 for anything else.
fn token(text: &[char]) -> usize {
    let is_word = |c: &char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
    match text.first() {
        Some('"') => {
            let end = text.iter().skip(1).position(|c| *c == '"');
            end.map_or(text.len(), |end| end.saturating_add(2))
        }
        Some(first) if is_word(first) => text.iter().take_while(|c| is_word(c)).count(),
        _ => 1,
    }
}

fn plain(character: char) -> char {
    let has_columns = character.width().is_some_and(|columns| columns > 0);
    match character {
        '\t' => ' ',
        '"' | '\'' | '\\' => character,
        _ if has_columns && character.escape_debug().len() == 1 => character,
        _ => '\u{fffd}',
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_mark_is_under_the_token_at_the_column() {
        assert_eq!(
            excerpt(r#"  "memroy": { "size": 1 }"#, 3, 3),
            concat!("  3 |   \"memroy\": { \"size\": 1 }\n", "    |   ^^^^^^^^")
        );
        assert_eq!(excerpt("{ \"a\": 1.5e3, }", 12, 8), "  12 | { \"a\": 1.5e3, }\n     |        ^^^^^");
        assert_eq!(excerpt("", 1, 1), "  1 | \n    | ^");
        assert_eq!(excerpt("{\t\u{1b}}", 1, 9), "  1 | { \u{fffd}}\n    |     ^");
    }

    #[test]
    fn the_mark_is_under_the_place_behind_tabs_and_wide_characters() {
        assert_eq!(excerpt("\t\t\"a\": x", 4, 3), "  4 |   \"a\": x\n    |   ^^^");
        let line = "{\"名前\": 12}";
        assert_eq!(excerpt(line, 1, 8), format!("  1 | {line}\n    | {}^^", " ".repeat(9)));
        assert_eq!(excerpt(line, 1, 2), format!("  1 | {line}\n    |  ^^^^^^"));
        // An accent of its own, and a character without a column.
        assert_eq!(excerpt("e\u{301}\u{200b}x", 1, 4), "  1 | e\u{fffd}\u{fffd}x\n    |    ^");
    }

    #[test]
    fn a_line_of_wide_characters_is_cut_by_columns() {
        let shown = excerpt(&"名".repeat(500), 1, 250);
        let [text, mark] = shown.lines().collect::<Vec<_>>()[..] else { panic!("{shown}") };
        let [text, mark] = [text, mark].map(|line| columns(&line.chars().collect::<Vec<_>>()));
        assert!(text <= WIDTH && text > WIDTH - 6 && mark <= WIDTH, "{shown}");
    }

    #[test]
    fn a_long_line_is_cut_on_both_sides_of_the_mark() {
        let line = format!("{}\"key\"{}", "a".repeat(500), "b".repeat(500));
        let shown = excerpt(&line, 1, 501);
        let [text, mark] = shown.lines().collect::<Vec<_>>()[..] else { panic!("{shown}") };
        assert!(text.starts_with("  1 | …aaa") && text.ends_with("bbb…"), "{shown}");
        let before = text.chars().take_while(|c| *c != '"').count();
        assert_eq!(mark, format!("    |{}^^^^^", " ".repeat(before - 5)), "{shown}");
    }

    #[test]
    fn a_mark_behind_a_long_line_stands_at_its_end() {
        let shown = excerpt(&"a".repeat(1000), 1, 2000);
        let [text, mark] = shown.lines().collect::<Vec<_>>()[..] else { panic!("{shown}") };
        assert!(text.starts_with("  1 | …aaa") && text.ends_with("aaa"), "{shown}");
        assert_eq!(mark.chars().count(), text.chars().count() + 1, "{shown}");
    }

    proptest! {
        #[test]
        fn an_excerpt_of_any_line_fits_a_terminal(line in ".{0,300}", number in 1_usize..100_000, column in 0_usize..400) {
            let shown = excerpt(&line, number, column);
            prop_assert_eq!(shown.lines().count(), 2);
            let columns = |line: &str| line.chars().map(width).sum::<usize>();
            prop_assert!(shown.lines().all(|line| columns(line) <= WIDTH), "{}", shown);
            prop_assert!(shown.ends_with('^') && shown.chars().all(|c| c == '\n' || !c.is_control()));
        }
    }
}
