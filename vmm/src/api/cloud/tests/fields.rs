//! The table against the types and the translation: each field has one row, and each row does what it states.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::super::VmConfig;
use super::super::table::{Fate, Row, pattern, row, rows, values};
use super::cases::{DERIVED, DERIVED_ELSEWHERE, HONOURED, REFUSED};
use super::{document, file, translated};

/// The fields of the types without fields of their own, by the schema.
fn leaves() -> BTreeSet<String> {
    let schema = schemars::schema_for!(VmConfig);
    let mut leaves = BTreeSet::new();
    walk(schema.as_value(), schema.as_value()["$defs"].as_object().unwrap(), "", &mut leaves);
    leaves
}

fn walk(schema: &Value, definitions: &Map<String, Value>, path: &str, leaves: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let definition = &definitions[name.trim_start_matches("#/$defs/")];
        return walk(definition, definitions, path, leaves);
    }
    if let Some(forms) = schema["anyOf"].as_array() {
        return forms
            .iter()
            .filter(|form| form["type"] != "null")
            .for_each(|form| walk(form, definitions, path, leaves));
    }
    if schema["items"].is_object() {
        let inside = format!("{path}[]");
        walk(&schema["items"], definitions, &inside, leaves);
        // A list of plain values is one field.
        if leaves.remove(&inside) {
            leaves.insert(path.to_owned());
        }
        return;
    }
    match schema["properties"].as_object().filter(|fields| !fields.is_empty()) {
        None => {
            leaves.insert(path.to_owned());
        }
        Some(fields) => {
            for (name, schema) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                walk(schema, definitions, &path, leaves);
            }
        }
    }
}

/// Whether `row` is that of `leaf`: its own, or that of a derived or refused object or list around it.
fn is_of(row: &Row, leaf: &str) -> bool {
    let is_around = !matches!(row.fate, Fate::Honoured(_));
    let rest = leaf.strip_prefix(row.path);
    rest.is_some_and(|rest| rest.is_empty() || (is_around && rest.starts_with(['.', '['])))
}

#[test]
fn every_field_has_one_row_and_every_row_a_field() {
    let leaves = leaves();
    assert!(leaves.len() > 150, "{} fields", leaves.len());
    for leaf in &leaves {
        let of: Vec<&str> = rows().filter(|row| is_of(row, leaf)).map(|row| row.path).collect();
        assert_eq!(of.len(), 1, "{leaf} has the rows {of:?}");
    }
    for row in rows() {
        assert!(leaves.iter().any(|leaf| is_of(row, leaf)), "no field has the row {}", row.path);
    }
}

#[test]
fn a_row_explains_itself() {
    for row in rows() {
        let is_refused = matches!(row.fate, Fate::Refused(_));
        assert_eq!(row.means.is_empty(), is_refused, "{}: a meaning, or a reason", row.path);
        assert_eq!(row.refuses.is_empty(), row.help.is_empty(), "{}: a reason and a remedy", row.path);
        assert!(!is_refused || row.refuses.starts_with("cannot "), "{}", row.path);
        for text in [row.means, row.refuses, row.help] {
            assert!(!text.ends_with('.') && !text.contains('|'), "{}: {text}", row.path);
        }
    }
}

#[test]
fn every_honoured_field_changes_the_file() {
    let mut tried = BTreeSet::new();
    for (path, before, after) in HONOURED {
        let (before, after) = (document(before), document(after));
        assert_ne!(values(&before, path), values(&after, path), "{path} is the same in both documents");
        assert_ne!(file(&before), file(&after), "{path} changes nothing");
        tried.insert(*path);
    }
    let honoured = rows().filter(|row| matches!(row.fate, Fate::Honoured(_))).map(|row| row.path);
    assert_eq!(tried, honoured.collect(), "the fields tried, and those that the table has");
}

#[test]
fn every_derived_field_is_noted_and_changes_nothing() {
    let mut tried: BTreeSet<String> = DERIVED_ELSEWHERE.iter().map(|path| (*path).to_owned()).collect();
    for (key, text) in DERIVED {
        let with = document(text);
        let noted = translated(&with).unwrap_or_else(|refusals| panic!("{key}: {refusals:#?}")).notes;
        let note = format!("{key}: {}", row(key).unwrap().means);
        assert_eq!(noted, [note], "{key}");
        assert_eq!(file(&with), file(&without(&with, key)), "{key} changes the file");
        tried.insert(pattern(key));
    }
    let derived = rows().filter(|row| matches!(row.fate, Fate::Derived(_))).map(|row| row.path.to_owned());
    assert_eq!(tried, derived.collect(), "the fields tried, and those that the table has");
}

