//! Recorded hosts, configurations and owners with terminal control sequences: each command escapes or refuses them.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod small_host;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

/// A control sequence in both encodings that terminals support.
const ESCAPE: &str = "\u{1b}[2J\u{9b}31m";

fn egm_device(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_egm-device")).args(words).output().unwrap()
}

/// Whether the output has no control characters but the ends of lines, and has the text, escaped.
#[track_caller]
fn shows(output: &Output, what: &str) -> bool {
    let mut shown = false;
    for bytes in [&output.stdout, &output.stderr] {
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{what}: {text:?}");
        shown |= text.contains("u{1b}");
    }
    assert!(matches!(output.status.code(), Some(0 | 2 | 3)), "{what}: {output:?}");
    shown
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

/// Appends [`ESCAPE`] to the strings at `place`.
fn append(value: &mut Value, at: &str, place: &str) {
    match value {
        Value::String(string) if at == place => string.push_str(ESCAPE),
        Value::Array(all) => all.iter_mut().for_each(|one| append(one, at, place)),
        Value::Object(all) => {
            all.iter_mut().for_each(|(key, one)| append(one, &format!("{at}.{key}"), place));
        }
        _ => {}
    }
}

/// A host with a reserved region, as `regions --json` records it.
fn recorded(folder: &Path) -> Value {
    let root = folder.join("host");
    small_host::make(&root);
    for (path, text) in [
        ("proc/cmdline", "memmap=256M$1G\n"),
        ("proc/iomem", "00100000-3fffffff : System RAM\n40000000-4fffffff : Reserved\n"),
    ] {
        fs::write(root.join(path), text).unwrap();
    }
    let files = folder.join("files");
    fs::create_dir(&files).unwrap();
    let span =
        json!({ "name": "hidden", "base": "0x40000000", "size": "256MiB", "trusted": true, "node": 0 });
    fs::write(files.join("a.json"), json!({ "regions": [span] }).to_string()).unwrap();
    let words =
        ["regions", "--json", "--root", root.to_str().unwrap(), "--host-files", files.to_str().unwrap()];
    serde_json::from_slice(&egm_device(&words).stdout).unwrap()
}

fn machine(folder: &Path, name: &str, kernel: &str) -> String {
    let path = folder.join(name);
    let machine = json!({
        "boot": { "kernel": kernel, "cmdline": "quiet" },
        "memory": { "size": "1GiB" },
        "egm": [{ "region": "hidden", "size": "64MiB", "node": 1 }],
    });
    fs::write(&path, machine.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn no_text_of_a_recorded_host_reaches_the_terminal_as_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let (record, file) = (recorded(folder.path()), folder.path().join("hostile.json"));
    let vm = machine(folder.path(), "vm.json", "/k");
    let mut all = Vec::new();
    places(&record, "", &mut all);
    assert!(all.len() > 10, "{all:?}");
    let mut shown = 0;
    for place in &all {
        let mut hostile = record.clone();
        append(&mut hostile, "", place);
        fs::write(&file, hostile.to_string()).unwrap();
        for words in [
            &["regions"][..],
            &["regions", "--html"],
            &["carve", "plan", "hidden", "--size", "2MiB"],
            &["carve", "advise", "--hypervisor", "32MiB", "--how", "memmap"],
            &["carve", "advise", "--undo"],
            &["export", "qemu", "--config", &vm],
            &["export", "cloud-hypervisor", "--config", &vm],
            &["export", "libvirt", "--config", &vm],
        ] {
            let output = egm_device(&[words, &["--recorded", file.to_str().unwrap()]].concat());
            shown += usize::from(shows(&output, &format!("{words:?} with {place}")));
        }
    }
    assert!(shown > 5, "{shown} showed the text");
}

#[test]
fn an_export_refuses_what_a_shell_and_xml_would_pass_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut record = recorded(folder.path());
    let mut all = Vec::new();
    places(&record, "", &mut all);
    let devices: Vec<_> = all.iter().filter(|place| place.ends_with(".device")).collect();
    assert!(!devices.is_empty(), "{all:?}");
    devices.iter().for_each(|place| append(&mut record, "", place));
    let file = folder.path().join("hostile.json");
    fs::write(&file, record.to_string()).unwrap();
    let vm = machine(folder.path(), "vm.json", "/k");
    for monitor in ["qemu", "libvirt"] {
        let output = egm_device(&["export", monitor, "--config", &vm, "--recorded", file.to_str().unwrap()]);
        assert!(shows(&output, monitor), "{output:?}");
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

#[test]
fn an_owners_name_is_shown_as_text() {
    let folder = tempfile::tempdir().unwrap();
    small_host::make(folder.path());
    let root = folder.path().to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_egm-device");
    let show = format!("{program} ledger show --root {root}; {program} regions --root {root}");
    let name = format!("vm{ESCAPE}");
    let grant = ["carve", "grant", "--root", root, "--region", "local", "--size", "4MiB", "--name", &name];
    let output = egm_device(&[&grant[..], &["--", "/bin/sh", "-c", &show]].concat());
    assert!(shows(&output, "ledger show"), "{output:?}");
}
