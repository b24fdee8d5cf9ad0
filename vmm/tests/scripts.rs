//! Output of `scripts/` before anything is built, and how they end.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// Puts a program into `folder`.
fn program(folder: &Path, name: &str, lines: &str) {
    fs::create_dir_all(folder).unwrap();
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}

/// Runs a copy of `scripts/test` where cargo is `cargo`, the lab's runner is `lab`, and nothing else is checked.
fn test_with(cargo: &str, lab: &str, folder: &Path, arguments: &[&str]) -> (i32, String) {
    fs::create_dir_all(folder.join("scripts")).unwrap();
    fs::copy("../scripts/test", folder.join("scripts/test")).unwrap();
    let bin = folder.join("bin");
    program(&bin, "cargo", cargo);
    program(
        &bin,
        "git",
        "case $1 in log) cat subjects 2>/dev/null ;; *) printf 'scripts/test\\0' ;; esac; true",
    );
    program(&bin, "rustc", "echo here");
    program(&folder.join("target/here/debug"), "egm-lab", lab);
    program(&bin, "shellcheck", "exit 0");
    program(&bin, "mdbook", "exit 0");
    program(&folder.join("scripts"), "book", "echo built the book | tee -a ran");
    program(&folder.join("scripts/lab"), "arm64", "echo no compiler; exit 3");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(folder.join("scripts/test"));
    command.env_remove("CARGO_TARGET_DIR");
    code_and_text(command.args(arguments).env("PATH", path).output().unwrap())
}

fn code_and_text(output: Output) -> (i32, String) {
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code().unwrap(), text)
}

#[test]
fn a_test_run_goes_on_after_a_step_that_failed_and_ends_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let cargo = "case $1 in
    fmt) echo 'Diff in main.rs'; exit 1 ;;
    nextest) [ \"$2\" = --version ] || echo '     Summary [ 0.1s] 1 test run: 1 passed' ;;
    doc) echo ran the documentation ;;
    esac";
    let lab = "[ $1 = faults ] || cat \"$3\"";
    let (code, text) = test_with(cargo, lab, folder.path(), &["--without-lab"]);
    assert_eq!(code, 1, "{text}");
    let mut rest = text.as_str();
    let parts = [
        "Diff in main.rs",
        "== lints",
        "ran the documentation",
        "built the book",
        "== skipped",
        "lints for aarch64: skipped: scripts/lab/arm64: no compiler",
        "guests: skipped: --without-lab",
        "== closing lines",
        "1 passed",
        "== failed",
        "formatting: its output is in target/test/formatting",
    ];
    for part in parts {
        let at = rest.find(part).unwrap_or_else(|| panic!("no {part:?} in\n{text}"));
        rest = &rest[at + part.len()..];
    }
    let log = fs::read_to_string(folder.path().join("target/test/formatting")).unwrap();
    assert_eq!(log, "Diff in main.rs\n");
}

#[test]
fn a_test_run_without_failures_leaves_no_logs() {
    let folder = tempfile::tempdir().unwrap();
    let cargo = "echo '     Summary [ 0.1s] 1 test run: 1 passed'";
    let (code, text) = test_with(cargo, "exit 0", folder.path(), &["--without-lab"]);
    assert_eq!((code, text.contains("== failed")), (0, false), "{text}");
    assert!(!folder.path().join("target/test").exists());
}

#[test]
fn a_commit_subject_of_more_than_72_characters_fails_a_test_run() {
    let ran = |length: usize| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("subjects"), format!("abc1234 {}\n", "x".repeat(length))).unwrap();
        test_with("true", "exit 0", folder.path(), &["--without-lab"])
    };
    assert_eq!(ran(72).0, 0);
    let (code, text) = ran(73);
    assert!(code == 1 && text.contains("over 72 characters: abc1234 xxx"), "{text}");
}

#[test]
fn a_skip_that_the_table_does_not_allow_fails_a_test_run() {
    let folder = tempfile::tempdir().unwrap();
    let lab = "[ $1 != skips ] || { cat \"$3\"; exit 1; }";
    let (code, text) = test_with("exit 0", lab, folder.path(), &["--without-lab"]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("guests: skipped: --without-lab")
            && text.contains("\nsteps.skipped: its output is in target/test/steps.skipped"),
        "{text}"
    );
}

#[test]
fn a_quick_run_and_a_shard_leave_out_what_their_usage_states() {
    let cargo = "case $1 in
    nextest) [ \"$2\" = --version ] || echo \"$@\" >>ran ;;
    *) echo $1 >>ran ;;
    esac";
    let lab = "[ $1 = skips ] || echo $1 >>ran";
    let ran = |arguments: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let (code, text) = test_with(cargo, lab, folder.path(), arguments);
        assert_eq!(code, 0, "{text}");
        fs::read_to_string(folder.path().join("ran")).unwrap()
    };
    let quick = ran(&["--quick"]);
    assert!(["fmt\n", "clippy\n", "--profile quick\n"].iter().all(|step| quick.contains(step)), "{quick}");
    assert!(["faults\n", "doc\n", "book\n", "deny\n"].iter().all(|step| !quick.contains(step)), "{quick}");
    let first = ran(&["--without-lab", "--shard", "1/3"]);
    let steps = ["fmt\n", "faults\n", "doc\n", "book\n", "--partition slice:1/3"];
    assert!(steps.iter().all(|step| first.contains(step)) && !first.contains("--profile"), "{first}");
    let second = ran(&["--without-lab", "--shard", "2/3"]);
    assert!(second.contains("--partition slice:2/3"), "{second}");
    assert!(["fmt\n", "doc\n", "book\n"].iter().all(|step| !second.contains(step)), "{second}");
}

#[test]
fn a_mistyped_argument_is_answered_at_once_with_the_usage() {
    for script in ["bench", "check-host", "demo", "mutants", "test"] {
        let mut command = Command::new(format!("../scripts/{script}"));
        // Without a cargo nothing can be built.
        let (code, text) =
            code_and_text(command.arg("--hlep").env("PATH", "/usr/bin:/bin").output().unwrap());
        let usage = format!("error: unexpected argument \"--hlep\"\nusage: scripts/{script} ");
        assert!(code == 2 && text.starts_with(&usage), "{code}: {text}");
    }
}

#[test]
fn bind_hands_its_words_to_the_installed_program_from_where_it_is_called() {
    let folder = tempfile::tempdir().unwrap();
    program(&folder.path().join("bin"), "egm-vmm", "pwd; printf '%s|' \"$@\"");
    let script = Path::new("../scripts/bind").canonicalize().unwrap();
    let mut command = Command::new(script);
    let path = format!("{}:/usr/bin:/bin", folder.path().join("bin").display());
    let output =
        command.args(["--hlep", "a b"]).env("PATH", path).current_dir(folder.path()).output().unwrap();
    let here = folder.path().canonicalize().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\nbind|--hlep|a b|", here.display()));
}
