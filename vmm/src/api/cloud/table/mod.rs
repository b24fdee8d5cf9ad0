//! The table: what becomes of each field. Its texts are the messages about a document, and the page
//! `docs/cloud-hypervisor-api.md`.

mod devices;
mod machine;

use serde_json::Value;

/// What becomes of a field.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// The field: `disks[].path`. The row of a derived or refused object or list stands for all fields inside.
    pub(super) path: &'static str,
    pub(super) fate: Fate,
    /// Its meaning here; empty for a refused field.
    pub(super) means: &'static str,
    /// "cannot VERB OBJECT: REASON", of refused values; empty where only our own rules refuse some.
    pub(super) refuses: &'static str,
    pub(super) help: &'static str,
}

/// What becomes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is the value of this key of our file.
    Honoured(&'static str),
    /// The plan, or the host, decides; a value that is not the usual one is noted.
    Derived(Usual),
    /// A value that is not the usual one is refused.
    Refused(Usual),
}

/// The values that are neither noted nor refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Usual {
    Nothing,
    Flag(bool),
    Number(u64),
    Words(&'static [&'static str]),
    /// Those that the translation recognises by other fields.
    Judged,
}

impl Usual {
    /// Whether `value` is one of them.
    pub(super) fn has(self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) | (Self::Judged, _) => true,
            (Self::Nothing, Value::Array(items)) => items.is_empty(),
            (Self::Flag(usual), Value::Bool(flag)) => usual == *flag,
            (Self::Number(usual), Value::Number(number)) => number.as_u64() == Some(usual),
            (Self::Words(usual), Value::String(word)) => usual.contains(&word.as_str()),
            _ => false,
        }
    }
}

const fn honoured(path: &'static str, key: &'static str, means: &'static str) -> Row {
    Row { path, fate: Fate::Honoured(key), means, refuses: "", help: "" }
}

const fn derived(path: &'static str, usual: Usual, means: &'static str) -> Row {
    Row { path, fate: Fate::Derived(usual), means, refuses: "", help: "" }
}

const fn refused(path: &'static str, usual: Usual, refuses: &'static str, help: &'static str) -> Row {
    Row { path, fate: Fate::Refused(usual), means: "", refuses, help }
}

impl Row {
    /// The row of a field of which the translation refuses some values.
    const fn but(self, refuses: &'static str, help: &'static str) -> Self {
        Self { refuses, help, ..self }
    }
}

/// Parts of the document with their rows, in the order of the page.
pub(super) const PARTS: &[(&str, &[&[Row]])] =
    &[("The machine", machine::ROWS), ("Memory and nodes", machine::MEMORY), ("Devices", devices::ROWS)];

pub(super) fn rows() -> impl Iterator<Item = &'static Row> {
    PARTS.iter().flat_map(|(_, groups)| groups.iter().copied().flatten())
}

/// `disks[3].path` as `disks[].path`.
pub(super) fn pattern(key: &str) -> String {
    let mut steps = key.split('[');
    let first = steps.next().unwrap_or_default().to_owned();
    steps.fold(first, |pattern, step| {
        format!("{pattern}[{}", step.trim_start_matches(|c: char| c.is_ascii_digit()))
    })
}

/// The row of the field `path`, which may have indices.
pub(super) fn row(path: &str) -> Option<&'static Row> {
    let pattern = pattern(path);
    rows().find(|row| row.path == pattern)
}

/// The values of the field `path` in `document`, each with its own path.
pub(super) fn values<'v>(document: &'v Value, path: &str) -> Vec<(String, &'v Value)> {
    let start = vec![(String::new(), document)];
    path.split('.').fold(start, |found, step| {
        found.into_iter().flat_map(|(at, value)| inside(&at, value, step)).collect()
    })
}

/// The values of the member `step` (`disks[]`, `path`) of the object `value`, which is at `at`.
fn inside<'v>(at: &str, value: &'v Value, step: &str) -> Vec<(String, &'v Value)> {
    let name = step.trim_end_matches("[]");
    let dot = if at.is_empty() { "" } else { "." };
    let at = format!("{at}{dot}{name}");
    match value.get(name) {
        Some(Value::Array(items)) if name != step => {
            items.iter().enumerate().map(|(index, item)| (format!("{at}[{index}]"), item)).collect()
        }
        Some(value) if name == step => vec![(at, value)],
        _ => Vec::new(),
    }
}
