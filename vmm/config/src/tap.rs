//! The host's side of a network interface: a tap, by its name or by descriptors.

use std::fmt;

use schemars::JsonSchema;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::error::{Rule, at_most, in_range};
use super::rules::{DeviceRule, MAX_TAP};
use super::schema::TapText;

/// More pairs than this have no vCPU to serve them on known machines.
const MAX_QUEUE_PAIRS: u16 = 16;
/// Descriptors below are standard input, output and error.
pub(super) const FIRST_DESCRIPTOR: u64 = 3;
const LAST_DESCRIPTOR: u64 = 0x7fff_ffff;

/// The host's side of an interface.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum TapFile {
    /// A tap interface that exists.
    Name(#[schemars(with = "TapText")] String),
    /// Numbers of inherited descriptors of a tap, one for each queue pair: 3 to 2147483647.
    Descriptors(#[schemars(length(min = 1, max = 16), inner(range(min = 3, max = 2_147_483_647)))] Vec<u64>),
}

impl<'de> Deserialize<'de> for TapFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrDescriptors;
        impl<'de> Visitor<'de> for NameOrDescriptors {
            type Value = TapFile;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a tap interface, or an array of descriptors such as [3]")
            }
            fn visit_str<E>(self, text: &str) -> Result<TapFile, E> {
                Ok(TapFile::Name(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, numbers: A) -> Result<TapFile, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(numbers)).map(TapFile::Descriptors)
            }
        }
        deserializer.deserialize_any(NameOrDescriptors)
    }
}

/// The host's side of a virtio network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Tap {
    /// Name of a tap interface, 1 to 15 bytes.
    Name(String),
    /// Numbers of descriptors of a tap in this process, one for each queue pair.
    Descriptors(Vec<i32>),
}

impl fmt::Display for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Descriptors(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(i32::to_string).collect();
                write!(f, "by descriptor {}", numbers.join(", "))
            }
        }
    }
}

impl TapFile {
    /// The tap, with values that a tap can have.
    ///
    /// # Errors
    /// [`DeviceRule::Tap`], [`Rule::EmptyList`], [`Rule::TooMany`] and [`Rule::Range`].
    pub(super) fn resolve(self) -> Result<Tap, Rule> {
        match self {
            Self::Name(name) => interface(name).map(Tap::Name),
            Self::Descriptors(numbers) if numbers.is_empty() => Err(Rule::EmptyList),
            Self::Descriptors(numbers) => {
                at_most(numbers.len(), MAX_QUEUE_PAIRS.into())?;
                let number = |number| in_range(number, FIRST_DESCRIPTOR, LAST_DESCRIPTOR);
                let numbers = numbers.into_iter().map(number).collect::<Result<Vec<u64>, Rule>>()?;
                Ok(Tap::Descriptors(
                    numbers.into_iter().filter_map(|number| i32::try_from(number).ok()).collect(),
                ))
            }
        }
    }
}

/// The number of queue pairs: as written, or else one for each descriptor of `tap`.
pub(super) fn queue_pairs_over(written: Option<u16>, tap: Option<&Tap>) -> Result<u16, Rule> {
    let descriptors = match tap {
        Some(Tap::Descriptors(numbers)) => Some(numbers.len()),
        _ => None,
    };
    match (written, descriptors) {
        (Some(pairs), Some(count)) if usize::from(pairs) != count => {
            Err(DeviceRule::Descriptors { count, pairs }.into())
        }
        (Some(pairs), _) => in_range(pairs, 1, MAX_QUEUE_PAIRS),
        (None, count) => Ok(count.and_then(|count| u16::try_from(count).ok()).unwrap_or(1)),
    }
}

/// As the kernel's `dev_valid_name`.
fn interface(tap: String) -> Result<String, Rule> {
    let good = (1..=MAX_TAP).contains(&tap.len())
        && tap != "."
        && tap != ".."
        && !tap.contains(|c: char| c.is_control() || matches!(c, ' ' | '/' | ':'));
    if good { Ok(tap) } else { Err(DeviceRule::Tap { tap }.into()) }
}
