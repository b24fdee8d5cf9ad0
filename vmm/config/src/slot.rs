//! An entry of a list, which may be left out because it is wrong.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize};

/// An entry; `None` when it was left out, so that the entries after it keep their numbers.
#[derive(Debug, Serialize)]
pub struct Slot<T>(pub(super) Option<T>);

impl<T> Slot<T> {
    /// A slot with `entry` in it.
    pub const fn new(entry: T) -> Self {
        Self(Some(entry))
    }

    /// The entry, unless it was left out.
    pub fn into_entry(self) -> Option<T> {
        self.0
    }

    pub(super) const fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Slot<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct("Slot", OrNone(PhantomData))
    }
}

struct OrNone<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OrNone<T> {
    type Value = Slot<T>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an entry")
    }
    fn visit_none<E: Error>(self) -> Result<Slot<T>, E> {
        Ok(Slot(None))
    }
    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Slot<T>, D::Error> {
        T::deserialize(deserializer).map(|entry| Slot(Some(entry)))
    }
}
