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
