//! What is wrong with a JSON text, in words for its author.
//!
//! serde_json reports mistakes in the terms of a parser, and those of a type in the terms of Rust. Both are translated
//! here, and the frequent ones (comments, a trailing comma, a byte order mark) are named.

use std::fmt;

use egm_address::Quoted;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use crate::excerpt::excerpt;

/// A mistake in a JSON text: what is wrong, where, and the remedy where there is a general one.
///
/// `Display` is the reason alone, without the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonError {
    /// Byte of the text that the mistake is at.
    pub offset: usize,
    /// Line of that byte, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong, in the words of JSON and without the place.
    pub reason: String,
    /// The remedy, where there is a general one.
    pub help: Option<String>,
    /// A misspelt key or name, for a better remedy.
    pub unknown: Option<Unknown>,
    /// The line, with a mark under the place.
    pub excerpt: String,
}

/// A key or name that is none of the known ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// As it was written.
    pub name: String,
    /// The names that are allowed in its place.
    pub known: Vec<String>,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for JsonError {}

/// The `T` in a JSON text.
///
/// # Errors
/// [`JsonError`]: the text is not JSON, or of something else.
pub fn from_slice<T: DeserializeOwned>(text: &[u8]) -> Result<T, Box<JsonError>> {
    serde_json::from_slice(text).map_err(|error| Box::new(JsonError::new(text, &error)))
}

impl JsonError {
    /// The mistake in `text` that serde_json reports as `error`.
    #[must_use]
    pub fn new(text: &[u8], error: &serde_json::Error) -> Self {
        let offset = offset_of(text, error.line(), error.column());
        let message = error.to_string();
        let message = message.rfind(" at line ").map_or(message.as_str(), |end| message.split_at(end).0);
        let (offset, words) = match error.classify() {
            Category::Data => (start_of_token(text, offset), of_type(message)),
            _ => named(text, offset, message).unwrap_or_else(|| (offset, of_syntax(text, message))),
        };
        let (line, column) = line_and_column(text, offset);
        let whole = String::from_utf8_lossy(text);
        let excerpt = excerpt(whole.lines().nth(line.saturating_sub(1)).unwrap_or_default(), line, column);
        let Words { reason, help, unknown } = words;
        Self { offset, line, column, reason, help, unknown, excerpt }
    }
}

/// Parts of a [`JsonError`] that do not depend on the place of the mistake.
#[derive(Debug, Default)]
struct Words {
    reason: String,
    help: Option<String>,
    unknown: Option<Unknown>,
}

impl Words {
    fn new(reason: impl Into<String>, help: &str) -> Self {
        let help = Some(help.to_owned()).filter(|help| !help.is_empty());
        Self { reason: reason.into(), help, unknown: None }
    }
}

/// Byte offset of a serde_json position: lines from 1, columns in bytes, of the byte read last.
fn offset_of(text: &[u8], line: usize, column: usize) -> usize {
    let before = text.split_inclusive(|byte| *byte == b'\n').take(line.saturating_sub(1));
    let start: usize = before.map(<[u8]>::len).sum();
    start.saturating_add(column.saturating_sub(1)).min(text.len())
}

/// Line and column, from 1, of the byte at `offset`; columns are counted in characters.
#[must_use]
pub fn line_and_column(text: &[u8], offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.iter().filter(|byte| **byte == b'\n').count();
    let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end.saturating_add(1));
    let is_start_of_character = |byte: &&u8| **byte & 0xc0 != 0x80;
    let column = before.get(start..).unwrap_or_default().iter().filter(is_start_of_character).count();
    (line.saturating_add(1), column.saturating_add(1))
}

/// First byte of the text, number or word that ends at `offset`.
fn start_of_token(text: &[u8], offset: usize) -> usize {
    let before = text.get(..offset).unwrap_or(text);
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'+');
    match text.get(offset) {
        Some(b'"') => before.iter().rposition(|byte| *byte == b'"').unwrap_or(offset),
        Some(last) if is_word(last) => {
            before.iter().rposition(|byte| !is_word(byte)).map_or(0, |end| end.saturating_add(1))
        }
        Some(b',') if !before.is_empty() => start_of_token(text, offset.saturating_sub(1)),
        _ => offset,
    }
}

