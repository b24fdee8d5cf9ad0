//! README and the pages in docs/ show what the programs print.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod configuration;
mod links;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// Text of README, then of each page in docs/ by name.
fn pages() -> Vec<String> {
    let docs = fs::read_dir("../docs").unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = docs.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    paths.sort();
    paths.insert(0, "../README.md".into());
    paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// The blocks of `kind`, README's first.
fn blocks(kind: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    for text in pages() {
        for after in text.split(&format!("```{kind}\n")).skip(1) {
            blocks.push(after.split_once("\n```").unwrap().0.to_owned());
        }
    }
    blocks
}

/// Machine files in the pages, README's first: the name that the text before each has last in backticks, and the file.
fn machine_files() -> Vec<(String, String)> {
    let mut files = Vec::new();
    for text in pages() {
        let mut rest = text.as_str();
        while let Some((before, after)) = rest.split_once("```json\n") {
            let (block, next) = after.split_once("\n```").unwrap();
            rest = next;
            let quoted = before.split('`').skip(1).step_by(2);
            let name = quoted.filter(|word| word.ends_with(".json")).last();
            let name = name.and_then(|name| name.rsplit('/').next());
            if block.contains("\"memory\"") {
                files.push((name.unwrap().to_owned(), block.to_owned()));
            }
        }
    }
    files
}

/// A folder with the pages' machine files, where commands of the pages run.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["configs", "vmm"] {
        symlink(Path::new("..").join(name).canonicalize().unwrap(), folder.path().join(name)).unwrap();
    }
    for (name, text) in machine_files().into_iter().rev() {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

#[test]
fn every_machine_file_of_the_pages_is_a_configuration() {
    let folder = folder();
    let files = machine_files();
    for (index, (name, text)) in files.iter().enumerate() {
        let path = folder.path().join(format!("{index}-{name}"));
        fs::write(&path, text).unwrap();
        egm_vmm::config::load(&path).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
    assert!(files.len() >= 5, "{} files", files.len());
}

/// The book has every page of docs, and the three pages of the top folder for contributors and users.
#[test]
fn the_summary_lists_every_page() {
    let summary = fs::read_to_string("../docs/SUMMARY.md").unwrap();
    let mut missing: Vec<_> = fs::read_dir("../docs")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".md") && name != "SUMMARY.md")
        .collect();
    missing.extend(["CHANGELOG", "CONTRIBUTING", "SECURITY"].map(|name| format!("../{name}.md")));
    missing.retain(|name| !summary.contains(&format!("]({name})")));
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
}

/// Commands about recorded hosts and their output, from all golden files.
fn recorded() -> Vec<(String, String)> {
    let golden = ["lab", "grace", "x86-2-sockets"];
    let texts =
        golden.map(|name| fs::read_to_string(format!("../egm-device/tests/golden/{name}.txt")).unwrap());
    let mut commands = Vec::new();
    for line in texts.iter().flat_map(|text| text.lines()) {
        if let Some((_, command)) = line.split_once("$ egm-device ") {
            commands.push((command.to_owned(), String::new()));
        } else if let Some((_, output)) = commands.last_mut() {
            output.push_str(line);
            output.push('\n');
        }
    }
    commands
}

/// The pages' output about recorded hosts is in the golden output of such a host.
#[test]
fn every_command_about_a_host_names_a_recorded_host() {
    let recorded = recorded();
    let mut count = 0;
    for block in blocks("console") {
        let Some((command, shown)) = block.strip_prefix("$ egm-device ").and_then(|b| b.split_once('\n'))
        else {
            continue;
        };
        if command.contains("grant") || command.starts_with("serve") {
            continue; // of a running host
        }
        let shows = |output: &str| {
            let mut lines = output.lines();
            shown.lines().filter(|line| *line != "…").all(|line| lines.any(|said| said == line))
        };
        let found = recorded.iter().filter(|(other, _)| *other == command).any(|(_, output)| shows(output));
        assert!(found, "{command} does not say\n{shown}");
        count += 1;
    }
    assert!(count >= 3, "{count} commands");
}

/// Each block begins with a command; its lines follow each other in the command's output, `…` stands for any.
#[test]
fn every_command_of_ours_states_what_the_readme_shows() {
    let folder = folder();
    let blocks = blocks("console");
    let ours = blocks.iter().filter_map(|block| block.strip_prefix("$ egm-vmm ")?.split_once('\n'));
    // Those of a machine that runs are compared in `vmm/tests/api.rs`.
    let ours = ours.filter(|(words, _)| !words.starts_with("ctl ") && !words.starts_with("list "));
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
