//! JSON Schema of texts that are parsed further, and of numbers and lists with limits.
//!
//! An editor knows the schema alone, so each form and range that a description names is stated here too. The rules over
//! several keys are in the code only.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

/// Declares types that exist for their schema.
macro_rules! schemas {
    ($($(#[$doc:meta])* $name:ident: $schema:tt)*) => {$(
        $(#[$doc])*
        pub(super) enum $name {}

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
    /// A number of bytes, `64GiB`; 0 stands for none.
    SizeText: { "anyOf": [
        { "type": "string", "pattern": "^[0-9]+ *([KMGT](iB)?|B)?$", "examples": ["64GiB"] },
        { "type": "integer", "minimum": 0, "maximum": 4503599627370496u64 },
    ] }
    /// A number of bytes that is not 0.
    SomeSizeText: { "anyOf": [
        { "type": "string", "pattern": "^0*[1-9][0-9]* *([KMGT](iB)?|B)?$", "examples": ["64GiB"] },
        { "type": "integer", "minimum": 1, "maximum": 4503599627370496u64 },
    ] }
    /// A name: 1 to 64 of A-Z a-z 0-9 . _ -.
    NameText: { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" }
    /// A region by name or kind, or a list of them.
    RegionText: { "anyOf": [
        { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" },
        {
            "type": "array",
            "items": { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" },
            "minItems": 1,
            "maxItems": 16,
            "uniqueItems": true,
        },
    ] }
    /// A path, without control characters.
    PathText: { "type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]+$", "maxLength": 4095 }
    /// A path of a Unix socket.
    SocketText: { "type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]+$", "maxLength": 107 }
    /// Words of a kernel command line.
    CmdlineText: { "type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$", "maxLength": 2047 }
    /// A list of processor or node numbers, `0-3,8`.
    CpuListText: {
        "type": "string",
        "pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$",
        "examples": ["0-3,8"],
    }
    /// Distances by the number of the other node; 10 is the node's own.
    DistancesText: {
        "type": "object",
        "propertyNames": { "pattern": "^[0-9]+$" },
        "additionalProperties": { "type": "integer", "minimum": 10, "maximum": 254 },
    }
    /// A PCI function, `0009:01:00.0`.
    PciText: {
        "type": "string",
        "pattern": "^([0-9a-fA-F]{1,4}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\\.[0-7]$",
        "examples": ["0009:01:00.0"],
    }
    TapText: { "type": "string", "pattern": "^[^ /:\\u0000-\\u001f\\u007f-\\u009f]{1,15}$" }
    /// A unicast hardware address.
    MacText: {
        "type": "string",
        "pattern": "^[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}$",
        "examples": ["52:54:00:12:34:56"],
    }
    CliqueText: { "type": "string", "enum": ["auto", "off"] }
    BarsText: { "type": "string", "enum": ["guest", "host"] }
    /// `host` or an address, `0x200000000000`, by register number.
    BarPlacesText: {
        "type": "object",
        "propertyNames": { "pattern": "^[0-5]$" },
        "additionalProperties": {
            "type": "string",
            "pattern": "^(host|0x[0-9a-fA-F]{1,16})$",
            "examples": ["host", "0x200000000000"],
        },
    }
}

/// Adds to an enum with `type` tags the names that may stand alone: those of variants without fields.
pub(super) fn name_alone_too(schema: &mut Schema) {
    let Some(forms) = schema.get_mut("oneOf").and_then(|forms| forms.as_array_mut()) else { return };
    let alone = |form: &serde_json::Value| {
        let properties = form.get("properties")?.as_object()?;
        let name = properties.get("type")?.get("const")?.clone();
        (properties.len() == 1).then_some(name)
    };
    let names: Vec<serde_json::Value> = forms.iter().filter_map(alone).collect();
    forms.push(serde_json::json!({ "type": "string", "enum": names }));
}

#[cfg(test)]
mod tests;
