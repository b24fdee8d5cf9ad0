//! The command line at a terminal: help, completion and manual pages.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::fs;
use std::path::Path;
use std::process::Command;

use egm_fixtures::terminal;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-lab");

#[test]
fn all_help_fits_the_terminal_and_no_word_is_cut() {
    for columns in [80, 120] {
        assert_eq!(terminal::help_faults(Path::new(PROGRAM), columns).unwrap(), [""; 0], "{columns} columns");
    }
}

#[test]
fn shells_and_readers_of_manual_pages_find_nothing_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("pages");
    assert_eq!(terminal::page_faults(Path::new(PROGRAM), &pages).unwrap(), [""; 0]);
    assert!(fs::read_dir(&pages).unwrap().count() > 8);
    assert_eq!(terminal::script_faults(Path::new(PROGRAM), folder.path()).unwrap(), [""; 0]);
}

#[test]
fn a_monitor_that_no_scenario_starts_is_refused_with_the_command_that_starts_it() {
    let output =
        Command::new(PROGRAM).args(["run", "--list", "--peer", "firecracker=/bin/sh"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("egm-lab bench --peer firecracker=PATH"), "{errors}");
    assert!(output.stdout.is_empty());
}

#[test]
fn tab_completes_commands_options_values_and_files_in_bash() {
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("vm one.json"), "").unwrap();
    let script = Command::new(PROGRAM).args(["completions", "bash"]).output().unwrap().stdout;
    let expected = [
        ("egm-lab run-c", "egm-lab|run-config"),
        ("egm-lab run-config v", "egm-lab|run-config|vm one.json"),
        ("egm-lab run-config --di", "egm-lab|run-config|--disk"),
        ("egm-lab kernel arm64-", "egm-lab|kernel|arm64-stable"),
        ("egm-lab run --where k", "egm-lab|run|--where|kvm"),
        ("egm-lab grace sh", "egm-lab|grace|shell"),
    ];
    let lines = expected.map(|(line, _)| line);
    let completed = terminal::completed(&String::from_utf8(script).unwrap(), &files, &lines).unwrap();
    let completed: Vec<String> = completed.iter().map(|words| words.join("|")).collect();
    assert_eq!(completed, expected.map(|(_, words)| words));
}
