//! Values of a configuration that have several forms: a text or a list, a name or a number, a name or an object.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

use super::file::{AffinityFile, BarsFile, CliqueFile};

impl<'de> Deserialize<'de> for AffinityFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrEach;
        impl<'de> Visitor<'de> for OneOrEach {
            type Value = AffinityFile;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a CPU list such as \"0-3,8\", or an array of them")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<AffinityFile, E> {
                text.parse().map(AffinityFile::All).map_err(E::custom)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, lists: A) -> Result<AffinityFile, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(lists)).map(AffinityFile::Each)
            }
        }
        deserializer.deserialize_any(OneOrEach)
    }
}

impl<'de> Deserialize<'de> for CliqueFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrNumber;
        impl Visitor<'_> for NameOrNumber {
            type Value = CliqueFile;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", \"off\" or a number from 0 to 15")
            }
            fn visit_str<E>(self, text: &str) -> Result<CliqueFile, E> {
                Ok(CliqueFile::Name(text.to_owned()))
            }
            fn visit_u64<E>(self, number: u64) -> Result<CliqueFile, E> {
                Ok(CliqueFile::Number(number))
            }
        }
        deserializer.deserialize_any(NameOrNumber)
    }
}

impl<'de> Deserialize<'de> for BarsFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AllOrEach;
        impl<'de> Visitor<'de> for AllOrEach {
            type Value = BarsFile;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"guest\", \"host\", or an object such as { \"2\": \"host\" }")
            }
            fn visit_str<E>(self, text: &str) -> Result<BarsFile, E> {
                Ok(BarsFile::All(text.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, places: A) -> Result<BarsFile, A::Error> {
                BTreeMap::deserialize(MapAccessDeserializer::new(places)).map(BarsFile::Each)
            }
        }
        deserializer.deserialize_any(AllOrEach)
    }
}
