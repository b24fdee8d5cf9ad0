//! The command line at a terminal: help, completion and manual pages.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

use egm_fixtures::terminal;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-device");

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
        ("egm-device carve ad", "egm-device|carve|advise"),
        ("egm-device carve ho", "egm-device|carve|ho"),
        ("egm-device carve grant --tr", "egm-device|carve|grant|--trust-domain"),
        ("egm-device log --event q", "egm-device|log|--event|quarantine"),
        ("egm-device carve verify v", "egm-device|carve|verify|vm one.json"),
        ("egm-device serve --config v", "egm-device|serve|--config|vm one.json"),
        ("egm-device ledger u", "egm-device|ledger|unretire"),
    ];
    let lines = expected.map(|(line, _)| line);
    let completed = terminal::completed(&String::from_utf8(script).unwrap(), &files, &lines).unwrap();
    let completed: Vec<String> = completed.iter().map(|words| words.join("|")).collect();
    assert_eq!(completed, expected.map(|(_, words)| words));
}

/// What the program shows on a terminal with colours, where `variable` has `value`.
fn shown(words: &[&str], variable: &str, value: &str) -> String {
    let mut command = Command::new(PROGRAM);
    command.args(words).env("TERM", "xterm").env_remove("NO_COLOR").env(variable, value);
    terminal::shown(command, 80).unwrap()
}

#[test]
fn a_terminal_shows_labels_and_headings_in_colour_unless_the_environment_turns_it_off() {
    let refused = ["regions", "--root", "/none"];
    for (words, part) in [
        (&refused[..], "\u{1b}[1;31merror:\u{1b}[0m cannot read a host below /none"),
        (&refused[..], "  \u{1b}[36mhelp:\u{1b}[0m name"),
        (&["regions", "--nope"][..], "\u{1b}[1;31merror:\u{1b}[0m unexpected argument"),
        (&["regions", "--help"][..], "\u{1b}[1mOptions:\u{1b}[0m\n"),
    ] {
        for (variable, value, is_coloured) in
            [("NO_COLOR", "", true), ("NO_COLOR", "1", false), ("TERM", "dumb", false)]
        {
            let shown = shown(words, variable, value);
            assert!(
                !shown.is_empty() && shown.contains('\u{1b}') == is_coloured,
                "{variable}={value}: {shown:?}"
            );
            assert_eq!(shown.contains(part), is_coloured, "{part:?} for {variable}={value}: {shown:?}");
        }
    }
    let piped = Command::new(PROGRAM).args(refused).env("TERM", "xterm").output().unwrap();
    assert!(piped.stderr.starts_with(b"error: ") && !piped.stderr.contains(&0x1b));
}
