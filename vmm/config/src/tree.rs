//! JSON text as a tree; every node has the place where it was written.
//!
//! serde_json gives positions only while it reads, and a derived type forgets them. A rule that fails later,
//! perhaps over values from two files, must still point at a line. So the text becomes a tree first, `extends`
//! merges trees, and the typed form is read from the result.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

use super::error::Rule;

/// Objects and arrays may be nested this deep; the deepest key that has a meaning is at 5.
const MAX_DEPTH: usize = 16;

/// Position of a value in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    /// Index of the file among those that were read.
    pub(super) source: usize,
    /// Byte offset in it.
    pub(super) offset: usize,
}

/// A value and where it was written: at its key in an object, otherwise at its first byte.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub(super) mark: Mark,
    pub(super) value: Value,
}

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    Array(Vec<Node>),
    Object(BTreeMap<String, Node>),
}

impl Node {
    /// Reads `text`, which is file number `source`.
    pub(super) fn parse(text: &str, source: usize) -> Result<Self, (Mark, Rule)> {
        let raw: &RawValue = serde_json::from_str(text).map_err(|e| {
            // Skipping over a value finds the same mistakes as reading it, but reports them in less detail.
            let e = serde_json::from_str::<serde_json::Value>(text).err().unwrap_or(e);
            let offset = offset_of(text, e.line(), e.column());
            (Mark { source, offset }, syntax(&e))
        })?;
        Reader { text, source }.node(raw, MAX_DEPTH)
    }

    /// `over`, with the keys that it leaves out from `self`. Only objects are merged.
    pub(super) fn overlaid(self, over: Self) -> Self {
        match (self.value, over.value) {
            (Value::Object(mut base), Value::Object(over_members)) => {
                for (key, node) in over_members {
                    let merged = match base.remove(&key) {
                        Some(old) => old.overlaid(node),
                        None => node,
                    };
                    base.insert(key, merged);
                }
                Self { mark: over.mark, value: Value::Object(base) }
            }
            (_, value) => Self { mark: over.mark, value },
        }
    }

    /// The node that a key such as `memory.nodes[1].size` names, or the nearest one above it that was written.
    pub(super) fn nearest(&self, key: &str) -> &Self {
        let (step, rest) = match key.strip_prefix('[').and_then(|k| k.split_once(']')) {
            Some((index, rest)) => (Err(index.parse::<usize>()), rest),
            None => {
                let end = key.find(['.', '[']).unwrap_or(key.len());
                let (name, rest) = key.split_at(end);
                (Ok(name), rest)
            }
        };
        let child = match (&self.value, step) {
            (Value::Array(items), Err(Ok(index))) => items.get(index),
            (Value::Object(members), Ok(name)) => members.get(name),
            _ => None,
        };
        child.map_or(self, |node| node.nearest(rest.strip_prefix('.').unwrap_or(rest)))
    }
}

/// serde_json's message without the position, which is printed before it.
fn syntax(error: &serde_json::Error) -> Rule {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    Rule::Syntax { reason: text.chars().take(end).collect() }
}

/// Byte offset of a serde_json position: lines from 1, columns in bytes, of the byte read last.
fn offset_of(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    start.saturating_add(column.saturating_sub(1)).min(text.len())
}

/// Line and column, from 1, of the byte at `offset`; columns are counted in characters.
pub(super) fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let mut end = offset.min(text.len());
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    let before = text.get(..end).unwrap_or_default();
    let line = before.bytes().filter(|b| *b == b'\n').count();
    let column = before.chars().rev().take_while(|c| *c != '\n').count();
    (line.saturating_add(1), column.saturating_add(1))
}

struct Reader<'t> {
    text: &'t str,
    source: usize,
}

impl<'t> Reader<'t> {
    /// Where `raw` lies: it borrows from the text, so its offset is a difference of addresses.
    fn mark(&self, raw: &RawValue) -> Mark {
        let offset = raw.get().as_ptr().addr().saturating_sub(self.text.as_ptr().addr());
        Mark { source: self.source, offset }
    }

    fn node(&self, raw: &'t RawValue, depth: usize) -> Result<Node, (Mark, Rule)> {
        let mark = self.mark(raw);
        let depth = depth.checked_sub(1).ok_or((mark, Rule::TooDeep { limit: MAX_DEPTH }))?;
        let wrong = |e: serde_json::Error| (mark, syntax(&e));
        let value = match raw.get().as_bytes().first() {
            Some(b'{') => {
                let Members(members) = serde_json::from_str(raw.get()).map_err(wrong)?;
                Value::Object(self.object(members, depth)?)
            }
            Some(b'[') => {
                let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(wrong)?;
                Value::Array(items.into_iter().map(|item| self.node(item, depth)).collect::<Result<_, _>>()?)
            }
            Some(b'"') => Value::Text(serde_json::from_str(raw.get()).map_err(wrong)?),
            Some(b't' | b'f') => Value::Bool(serde_json::from_str(raw.get()).map_err(wrong)?),
            Some(b'n') => Value::Null,
            _ => Value::Number(serde_json::from_str(raw.get()).map_err(wrong)?),
        };
        Ok(Node { mark, value })
    }

    fn object(
        &self,
        members: Vec<(&'t RawValue, &'t RawValue)>,
        depth: usize,
    ) -> Result<BTreeMap<String, Node>, (Mark, Rule)> {
        let mut object = BTreeMap::new();
        for (raw_key, raw) in members {
            let mark = self.mark(raw_key);
            let key: String = serde_json::from_str(raw_key.get()).map_err(|e| (mark, syntax(&e)))?;
            let node = Node { mark, ..self.node(raw, depth)? };
            if object.insert(key.clone(), node).is_some() {
                return Err((mark, Rule::DuplicateKey { key }));
            }
        }
        Ok(object)
    }
}

/// The members of an object in the order written, duplicates included, still as text.
struct Members<'t>(Vec<(&'t RawValue, &'t RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}
