//! A serde data format over [`Node`]: typed values out of a tree, and structured errors with their key.
//!
//! serde's own errors for JSON are sentences. Here they stay values ([`Rule`]), so that a misspelt key can be
//! answered with the nearest right one. An enum is written as an object with a `type` that names the variant, or as
//! that name alone. (serde's `tag` attribute reads the same text, but through a buffer that loses the place.)

use std::collections::btree_map;
use std::fmt::{self, Display};

use egm_address::Quoted;
use egm_report::json::expected_in_json;
use serde::de::value::StrDeserializer;
use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::error::{Fault, Rule};
use super::tree::{Node, Value};

/// The key that names an enum's variant.
const TAG: &str = "type";

/// Reads a `T` from a tree.
pub(super) fn decode<'t, T: Deserialize<'t>>(node: &'t Node) -> Result<T, Fault> {
    T::deserialize(node)
}

impl de::Error for Fault {
    fn custom<T: Display>(message: T) -> Self {
        Rule::Value { reason: message.to_string() }.here()
    }
    fn invalid_type(found: Unexpected<'_>, wanted: &dyn Expected) -> Self {
        Rule::WrongType { found: in_json_words(found), wanted: expected_in_json(&wanted.to_string()) }.here()
    }
    fn invalid_value(found: Unexpected<'_>, wanted: &dyn Expected) -> Self {
        Self::invalid_type(found, wanted)
    }
    fn unknown_variant(name: &str, known: &'static [&'static str]) -> Self {
        Rule::UnknownName { name: name.to_owned(), known: known.to_vec() }.here()
    }
    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Rule::UnknownKey { key: key.to_owned(), known: known.to_vec() }.at(key)
    }
    fn missing_field(key: &'static str) -> Self {
        Rule::MissingKey { key }.here()
    }
}

/// JSON's names for serde's maps, sequences and units, for messages.
fn in_json_words(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Map => "an object".to_owned(),
        Unexpected::Seq => "an array".to_owned(),
        Unexpected::Unit => "null".to_owned(),
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => Quoted(text).to_string(),
        other => other.to_string(),
    }
}

impl Node {
    fn unexpected(&self, wanted: &dyn Expected) -> Fault {
        let found = match &self.value {
            Value::Null | Value::LeftOut => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Number(number) => Unexpected::Float(number.as_f64().unwrap_or(f64::NAN)),
            Value::Text(text) => Unexpected::Str(text),
            Value::Array(_) => Unexpected::Seq,
            Value::Object(_) => Unexpected::Map,
        };
        de::Error::invalid_type(found, wanted)
    }
}

impl<'t> Deserializer<'t> for &'t Node {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.value {
            Value::Null | Value::LeftOut => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => visitor.visit_u64(value),
                (None, Some(value)) => visitor.visit_i64(value),
                (None, None) => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::Array(items) => visitor.visit_seq(Items(items.iter().enumerate())),
            Value::Object(members) => {
                visitor.visit_map(Members { members: members.iter(), skip: None, next: None })
            }
        }
    }

    fn deserialize_option<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    /// The only such type is `Slot`, an entry of a list that may be left out.
    fn deserialize_newtype_struct<V: Visitor<'t>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.value {
            Value::LeftOut => visitor.visit_none(),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_enum<V: Visitor<'t>>(
        self,
        _name: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let name = match &self.value {
            Value::Text(name) => name_of(name, known)?,
            Value::Object(members) => {
                let tag =
                    members.get(TAG).ok_or_else(|| Rule::MissingType { known: known.to_vec() }.here())?;
                let name: &str = Deserialize::deserialize(tag).map_err(|f: Fault| f.inside(TAG))?;
                name_of(name, known).map_err(|f| f.inside(TAG))?
            }
            _ => return Err(self.unexpected(&"a name, or an object with a \"type\"")),
        };
        visitor.visit_enum(Variant { name, node: self })
    }

    /// serde would also take an array, of the fields in order.
    fn deserialize_struct<V: Visitor<'t>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.value {
            Value::Object(_) => self.deserialize_any(visitor),
            _ => Err(self.unexpected(&visitor)),
        }
    }

    forward_to_deserialize_any! {
        <W: Visitor<'t>>
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map identifier ignored_any
    }
}

