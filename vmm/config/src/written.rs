//! A configuration as the JSON that an author would write.

use serde_json::Value;

use super::file::{DeviceFile, File};

impl File {
    /// The file as JSON that [`load`](crate::load) reads, without keys that have no value.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Every map has string keys, and paths that were read from JSON are Unicode.
        let mut file = serde_json::to_value(self).unwrap_or_default();
        if let Some(devices) = file["devices"].as_array_mut() {
            devices.iter_mut().for_each(tag);
        }
        tag(&mut file["console"]);
        leave_nulls_out(&mut file);
        format!("{file:#}\n")
    }
}

impl DeviceFile {
    /// The device as an entry of `"devices"`, without keys that have no value.
    pub(super) fn to_json(&self) -> Value {
        let mut device = serde_json::to_value(self).unwrap_or_default();
        tag(&mut device);
        leave_nulls_out(&mut device);
        device
    }
}

/// Writes serde's `{ "NAME": { … } }` of an enum as `{ "type": "NAME", … }`.
fn tag(value: &mut Value) {
    let Value::Object(variant) = value else { return };
    let Some((name, Value::Object(mut members))) = std::mem::take(variant).into_iter().next() else { return };
    members.insert("type".to_owned(), name.into());
    *value = Value::Object(members);
}

fn leave_nulls_out(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(leave_nulls_out);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_nulls_out),
        _ => {}
    }
}
