//! Terminal control sequences in recorded hosts, and a look at output for them.

use std::process::Output;

use serde_json::Value;

/// A control sequence in both encodings that terminals support.
pub(crate) const ESCAPE: &str = "\u{1b}[2J\u{9b}31m";

/// Whether the output has no control characters but the ends of lines, and has the text, escaped.
#[track_caller]
pub(crate) fn shows(output: &Output, what: &str) -> bool {
    let mut shown = false;
    for bytes in [&output.stdout, &output.stderr] {
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{what}: {text:?}");
        shown |= text.contains("u{1b}");
    }
    assert!(matches!(output.status.code(), Some(0 | 2 | 3)), "{what}: {output:?}");
    shown
}

/// Places of strings in `value`; positions in lists are left out, so that one place stands for all elements.
pub(crate) fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::String(_) if !found.iter().any(|place| place == at) => found.push(at.to_owned()),
        Value::Array(all) => all.iter().for_each(|one| places(one, at, found)),
        Value::Object(all) => all.iter().for_each(|(key, one)| places(one, &format!("{at}.{key}"), found)),
        _ => {}
    }
}

/// Appends [`ESCAPE`] to the strings at `place`.
pub(crate) fn append(value: &mut Value, at: &str, place: &str) {
    match value {
        Value::String(string) if at == place => string.push_str(ESCAPE),
        Value::Array(all) => all.iter_mut().for_each(|one| append(one, at, place)),
        Value::Object(all) => {
            all.iter_mut().for_each(|(key, one)| append(one, &format!("{at}.{key}"), place));
        }
        _ => {}
    }
}
