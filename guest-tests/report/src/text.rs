//! Text of strangers (device names, kernel messages, errors of libraries), made fit for a terminal, XML and HTML.

/// The text with what a terminal or a reader would obey in place of showing: control characters, and those that turn
/// the direction of writing, become U+FFFD, and a line break becomes a blank.
pub fn visible(text: &str) -> String {
    text.chars().map(|c| if matches!(c, '\n' | '\t' | '\r') { ' ' } else { shown(c) }).collect()
}

fn shown(c: char) -> char {
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_none = matches!(c, '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}');
    if c.is_control() || turns || is_none { char::REPLACEMENT_CHARACTER } else { c }
}

/// The text as content or as a quoted attribute of HTML.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in visible(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A size in the largest binary unit that leaves no fraction: `64 KiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = UNITS.iter().find(|(_, shift)| bytes != 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes} B"), |(name, shift)| format!("{} {name}", bytes >> shift))
}

/// A figure with three digits that count.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if !(0.001..1e9).contains(&size) => format!("{value:.2e}"),
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
    fn nothing_that_html_obeys_is_left() {
        assert_eq!(escaped("<a b='c'>\"&"), "&lt;a b=&#39;c&#39;&gt;&quot;&amp;");
    }

    #[test]
    fn sizes_and_numbers_are_short() {
        assert_eq!([0, 1000, 65536, 1 << 30].map(size), ["0 B", "1000 B", "64 KiB", "1 GiB"]);
        assert_eq!(
            [0.0, 0.52, 5.25, 52.5, 525.0, 1e12].map(number),
            ["0", "0.5200", "5.25", "52.5", "525", "1.00e12"]
        );
    }
}
