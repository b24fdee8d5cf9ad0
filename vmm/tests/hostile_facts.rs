//! Altered facts yield a plan, or a refusal that blames the file or the host, and nothing that a terminal obeys.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

use egm_vmm::config;
use egm_vmm::error::{Blame, Report};
use egm_vmm::facts;
use egm_vmm::plan::{self, View};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

/// Configurations, and the facts of a host for each.
const MACHINES: [(&str, &str); 6] = [
    ("smoke", "x86-server"),
    ("hgx-h200", "hgx-h200"),
    ("grace-1gpu-egm", "grace"),
    ("gh200", "gh200"),
    ("cascaded-switches", "cascaded-switches"),
    ("gb300-data-direct", "gb300-data-direct"),
];

/// Control codes of a terminal, in both encodings.
const ESCAPE: &str = "\u{1b}[2J\u{9b}31m";

fn recorded(facts: &str) -> Value {
    serde_json::from_slice(&fs::read(format!("../configs/facts/{facts}.json")).unwrap()).unwrap()
}

/// Exit code, standard output and standard error of egm-vmm with `words`, and `facts` as the recorded host.
fn egm_vmm(words: &[&str], facts: &Value) -> (Option<i32>, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("facts.json");
    fs::write(&file, facts.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-vmm"));
    let output = command.args(words).arg("--facts").arg(&file).current_dir("..").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Whether a terminal obeys anything of `text` but the ends of its lines.
fn is_plain(text: &str) -> bool {
    text.chars().all(|c| c == '\n' || !c.is_control())
}

/// Places of strings in `value`; positions in lists are left out, so that one place stands for all elements.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::String(_) if !found.iter().any(|place| place == at) => found.push(at.to_owned()),
        Value::Array(all) => all.iter().for_each(|one| places(one, at, found)),
        Value::Object(all) => all.iter().for_each(|(key, one)| places(one, &format!("{at}.{key}"), found)),
        _ => {}
    }
}

/// Appends `text` to the strings at `place`.
fn append(value: &mut Value, at: &str, place: &str, text: &str) {
    match value {
        Value::String(string) if at == place => string.push_str(text),
        Value::Array(all) => all.iter_mut().for_each(|one| append(one, at, place, text)),
        Value::Object(all) => {
            all.iter_mut().for_each(|(key, one)| append(one, &format!("{at}.{key}"), place, text));
        }
        _ => {}
    }
}

#[test]
fn no_recorded_text_reaches_the_terminal_as_a_command() {
    let mut shown = 0;
    for (config, facts) in MACHINES {
        let (file, facts) = (format!("configs/{config}.json"), recorded(facts));
        let mut all = Vec::new();
        places(&facts, "", &mut all);
        for place in all {
            let mut hostile = facts.clone();
            append(&mut hostile, "", &place, ESCAPE);
            for words in [&["plan", &file][..], &["plan", &file, "--html"], &["check", &file], &["check"]] {
                let (code, out, error) = egm_vmm(words, &hostile);
                assert!(is_plain(&out) && is_plain(&error), "{words:?}, {place}: {out:?} {error:?}");
                assert!(matches!(code, Some(0 | 2 | 3)), "{words:?}, {place}: {code:?} {error}");
                shown += usize::from(out.contains("\\u{1b}") || error.contains("\\u{1b}"));
            }
        }
    }
    assert!(shown > 20, "{shown} showed the text");
}

/// Each text in a configuration of its own: the first one that is refused hides the others.
#[test]
fn control_characters_of_a_configuration_are_refused_and_reach_the_terminal_as_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.json");
    let machine = json!({ "boot": { "kernel": "/k" }, "memory": { "size": "1GiB" } });
    let escaped = |text: &str| format!("{text}{ESCAPE}");
    let texts = [
        json!({ "description": ESCAPE }),
        json!({ "boot": { "kernel": escaped("/k") } }),
        json!({ "boot": { "kernel": "/k", "cmdline": ESCAPE } }),
        json!({ "devices": [{ "type": "virtio-blk", "path": escaped("/disk") }] }),
        json!({ "console": { "type": "file", "path": escaped("/console") } }),
        json!({ "name": escaped("vm") }),
        json!({ "egm": [{ "region": escaped("egm"), "size": "2MiB", "node": 1 }] }),
        json!({ escaped("key"): 1 }),
    ];
    for text in &texts {
        let mut machine = machine.clone();
        machine.as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
        fs::write(&file, machine.to_string()).unwrap();
        for form in [&[][..], &["--html"]] {
            let words = [&["plan", file.to_str().unwrap()], form].concat();
            let (code, out, error) = egm_vmm(&words, &recorded("x86-server"));
            // What prints a plan escapes such a text once more, so the refusal is a check of its own.
            assert_eq!(code, Some(2), "{text} {form:?}: {error:?}");
            assert!(is_plain(&out) && is_plain(&error), "{text} {form:?}: {out:?} {error:?}");
        }
    }
}

