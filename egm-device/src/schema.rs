//! JSON Schema of this program's files: the forms of texts that are parsed further.
//!
//! Each file's own module has its schema; the doc comments of its keys are the descriptions.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

/// The schema of `T` as text that ends in a newline.
pub(crate) fn text<T: JsonSchema>() -> String {
    format!("{:#}\n", schemars::schema_for!(T).as_value())
}

/// Declares types that exist for their schema.
macro_rules! schemas {
    ($($(#[$doc:meta])* $name:ident: $schema:tt)*) => {$(
        $(#[$doc])*
        pub(crate) enum $name {}

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    )*};
}

schemas! {
    /// A number of bytes, `64GiB`.
    SizeText: { "anyOf": [
        { "type": "string", "pattern": "^[0-9]+ *([KMGT](iB)?|B)?$", "examples": ["64GiB"] },
        { "type": "integer", "minimum": 0 },
    ] }
    /// A number of bytes that is not 0.
    SomeSizeText: { "anyOf": [
        { "type": "string", "pattern": "^0*[1-9][0-9]* *([KMGT](iB)?|B)?$", "examples": ["64GiB"] },
        { "type": "integer", "minimum": 1 },
    ] }
    /// A name: 1 to 64 of A-Z a-z 0-9 . _ -.
    NameText: { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" }
    /// Names, at least one.
    NamesText: {
        "type": "array",
        "items": { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" },
        "minItems": 1,
    }
    /// A user or group.
    NameOrNumberText: { "anyOf": [
        { "type": "integer", "minimum": 0, "maximum": 4294967295u32 },
        { "type": "string" },
    ] }
    /// A host physical address.
    AddressText: { "type": "string", "pattern": "^0x[0-9a-fA-F]{1,16}$", "examples": ["0x880000000"] }
    /// A PCI identity: vendor and device.
    IdText: { "type": "string", "pattern": "^[0-9a-fA-F]{4}:[0-9a-fA-F]{4}$", "examples": ["1234:0001"] }
    /// A PCI function, `0009:01:00.0`.
    PciText: {
        "type": "string",
        "pattern": "^([0-9a-fA-F]{1,4}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\\.[0-7]$",
        "examples": ["0009:01:00.0"],
    }
}
