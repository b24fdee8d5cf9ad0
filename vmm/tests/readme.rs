//! What the README shows is what the program says.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The blocks of `kind` in the README.
fn blocks(kind: &str) -> Vec<String> {
    let text = fs::read_to_string("../README.md").unwrap();
    let mut blocks = Vec::new();
    for after in text.split(&format!("```{kind}\n")).skip(1) {
        blocks.push(after.split_once("\n```").unwrap().0.to_owned());
    }
    blocks
}

/// What the README shows of hosts that were written down is in the story of such a host.
#[test]
fn every_command_about_a_host_was_said_of_a_host_that_was_written_down() {
    let story = fs::read_to_string("../egm-device/tests/golden/lab.txt").unwrap();
    let mut count = 0;
    for block in blocks("console") {
        let Some((command, shown)) = block.strip_prefix("$ egm-device ").and_then(|b| b.split_once('\n'))
        else {
            continue;
        };
        let of_others = ["export", "serve"].iter().any(|other| command.starts_with(other));
        if command.contains("grant") || of_others {
            continue; // of a running host, or compared by the exporter's own test
        }
        let said =
            story.split("\n\nlab-").filter_map(|part| part.split_once("$ egm-device ")?.1.split_once('\n'));
        let shows = |said: &str| {
            let mut lines = said.lines();
            shown.lines().filter(|line| *line != "…").all(|line| lines.any(|said| said == line))
        };
        let found = said.filter(|(other, _)| *other == command).any(|(_, said)| shows(said));
        assert!(found, "{command} does not say\n{shown}");
        count += 1;
    }
    assert!(count >= 3, "{count} commands");
}

/// Each block begins with a command; its lines follow each other in what the command says, `…` stands for any.
#[test]
fn every_command_of_ours_says_what_the_readme_shows() {
    let folder = tempfile::tempdir().unwrap();
    symlink(Path::new("../configs").canonicalize().unwrap(), folder.path().join("configs")).unwrap();
    fs::write(folder.path().join("vm.json"), &blocks("json")[0]).unwrap();
    let blocks = blocks("console");
    let ours = blocks.iter().filter_map(|block| block.strip_prefix("$ egm-vmm ")?.split_once('\n'));
    let mut count = 0;
    for (arguments, shown) in ours {
        let output = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
            .args(arguments.split_whitespace())
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let mut lines = said.lines();
        for line in shown.lines().filter(|line| *line != "…") {
            assert!(lines.any(|said| said == line), "{arguments}: no line {line:?} in\n{said}");
        }
        count += 1;
    }
    assert!(count >= 3, "{count} commands");
}