/// The recorded hgx-h200 with `count` copies of its first GPU, near node 1, and a machine that has them all.
fn crowd(folder: &Path, count: usize) -> (String, Value) {
    let mut facts = recorded("hgx-h200");
    let functions = facts["functions"].as_array_mut().unwrap();
    let mut gpu = functions.iter().find(|one| one["address"] == "0000:18:00.0").unwrap().clone();
    (gpu["numa_node"], gpu["bars"], gpu["place"]["bridges"]) = (json!(1), json!([]), json!([]));
    let names: Vec<String> = (0..count).map(|number| format!("0001:{number:02x}:00.0")).collect();
    functions.extend(names.iter().zip(1000..).map(|(name, group)| {
        (gpu["address"], gpu["iommu_group"]) = (json!(name), json!(group));
        gpu.clone()
    }));
    functions.sort_by_key(|one| one["address"].as_str().unwrap().to_owned());
    let device = |name: &String| json!({ "type": "vfio", "function": name });
    let machine = json!({
        "boot": { "kernel": "/k" },
        "cpus": { "count": 2 },
        "memory": { "nodes": [
            { "id": 0, "size": "1GiB", "cpus": "0", "host_nodes": "0" },
            { "id": 1, "size": "1GiB", "cpus": "1", "host_nodes": "1" },
        ] },
        "devices": names.iter().map(device).collect::<Vec<_>>(),
    });
    let file = folder.join("vm.json");
    fs::write(&file, machine.to_string()).unwrap();
    (file.to_str().unwrap().to_owned(), facts)
}

#[test]
fn more_functions_near_a_node_than_its_bus_has_places_are_refused_by_number() {
    let folder = tempfile::tempdir().unwrap();
    let (file, facts) = crowd(folder.path(), 32);
    let (code, _, error) = egm_vmm(&["plan", &file], &facts);
    assert_eq!(code, Some(0), "{error}");
    let (file, facts) = crowd(folder.path(), 33);
    let (code, _, error) = egm_vmm(&["plan", &file], &facts);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("cannot put 33 root ports near node 1"), "{error}");
}

#[test]
fn a_function_behind_more_bridges_than_there_are_buses_is_refused() {
    let mut facts = recorded("hgx-h200");
    let functions = facts["functions"].as_array_mut().unwrap();
    let gpu = functions.iter_mut().find(|one| one["address"] == "0000:18:00.0").unwrap();
    gpu["place"]["bridges"] = json!(vec!["0000:15:01.0"; 100_000]);
    for words in
        [&["plan", "configs/hgx-h200.json"][..], &["plan", "configs/hgx-h200.json", "--nccl"], &["check"]]
    {
        let (code, _, error) = egm_vmm(words, &facts);
        assert_eq!(code, Some(2), "{words:?}: {error}");
        assert!(error.contains("0000:18:00.0 is behind 100000 bridges"), "{error}");
    }
}

#[test]
fn address_bits_that_no_processor_has_are_refused() {
    let mut facts = recorded("x86-server");
    for bits in [0, 31, 53, 64, 255] {
        facts["address_bits"] = json!(bits);
        let (code, _, error) = egm_vmm(&["plan", "configs/smoke.json"], &facts);
        assert_eq!(code, Some(2), "{bits}: {error}");
        assert!(error.contains(&format!("{bits} guest physical address bits")), "{error}");
    }
}

/// Number of values in `value`, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    }
}

/// Value number `at` of `value`, from the top.
fn nth<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(all) => all.iter_mut().find_map(|one| nth(one, at)),
        Value::Object(all) => all.values_mut().find_map(|one| nth(one, at)),
        _ => None,
    }
}

/// Changes one value, as a user with a text editor could.
fn mutate(value: &mut Value, how: u8, number: usize) {
    const NUMBERS: [u64; 10] = [0, 1, 2, 31, 63, 255, 4096, u32::MAX as u64, 1 << 52, u64::MAX];
    match value {
        Value::Number(_) | Value::Bool(_) | Value::Null => *value = json!(NUMBERS[number % 10]),
        Value::String(text) => match how % 4 {
            0 => *text = "0xffffffffffffffff".into(),
            1 => *text = "0x0".into(),
            2 => text.push('0'),
            _ => *text = "0-4095".into(),
        },
        Value::Array(all) => match how % 4 {
            0 => all.clear(),
            1 => all.reverse(),
            2 => *all = (0..40).flat_map(|_| all.clone()).take(400).collect(),
            _ => drop(all.pop()),
        },
        Value::Object(all) => {
            let key = all.keys().nth(number % all.len().max(1)).cloned();
            if let Some(key) = key {
                all.remove(&key);
            }
        }
    }
}

#[test]
fn changed_facts_give_a_plan_or_a_refusal_and_never_an_internal_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("facts.json");
    let machines = MACHINES.map(|(config, facts)| {
        (config::load(format!("../configs/{config}.json").as_ref()).unwrap(), recorded(facts))
    });
    let changes = prop::collection::vec((any::<usize>(), any::<u8>(), any::<usize>()), 1..4);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1500));
    runner
        .run(&(0..MACHINES.len(), changes), |(machine, changes)| {
            let (spec, mut facts) = machines[machine].clone();
            for (place, how, number) in changes {
                let mut at = place % count(&facts);
                if let Some(value) = nth(&mut facts, &mut at) {
                    mutate(value, how, number);
                }
            }
            fs::write(&file, facts.to_string()).unwrap();
            let blamed = |blame| matches!(blame, Blame::Configuration | Blame::Host);
            let facts = match facts::load(&file) {
                Ok(facts) => facts,
                Err(error) => {
                    prop_assert!(blamed(error.blame()), "{}", error);
                    return Ok(());
                }
            };
            match plan::plan(&spec, &facts) {
                Ok(plan) => {
                    let view = View::of(&facts);
                    prop_assert!(is_plain(&plan::text(&plan, &view)));
                    prop_assert!(!plan::html(&plan, &view).is_empty());
                    prop_assert!(!plan::nccl(&plan, &facts).is_empty());
                }
                Err(error) => prop_assert!(blamed(error.blame()), "{}", error),
            }
            Ok(())
        })
        .unwrap();
}