/// Mistakes that other notations allow, with their place.
fn named(text: &[u8], offset: usize, message: &str) -> Option<(usize, Words)> {
    let rest = text.get(offset..).unwrap_or_default();
    if text.starts_with(b"\xef\xbb\xbf") {
        let help = "save it as UTF-8 without one";
        return Some((
            0,
            Words::new("the file begins with a byte order mark, which JSON does not allow", help),
        ));
    }
    if text.starts_with(b"\xff\xfe") || text.starts_with(b"\xfe\xff") {
        return Some((0, Words::new("the file is UTF-16 text", "save it as UTF-8")));
    }
    if ["EOF", "control character"].iter().any(|start| message.starts_with(start))
        || message.contains("escape")
    {
        return None; // the end of the file, or inside a text
    }
    let words = match rest {
        [b'/', b'/' | b'*', ..] | [b'#', ..] => {
            Words::new("comments are not JSON", "remove it, or write it as the value of \"description\"")
        }
        [b'\'', ..] => Words::new("not JSON: single quotes", "write double quotes"),
        _ if message == "trailing comma" => return trailing_comma(text, offset),
        [byte, ..] if message == "key must be a string" && byte.is_ascii_alphanumeric() => {
            Words::new("not JSON: a key without quotes", "write double quotes around it")
        }
        [byte, ..] if byte.is_ascii_alphabetic() && is_bare_text(text, offset, message) => {
            Words::new("not JSON: a text without quotes", "write double quotes around it")
        }
        _ => return None,
    };
    Some((start_of_token(text, offset), words))
}

/// Whether the letter at `offset` begins a value, or goes on with a number or word: `GiB`, `1GiB`, `yes`.
fn is_bare_text(text: &[u8], offset: usize, message: &str) -> bool {
    let before = offset.checked_sub(1).and_then(|before| text.get(before));
    let goes_on = before.is_some_and(u8::is_ascii_alphanumeric);
    message == "expected value"
        || message == "expected ident"
        || (message.starts_with("expected `,`") && goes_on)
}

/// The comma is before the closing bracket at `offset`.
fn trailing_comma(text: &[u8], offset: usize) -> Option<(usize, Words)> {
    let comma = text.get(..offset)?.iter().rposition(|byte| *byte == b',')?;
    Some((comma, Words::new("not JSON: a comma after the last entry", "remove the comma")))
}

/// A mistake in the text itself.
fn of_syntax(text: &[u8], message: &str) -> Words {
    let is_blank = text.iter().all(u8::is_ascii_whitespace);
    let (reason, help) = match message {
        "EOF while parsing a value" if is_blank => ("the file is empty", ""),
        "EOF while parsing a list" => ("the file ends inside an array", "close it with ]"),
        "EOF while parsing an object" => ("the file ends inside an object", "close it with }"),
        "EOF while parsing a string" => ("the file ends inside a text", "close it with \""),
        "EOF while parsing a value" => ("the file ends where a value belongs", ""),
        "expected `:`" => ("no colon after the key", "write \"KEY\": VALUE"),
        "expected `,` or `]`" => ("no comma between two entries", "write a comma, or ] to close the array"),
        "expected `,` or `}`" => ("no comma between two entries", "write a comma, or } to close the object"),
        "expected value" => {
            ("no value begins here", "write a number, true, false, null, or a text in quotes")
        }
        "expected ident" => ("an unknown word", "write true, false, null, or a text in quotes"),
        "key must be a string" | "expected `\"`" => ("no key in double quotes", "write \"KEY\": VALUE"),
        "invalid escape" => ("an unknown escape in a text", "write \\\\ for a backslash"),
        "invalid number" => ("not a number of JSON", "write decimal digits without leading zeros"),
        "number out of range" => ("the number is too large", ""),
        "trailing characters" => ("more text after the end", "remove it, or put all of it in one { }"),
        "recursion limit exceeded" => ("nested too deep", ""),
        "invalid unicode code point" => ("a text that is not UTF-8", "save the file as UTF-8"),
        _ if message.starts_with("control character") => {
            ("a line break or control character in a text", "write \\n for a line break")
        }
        _ if message.contains("hex escape") => ("an incomplete \\u escape in a text", ""),
        _ => ("the text has no form of JSON", ""),
    };
    Words::new(format!("not JSON: {reason}"), help)
}

