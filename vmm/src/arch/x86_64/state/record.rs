//! Structures of KVM in a file: arrays of bytes, each as long as its structure.
//!
//! The bindings accept shorter and longer arrays too, and fill or cut them.

use serde::Deserialize;
use serde::de::value::BytesDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Error};

/// A structure of exactly its size.
pub(super) fn exact<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: DeserializeOwned,
    D: Deserializer<'de>,
{
    structure(&Vec::deserialize(deserializer)?)
}

/// A large structure of exactly its size.
pub(super) fn boxed<'de, T, D>(deserializer: D) -> Result<Box<T>, D::Error>
where
    T: DeserializeOwned,
    D: Deserializer<'de>,
{
    exact(deserializer).map(Box::new)
}

/// A structure of exactly its size, or null.
pub(super) fn exact_or_none<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: DeserializeOwned,
    D: Deserializer<'de>,
{
    let bytes: Option<Vec<u8>> = Option::deserialize(deserializer)?;
    bytes.map(|bytes| structure(&bytes)).transpose()
}

fn structure<T: DeserializeOwned, E: Error>(bytes: &[u8]) -> Result<T, E> {
    if bytes.len() != size_of::<T>() {
        let expected = format!("{} bytes", size_of::<T>());
        return Err(E::invalid_length(bytes.len(), &expected.as_str()));
    }
    T::deserialize(BytesDeserializer::new(bytes))
}
