//! Untrusted text (device names, kernel messages, errors of libraries), made safe for a terminal, XML and HTML.

use egm_report::show::{markup, wrap};

/// The text without characters that a terminal or a reader interprets: control characters, and those that change the
/// direction of writing, become U+FFFD, and a line break becomes a blank.
pub fn visible(text: &str) -> String {
    text.chars().map(|c| if matches!(c, '\n' | '\t' | '\r') { ' ' } else { shown(c) }).collect()
}

fn shown(c: char) -> char {
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_none = matches!(c, '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}');
    if c.is_control() || turns || is_none { char::REPLACEMENT_CHARACTER } else { c }
}

/// The text in lines of at most `columns` characters, each after `indent` blanks and with its line break; only a word that
/// is longer than that stands out.
pub fn wrapped(text: &str, indent: usize, columns: usize) -> String {
    let lines = wrap(text.trim(), columns.saturating_sub(indent));
    lines.iter().map(|line| format!("{:indent$}{line}\n", "")).collect()
}

/// The text in lines of at most `columns` characters with a line break; the second and later ones are indented by two
/// blanks more.
pub(crate) fn continued(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return format!("{text}\n");
    }
    let indent = text.len() - text.trim_start().len() + 2;
    wrap(text, columns.saturating_sub(indent)).join(&format!("\n{:indent$}", "")) + "\n"
}

/// The text without its middle if it has more than `most` characters: texts differ at their ends.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    let length = text.chars().count();
    if length <= most {
        return text.to_owned();
    }
    let kept = most.saturating_sub(2);
    let begin = kept / 2;
    let mut short: String = text.chars().take(begin).collect();
    short.push_str("..");
    short.extend(text.chars().skip(length - (kept - begin)));
    short
}

/// The text as content or as a quoted attribute of HTML.
pub(crate) fn escaped(text: &str) -> String {
    markup(&visible(text))
}

/// A size in the largest binary unit that leaves no fraction: `64 KiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = UNITS.iter().find(|(_, shift)| bytes != 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes} B"), |(name, shift)| format!("{} {name}", bytes >> shift))
}

/// An amount of memory, in the largest binary unit that leaves 1 or more: `23.5 GiB`.
pub(crate) fn amount(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "one digit behind the point is shown")]
    let of = |shift: u32| bytes as f64 / (1u64 << shift) as f64;
    let unit = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| bytes >> shift > 0);
    unit.map_or_else(|| size(bytes), |(name, shift)| format!("{:.1} {name}", of(shift)))
}

/// A figure with three significant digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if !(0.001..1e8).contains(&size) => format!("{value:.2e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        assert_eq!(visible("a\u{1b}[31mb\nc\u{202e}d\0"), "a\u{fffd}[31mb c\u{fffd}d\u{fffd}");
        assert_eq!(visible("Größe 2 µs"), "Größe 2 µs");
    }

    #[test]
    fn lines_are_no_longer_than_asked_but_for_a_word_that_is() {
        assert_eq!(wrapped("one two  three", 2, 9), "  one two\n  three\n");
        assert_eq!(wrapped("overlong a b", 0, 4), "overlong\na b\n");
        assert_eq!(wrapped("", 4, 80), "    \n");
    }

    #[test]
    fn a_line_that_is_too_long_continues_deeper() {
        assert_eq!(continued("  one two three", 15), "  one two three\n");
        assert_eq!(continued("  one two three", 14), "  one two\n    three\n");
        assert_eq!(continued("one two three", 12), "one two\n  three\n");
    }

    #[test]
    fn a_long_name_loses_its_middle() {
        assert_eq!(shortened("copy engine", 11), "copy engine");
        assert_eq!(shortened("copy engine to GPU", 10), "copy.. GPU");
        assert_eq!(shortened("abc", 1), "..");
    }

    #[test]
    fn nothing_that_html_obeys_is_left() {
        assert_eq!(escaped("<a b='c'>\"&"), "&lt;a b=&#39;c&#39;&gt;&quot;&amp;");
    }

    #[test]
    fn sizes_and_numbers_are_short() {
        assert_eq!([0, 1 << 30, 25_275_793_408].map(amount), ["0 B", "1.0 GiB", "23.5 GiB"]);
        assert_eq!([0, 1000, 65536, 1 << 30].map(size), ["0 B", "1000 B", "64 KiB", "1 GiB"]);
        assert_eq!(
            [0.0, 0.52, 5.25, 52.5, 525.0, 1e12].map(number),
            ["0", "0.5200", "5.25", "52.5", "525", "1.00e12"]
        );
    }
}