/// `document` with the usual value of the field at `key`.
fn without(document: &Value, key: &str) -> Value {
    let mut document = document.clone();
    if key == "cpus.max_vcpus" {
        document["cpus"]["max_vcpus"] = document["cpus"]["boot_vcpus"].clone();
        return document;
    }
    let pointer = format!("/{}", key.replace(['.', '['], "/").replace(']', ""));
    let (object, name) = pointer.rsplit_once('/').unwrap();
    document.pointer_mut(object).unwrap().as_object_mut().unwrap().remove(name);
    document
}

#[test]
fn every_refusal_has_its_field_reason_and_remedy() {
    let mut tried = BTreeSet::new();
    for (key, text) in REFUSED {
        let Err(refusals) = translated(&document(text)) else { panic!("{text} is taken") };
        let row = row(key).unwrap_or_else(|| panic!("{key} has no row"));
        let refusal = refusals.iter().find(|refusal| refusal.key == *key);
        let refusal = refusal.unwrap_or_else(|| panic!("{key}: {refusals:#?}"));
        assert_eq!((refusal.reason.as_str(), refusal.help.as_str()), (row.refuses, row.help));
        tried.insert(row.path);
    }
    let refused = rows().filter(|row| !row.refuses.is_empty()).map(|row| row.path);
    assert_eq!(tried, refused.collect(), "the fields tried, and those that the table has");
}

#[test]
fn all_refusals_are_reported_at_once() {
    let refused = document(
        r#"{"watchdog":true,"disks":[{"path":"d","direct":true},{"path":"e","direct":true}],"net":[{"mtu":9000}]}"#,
    );
    let refusals = translated(&refused).unwrap_err();
    let keys: BTreeSet<&str> = refusals.iter().map(|refusal| refusal.key.as_str()).collect();
    assert_eq!(keys, ["watchdog", "disks[0].direct", "disks[1].direct", "net[0].mtu", "net[0].tap"].into());
    assert_eq!(keys.len(), refusals.len());
    assert!(refusals[0].to_string().contains(": cannot "), "{}", refusals[0]);
}

#[test]
fn an_unknown_field_is_a_mistake_at_every_depth() {
    for text in [
        r#"{"cpu":1}"#,
        r#"{"payload":{"x":1}}"#,
        r#"{"net":[{"tap":"t","x":1}]}"#,
        r#"{"rng":{"src":"s","x":1}}"#,
    ] {
        let error = serde_json::from_value::<VmConfig>(document(text)).unwrap_err();
        assert!(error.to_string().starts_with("unknown field"), "{text}: {error}");
    }
}

#[test]
fn numbers_at_their_limits_are_translated_or_refused() {
    let most = u64::MAX;
    for text in [
        r#"{"cpus":{"boot_vcpus":4294967295,"max_vcpus":4294967295}}"#.to_owned(),
        r#"{"cpus":{"boot_vcpus":4294967295,"max_vcpus":4294967295,"affinity":[{"vcpu":4294967295,"host_cpus":[0]}]}}"#
            .to_owned(),
        format!(r#"{{"memory":{{"size":{most}}}}}"#),
        format!(r#"{{"memory":{{"size":0,"zones":[{{"id":"","size":{most}}},{{"id":"b","size":{most}}}]}}}}"#),
        format!(r#"{{"net":[{{"tap":"","num_queues":{most}}}]}}"#),
        r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1,"topology":
            {"threads_per_core":65535,"cores_per_die":65535,"dies_per_package":65535,"packages":65535}}}"#
            .to_owned(),
        r#"{"memory":{"size":0},"numa":[{"guest_numa_id":4294967295,"device_id":""}]}"#.to_owned(),
        r#"{"devices":[{"path":"/sys"},{"path":"/sys/.."},{"path":""}]}"#.to_owned(),
    ] {
        // Either is right: egm-config refuses what is beyond its own limits.
        let _ = translated(&document(&text));
    }
}
