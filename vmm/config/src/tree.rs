//! JSON text as a tree; every node has the place where it was written.
//!
//! serde_json gives positions only while it reads, and a derived type forgets them. A rule that fails later,
//! perhaps over values from two files, must still point at a line. So the text becomes a tree first, `extends`
//! merges trees, and the typed form is read from the result.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use egm_report::json::JsonError;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

use super::error::Rule;
use super::faults::MOST;

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

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    Array(Vec<Node>),
    Object(BTreeMap<String, Node>),
    /// An entry of a list that is wrong, and left out so that the rest can be read.
    LeftOut,
}

/// A broken rule, and where.
#[derive(Debug)]
pub(super) struct Marked {
    pub(super) mark: Mark,
    pub(super) rule: Rule,
}

impl Node {
    /// Reads `text`, which is file number `source`. Keys that are written twice count as the first, and go to `twice`.
    pub(super) fn parse(text: &str, source: usize, twice: &mut Vec<Marked>) -> Result<Self, Marked> {
        let raw: &RawValue = serde_json::from_str(text).map_err(|e| {
            // Skipping over a value finds the same mistakes as reading it, but reports them in less detail.
            let e = serde_json::from_str::<serde_json::Value>(text).err().unwrap_or(e);
            syntax(text, &e, Mark { source, offset: 0 })
        })?;
        Reader { text, source, twice }.node(raw, MAX_DEPTH)
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
        let (step, rest) = first_step(key);
        self.child(step).map_or(self, |node| node.nearest(rest))
    }

    /// Whether the key `key` was written.
    pub(super) fn has(&self, key: &str) -> bool {
        let (step, rest) = first_step(key);
        key.is_empty() || self.child(step).is_some_and(|node| node.has(rest))
    }

    fn child(&self, step: Step<'_>) -> Option<&Self> {
        match (&self.value, step) {
            (Value::Array(items), Step::Index(index)) => items.get(index),
            (Value::Object(members), Step::Key(name)) => members.get(name),
            _ => None,
        }
    }

    /// Leaves out the value of `key`: an object's member, an entry of one of the lists `with_gaps`, or the whole list around
    /// another entry. Returns the key of what is left out; `None` when there is no such value, or nothing around it.
    pub(super) fn leave_out(&mut self, key: &str, with_gaps: &[&str]) -> Option<String> {
        let (list, last) = match key.strip_suffix(']').and_then(|start| start.rsplit_once('[')) {
            Some((list, index)) => (list, Step::Index(index.parse().ok()?)),
            None => {
                key.rsplit_once('.').map_or(("", Step::Key(key)), |(object, name)| (object, Step::Key(name)))
            }
        };
        match last {
            Step::Index(_) if !with_gaps.contains(&list) => return self.leave_out(list, with_gaps),
            Step::Index(index) => match &mut self.exactly(list)?.value {
                Value::Array(items) => items.get_mut(index)?.value = Value::LeftOut,
                _ => return None,
            },
            Step::Key(name) => match &mut self.exactly(list)?.value {
                Value::Object(members) => drop(members.remove(name)?),
                _ => return None,
            },
        }
        Some(key.to_owned())
    }

    /// The node that `key` names.
    fn exactly(&mut self, key: &str) -> Option<&mut Self> {
        if key.is_empty() {
            return Some(self);
        }
        let (step, rest) = first_step(key);
        let child = match (&mut self.value, step) {
            (Value::Array(items), Step::Index(index)) => items.get_mut(index),
            (Value::Object(members), Step::Key(name)) => members.get_mut(name),
            _ => None,
        };
        child?.exactly(rest)
    }
}

/// One step of a key such as `memory.nodes[1].size`.
#[derive(Debug, Clone, Copy)]
enum Step<'k> {
    Key(&'k str),
    Index(usize),
}

/// The first step of `key`, and the rest.
fn first_step(key: &str) -> (Step<'_>, &str) {
    let index = key.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (step, rest) = match index.and_then(|(index, rest)| Some((index.parse().ok()?, rest))) {
        Some((index, rest)) => (Step::Index(index), rest),
        None => {
            let (name, rest) = key.split_at(key.find(['.', '[']).unwrap_or(key.len()));
            (Step::Key(name), rest)
        }
    };
    (step, rest.strip_prefix('.').unwrap_or(rest))
}

/// The mistake that serde_json found in `text`, which begins at `start`.
fn syntax(text: &str, error: &serde_json::Error, start: Mark) -> Marked {
    let JsonError { offset, reason, help, .. } = JsonError::new(text.as_bytes(), error);
    let mark = Mark { offset: start.offset.saturating_add(offset), ..start };
    Marked { mark, rule: Rule::Syntax { reason, help } }
}

struct Reader<'t, 'f> {
    text: &'t str,
    source: usize,
    twice: &'f mut Vec<Marked>,
}

impl<'t> Reader<'t, '_> {
    /// Where `raw` lies: it borrows from the text, so its offset is a difference of addresses.
    fn mark(&self, raw: &RawValue) -> Mark {
        let offset = raw.get().as_ptr().addr().saturating_sub(self.text.as_ptr().addr());
        Mark { source: self.source, offset }
    }

    fn node(&mut self, raw: &'t RawValue, depth: usize) -> Result<Node, Marked> {
        let mark = self.mark(raw);
        let rule = Rule::TooDeep { limit: MAX_DEPTH };
        let depth = depth.checked_sub(1).ok_or(Marked { mark, rule })?;
        let wrong = |e: serde_json::Error| syntax(raw.get(), &e, mark);
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
        &mut self,
        members: Vec<(&'t RawValue, &'t RawValue)>,
        depth: usize,
    ) -> Result<BTreeMap<String, Node>, Marked> {
        let mut object = BTreeMap::new();
        for (raw_key, raw) in members {
            let mark = self.mark(raw_key);
            let key: String =
                serde_json::from_str(raw_key.get()).map_err(|e| syntax(raw_key.get(), &e, mark))?;
            let node = Node { mark, ..self.node(raw, depth)? };
            match object.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(node);
                }
                Entry::Occupied(first) => {
                    let rule = Rule::DuplicateKey { key: first.key().clone() };
                    if self.twice.len() < MOST {
                        self.twice.push(Marked { mark, rule });
                    }
                }
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