/// A value of the wrong type, in the words of JSON. Messages of our own types are as they are.
fn of_type(message: &str) -> Words {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let name = || message.split('`').nth(1).unwrap_or_default();
    if let Some(rest) =
        ["invalid type: ", "invalid value: "].iter().find_map(|start| message.strip_prefix(start))
        && let Some((found, wanted)) = rest.rsplit_once(", expected ")
    {
        return Words::new(
            format!("found {}, expected {}", found_in_json(found), expected_in_json(wanted)),
            "",
        );
    }
    if message.starts_with("missing field ") {
        return Words::new(format!("key {} is missing", Quoted(name())), "");
    }
    if message.starts_with("duplicate field ") {
        return Words::new(format!("key {} is written twice", Quoted(name())), "remove one");
    }
    let kind = if message.starts_with("unknown field ") { "key" } else { "name" };
    if kind == "key" || message.starts_with("unknown variant ") {
        let written = quoted.next().unwrap_or_default().to_owned();
        let known: Vec<String> = quoted.map(str::to_owned).collect();
        let help = if known.is_empty() { String::new() } else { format!("known are: {}", known.join(", ")) };
        let words = Words::new(format!("unknown {kind} {}", Quoted(&written)), &help);
        return Words { unknown: Some(Unknown { name: written, known }), ..words };
    }
    Words::new(message, "")
}

/// serde's ``integer `5` `` is 5, its `map` an object.
fn found_in_json(found: &str) -> String {
    let value = found.split('`').nth(1);
    match found.split_once(' ').map_or(found, |(kind, _)| kind) {
        "map" => "an object".to_owned(),
        "sequence" => "an array".to_owned(),
        "unit" | "null" => "null".to_owned(),
        "string" => {
            let text = found.strip_prefix("string ").unwrap_or_default();
            Quoted(text.trim_matches('"')).to_string()
        }
        _ => value.unwrap_or(found).to_owned(),
    }
}

