//! Recorded hosts, configurations and owners with terminal control sequences: each command escapes or refuses them.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hostile_text;
mod record;
mod small_host;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use hostile_text::{ESCAPE, append, places, shows};
use serde_json::{Value, json};

fn egm_device(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_egm-device")).args(words).output().unwrap()
}

/// A host with a reserved region, as `egm-vmm facts` records it.
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
    record::of(&serde_json::from_slice(&egm_device(&words).stdout).unwrap())
}

#[test]
fn no_text_of_a_recorded_host_reaches_the_terminal_as_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let (record, file) = (recorded(folder.path()), folder.path().join("hostile.json"));
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
            &["regions", "--html", "--with-kernel-command-line"],
            &["carve", "plan", "hidden", "--size", "2MiB"],
            &["carve", "advise", "--hypervisor", "32MiB", "--how", "memmap"],
            &["carve", "advise", "--undo"],
        ] {
            let output = egm_device(&[words, &["--facts", file.to_str().unwrap()]].concat());
            shown += usize::from(shows(&output, &format!("{words:?} with {place}")));
        }
    }
    assert!(shown > 5, "{shown} showed the text");
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
