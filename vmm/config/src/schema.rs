//! JSON Schema of texts that are parsed further.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

/// A number of bytes, `64GiB`.
pub(super) enum SizeText {}
/// A list of processor or node numbers, `0-3,8`.
pub(super) enum CpuListText {}
/// A PCI function, `0009:01:00.0`.
pub(super) enum PciText {}
/// `auto` or `off`.
pub(super) enum CliqueText {}
/// `guest` or `host`.
pub(super) enum BarsText {}
/// `host` or an address, `0x200000000000`.
pub(super) enum BarPlaceText {}

impl JsonSchema for SizeText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [
            { "type": "string", "pattern": "^[0-9]+ *([KMGT](iB)?|B)?$", "examples": ["64GiB"] },
            { "type": "integer", "minimum": 0 },
        ] })
    }
}

impl JsonSchema for CpuListText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "CpuList".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$",
            "examples": ["0-3,8"],
        })
    }
}

impl JsonSchema for PciText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "PciFunction".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": "^([0-9a-fA-F]{1,4}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\\.[0-7]$",
            "examples": ["0009:01:00.0"],
        })
    }
}

impl JsonSchema for CliqueText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Clique".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": ["auto", "off"] })
    }
}

impl JsonSchema for BarsText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Bars".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": ["guest", "host"] })
    }
}

impl JsonSchema for BarPlaceText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "BarPlace".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": "^(host|0x[0-9a-fA-F]{1,16})$",
            "examples": ["host", "0x200000000000"],
        })
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
