//! Lines of limited length.

use std::mem;

/// `text` in lines of at most `columns` characters, broken at spaces. A longer word has a line of its own.
pub(super) fn lines(text: &str, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        let wide = line.chars().count().saturating_add(word.chars().count()).saturating_add(1);
        if !line.is_empty() {
            if wide > columns {
                lines.push(mem::take(&mut line));
            } else {
                line.push(' ');
            }
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_spaces_and_only_there() {
        assert_eq!(lines("one two three", 7), ["one two", "three"]);
        assert_eq!(lines("one two three", 6), ["one", "two", "three"]);
        assert_eq!(lines("a unbreakable b", 4), ["a", "unbreakable", "b"]);
        assert_eq!(lines("", 4), [""]);
    }
}
