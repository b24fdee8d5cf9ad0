//! The command line at a terminal: help, completion and manual pages.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::fs;
use std::path::Path;
use std::process::Command;

use egm_fixtures::terminal;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");

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
fn tab_completes_commands_options_values_and_files_in_bash() {
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("vm one.json"), "").unwrap();
    let script = Command::new(PROGRAM).args(["completions", "bash"]).output().unwrap().stdout;
    let expected = [
        ("egm-vmm ", "egm-vmm|run|serve|ctl|list|check|bind|facts|plan|export|schema|completions|man|help"),
        ("egm-vmm pl", "egm-vmm|plan"),
        ("egm-vmm run ", "egm-vmm|run|vm one.json"),
        ("egm-vmm run v", "egm-vmm|run|vm one.json"),
        ("egm-vmm plan vm.json --fa", "egm-vmm|plan|vm.json|--facts"),
        ("egm-vmm plan vm.json --facts ", "egm-vmm|plan|vm.json|--facts|vm one.json"),
        ("egm-vmm --log-level d", "egm-vmm|--log-level|debug"),
        ("egm-vmm --log-level=d", "egm-vmm|--log-level=debug"),
        ("egm-vmm export l", "egm-vmm|export|libvirt"),
        ("egm-vmm completions f", "egm-vmm|completions|fish"),
    ];
    let lines = expected.map(|(line, _)| line);
    let completed = terminal::completed(&String::from_utf8(script).unwrap(), &files, &lines).unwrap();
    let completed: Vec<String> = completed.iter().map(|words| words.join("|")).collect();
    assert_eq!(completed, expected.map(|(_, words)| words));
}