fn name_of<'n>(name: &'n str, known: &'static [&'static str]) -> Result<&'n str, Fault> {
    if known.contains(&name) { Ok(name) } else { Err(de::Error::unknown_variant(name, known)) }
}

struct Items<'t>(std::iter::Enumerate<std::slice::Iter<'t, Node>>);

impl<'t> SeqAccess<'t> for Items<'t> {
    type Error = Fault;
    fn next_element_seed<T: DeserializeSeed<'t>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some((index, node)) = self.0.next() else { return Ok(None) };
        seed.deserialize(node).map(Some).map_err(|fault| fault.inside(&format!("[{index}]")))
    }
}

struct Members<'t> {
    members: btree_map::Iter<'t, String, Node>,
    skip: Option<&'static str>,
    next: Option<(&'t str, &'t Node)>,
}

impl<'t> MapAccess<'t> for Members<'t> {
    type Error = Fault;
    fn next_key_seed<K: DeserializeSeed<'t>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let skip = self.skip;
        self.next =
            self.members.find(|(key, _)| Some(key.as_str()) != skip).map(|(key, node)| (key.as_str(), node));
        let Some((key, _)) = self.next else { return Ok(None) };
        let key: StrDeserializer<'t, Fault> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }
    fn next_value_seed<T: DeserializeSeed<'t>>(&mut self, seed: T) -> Result<T::Value, Fault> {
        let (key, node) =
            self.next.take().ok_or_else(|| de::Error::custom("a value was read before its key"))?;
        seed.deserialize(node).map_err(|fault| fault.inside(key))
    }
}

struct Variant<'t> {
    name: &'t str,
    node: &'t Node,
}

impl<'t> EnumAccess<'t> for Variant<'t> {
    type Error = Fault;
    type Variant = Self;
    fn variant_seed<T: DeserializeSeed<'t>>(self, seed: T) -> Result<(T::Value, Self), Fault> {
        let name: StrDeserializer<'t, Fault> = self.name.into_deserializer();
        Ok((seed.deserialize(name)?, self))
    }
}

impl<'t> VariantAccess<'t> for Variant<'t> {
    type Error = Fault;
    fn unit_variant(self) -> Result<(), Fault> {
        self.struct_variant(&[], Nothing)
    }
    fn struct_variant<V: Visitor<'t>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let members = match &self.node.value {
            Value::Object(members) => members.iter(),
            _ => btree_map::Iter::default(), // the name alone
        };
        visitor.visit_map(Members { members, skip: Some(TAG), next: None }).map_err(|mut fault| {
            // The tag is a key as well, but serde does not know it.
            if let Rule::UnknownKey { key, known } = &mut *fault.rule
                && *key == fault.key
            {
                known.push(TAG);
            }
            fault
        })
    }
    fn newtype_variant_seed<T: DeserializeSeed<'t>>(self, _seed: T) -> Result<T::Value, Fault> {
        Err(de::Error::invalid_type(Unexpected::NewtypeVariant, &"a variant with named fields"))
    }
    fn tuple_variant<V: Visitor<'t>>(self, _len: usize, visitor: V) -> Result<V::Value, Fault> {
        Err(de::Error::invalid_type(Unexpected::TupleVariant, &visitor))
    }
}

/// A variant without fields: an object with nothing but the tag.
struct Nothing;
impl<'t> Visitor<'t> for Nothing {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no further keys")
    }
    fn visit_map<A: MapAccess<'t>>(self, mut map: A) -> Result<(), A::Error> {
        match map.next_key::<String>()? {
            Some(key) => Err(de::Error::unknown_field(&key, &[])),
            None => Ok(()),
        }
    }
}
