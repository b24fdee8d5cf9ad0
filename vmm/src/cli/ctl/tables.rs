//! Answers of the API as tables.

use egm_report::show::{Side, Table, size};
use serde_json::Value;

/// A text without quotes, or another value as JSON.
pub(super) fn cell(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(super) fn fields(value: &Value) -> Table<'static> {
    let mut table = Table::new(&[Side::Left, Side::Left], &["field", "value"]);
    for (field, value) in value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        table.row(None, vec![field.clone(), cell(value)]);
    }
    table
}

pub(super) fn plugged(value: &Value) -> Table<'static> {
    let mut table = Table::new(&[Side::Left, Side::Left], &["field", "value"]);
    for field in ["id", "slot", "address"] {
        table.row(None, vec![field.to_owned(), cell(&value[field])]);
    }
    for field in ["region", "offset"] {
        if !value[field].is_null() {
            table.row(None, vec![field.to_owned(), cell(&value[field])]);
        }
    }
    for bar in value["bars"].as_array().into_iter().flatten() {
        let bytes = bar["size"].as_u64().map_or_else(|| "-".to_owned(), size);
        table.row(None, vec![format!("BAR {}", bar["index"]), format!("{}, {bytes}", cell(&bar["address"]))]);
    }
    table.row(None, vec!["MSI-X vectors".to_owned(), cell(&value["msix_vectors"])]);
    table
}

pub(super) fn slices(value: &Value) -> Table<'static> {
    let sides = &[Side::Left, Side::Left, Side::Right, Side::Right, Side::Left, Side::Right];
    let mut table = Table::new(sides, &["slice", "region", "offset", "size", "owner", "retired"]);
    for slice in value.as_array().into_iter().flatten() {
        let bytes = |value: &Value| value.as_u64().map_or_else(|| "-".to_owned(), size);
        let retired = slice["retired"].as_array().into_iter().flatten();
        let retired = retired.filter_map(|bad| bad["size"].as_u64()).fold(0, u64::saturating_add);
        let owner = match &slice["owner"] {
            Value::Null if slice["region"].is_null() => "the machine itself".to_owned(),
            Value::Null => "a broker's client".to_owned(),
            owner => format!("{}, user {}, process {}", cell(&owner["name"]), owner["uid"], owner["pid"]),
        };
        let offset = slice["offset"].as_u64().map_or_else(|| "-".to_owned(), |offset| format!("{offset:#x}"));
        let (id, region) = (cell(&slice["id"]), slice["region"].as_str().unwrap_or("-").to_owned());
        table.row(None, vec![id, region, offset, bytes(&slice["size"]), owner, size(retired)]);
    }
    table
}

pub(super) fn timings(value: &Value) -> Table<'static> {
    let mut table = Table::new(&[Side::Left, Side::Right], &["stage", "ms"]);
    let milliseconds = |value: &Value| {
        let microseconds = value.as_u64().unwrap_or(0);
        format!("{}.{:03}", microseconds / 1000, microseconds % 1000)
    };
    for stage in value["stages"].as_array().into_iter().flatten() {
        table.row(None, vec![cell(&stage["stage"]), milliseconds(&stage["duration_us"])]);
    }
    table.row(None, vec!["total".to_owned(), milliseconds(&value["total_us"])]);
    table
}
