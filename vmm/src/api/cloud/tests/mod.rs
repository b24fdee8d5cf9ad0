//! Every field of the document, and the documents of clients.

mod cases;
mod documents;
mod fields;
mod page;

use serde_json::{Value, json};

use super::{Translation, VmConfig, translate};
use crate::config::Refusal;

/// `base` with the members of `over`; arrays and other values replace those of `base`.
fn merged(base: Value, over: Value) -> Value {
    match (base, over) {
        (Value::Object(mut base), Value::Object(over)) => {
            for (key, value) in over {
                let old = base.remove(&key).unwrap_or_default();
                base.insert(key, merged(old, value));
            }
            Value::Object(base)
        }
        (_, over) => over,
    }
}

/// The smallest document with the members of `text`.
fn document(text: &str) -> Value {
    merged(json!({ "payload": { "kernel": "k" } }), serde_json::from_str(text).unwrap())
}

fn translated(document: &Value) -> Result<Translation, Vec<Refusal>> {
    let config: VmConfig =
        serde_json::from_value(document.clone()).unwrap_or_else(|error| panic!("{document}: {error}"));
    translate(&config)
}

/// The file of a document that is taken.
fn file(document: &Value) -> String {
    translated(document).unwrap_or_else(|refusals| panic!("{document}: {refusals:#?}")).file.to_json()
}