/// A type, in the words of JSON.
#[must_use]
pub fn expected_in_json(wanted: &str) -> String {
    let words = match wanted {
        "u8" => "a number from 0 to 255",
        "u16" => "a number from 0 to 65535",
        "u32" => "a number from 0 to 4294967295",
        "u64" | "usize" => "a number that is not negative",
        "i32" => "a number from -2147483648 to 2147483647",
        "a nonzero u32" => "a number from 1 to 4294967295",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "an object",
        struct_like if struct_like.starts_with("struct ") => "an object",
        _ => wanted,
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn mistake(text: &str) -> String {
        let error = serde_json::from_str::<Value>(text).unwrap_err();
        let JsonError { line, column, reason, help, .. } = JsonError::new(text.as_bytes(), &error);
        format!("{line}:{column}: {reason}; {}", help.unwrap_or_default())
    }

    #[test]
    fn what_other_notations_allow_is_refused_by_name_and_at_its_place() {
        for (text, wanted) in [
            ("\u{feff}{}", "1:1: the file begins with a byte order mark, which JSON does not allow; save it"),
            ("// a\n{}", "1:1: comments are not JSON; remove it"),
            ("{\n  \"a\": 1, // one\n}", "2:11: comments are not JSON; remove it"),
            ("{ /* a */ }", "1:3: comments are not JSON"),
            ("{} # done", "1:4: comments are not JSON"),
            ("{\n  \"a\": 1,\n}", "2:9: not JSON: a comma after the last entry; remove the comma"),
            ("[1, ]", "1:3: not JSON: a comma after the last entry"),
            ("{'a': 1}", "1:2: not JSON: single quotes; write double quotes"),
            ("{a: 1}", "1:2: not JSON: a key without quotes; write double quotes around it"),
            ("{\"a\": 1GiB}", "1:7: not JSON: a text without quotes; write double quotes around it"),
            ("{\"a\": yes}", "1:7: not JSON: a text without quotes"),
            ("{\"é\": nil}", "1:7: not JSON: a text without quotes"),
        ] {
            let found = mistake(text);
            assert!(found.starts_with(wanted), "{text}\n  {found}\n  {wanted}");
        }
    }

    #[test]
    fn a_mistake_of_syntax_has_no_words_of_a_parser() {
        for (text, wanted) in [
            ("", "1:1: not JSON: the file is empty; "),
            ("{", "1:1: not JSON: the file ends inside an object; close it with }"),
            ("[1", "1:2: not JSON: the file ends inside an array"),
            ("{\"é\": =}", "1:7: not JSON: no value begins here"),
            ("{\"a\" 1}", "1:6: not JSON: no colon after the key"),
            ("{\"a\": 1 \"b\": 2}", "1:9: not JSON: no comma between two entries"),
            ("{\"a\": \"\\d\"}", "not JSON: an unknown escape in a text"),
            ("{\"a\": \"b\nc\"}", "not JSON: a line break or control character in a text"),
            ("{\"a\": \"// b\n\"}", "not JSON: a line break or control character in a text"),
            ("{\"a\": 012}", "not JSON: not a number of JSON"),
            ("{} x", "1:4: not JSON: more text after the end"),
            ("{\"a\":\"\\ud800\"}", "not JSON: an incomplete \\u escape in a text"),
        ] {
            let found = mistake(text);
            assert!(found.contains(wanted), "{text}\n  {found}\n  {wanted}");
            assert!(["EOF", "expected", "ident", "while parsing"].iter().all(|word| !found.contains(word)));
        }
    }

    #[test]
    fn a_value_of_the_wrong_type_is_described_in_the_words_of_json() {
        for (message, wanted) in [
            ("invalid type: integer `5`, expected a string", "found 5, expected a string"),
            (
                "invalid type: string \"a\", expected u32",
                "found \"a\", expected a number from 0 to 4294967295",
            ),
            ("invalid value: integer `-1`, expected u8", "found -1, expected a number from 0 to 255"),
            ("invalid type: map, expected a sequence", "found an object, expected an array"),
            ("invalid type: null, expected struct Offers", "found null, expected an object"),
            ("missing field `name`", "key \"name\" is missing"),
            ("duplicate field `name`", "key \"name\" is written twice"),
            ("unknown field `nmae`, expected one of `name`, `size`", "unknown key \"nmae\""),
            ("unknown variant `x`, expected `a` or `b`", "unknown name \"x\""),
            ("size \"1GB\" has unknown unit \"GB\"", "size \"1GB\" has unknown unit \"GB\""),
        ] {
            assert_eq!(of_type(message).reason, wanted);
        }
        let unknown = of_type("unknown field `nmae`, expected one of `name`, `size`").unknown;
        let known = vec!["name".to_owned(), "size".to_owned()];
        assert_eq!(unknown, Some(Unknown { name: "nmae".to_owned(), known }));
    }

    #[test]
    fn a_value_of_the_wrong_type_is_at_its_first_byte() {
        let text = "{\"a\": [\"b\", 12.5]}";
        let [word, number, list] = ["b", "5", "]"].map(|end| text.rfind(end).unwrap());
        for (last, first) in [(word + 1, 7), (number, 12), (6, 6), (word + 2, 7), (list, list)] {
            assert_eq!(start_of_token(text.as_bytes(), last), first);
        }
    }

    #[test]
    fn the_line_is_shown_with_a_mark() {
        let text = "{\n  \"a\": 1,\n}";
        let error = serde_json::from_str::<Value>(text).unwrap_err();
        assert_eq!(JsonError::new(text.as_bytes(), &error).excerpt, "  2 |   \"a\": 1,\n    |         ^");
        let text = b"{\"a\": \xff}";
        let error = serde_json::from_slice::<Value>(text).unwrap_err();
        assert!(JsonError::new(text, &error).excerpt.contains('\u{fffd}'));
    }
}
