//! The library from C: the header compiles without a warning, and the archive links. The page about it is right.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The archive that Cargo made beside this test: the newest, where there are several.
fn archive() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let ours = entries.filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libegm_memory") && name.ends_with(".a")
    });
    ours.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap()
}

/// Compiles `source` strictly, links it with the archive, and gives the output of the program, with its exit code; `None`
/// where there is no compiler.
fn run(source: &Path) -> Option<(Option<i32>, String)> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: this machine has no cc");
        return None;
    }
    let (here, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")), tempfile::tempdir().unwrap());
    let program = folder.path().join("program");
    let built = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(here.join("include"))
        .arg(source)
        .arg(archive())
        .args(["-lpthread", "-ldl", "-lm", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&program).output().unwrap();
    let said = [ran.stdout, ran.stderr].concat();
    Some((ran.status.code(), String::from_utf8(said).unwrap()))
}

#[test]
fn a_c_program_calls_it_by_its_header() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program.c");
    if let Some(ran) = run(&source) {
        assert_eq!(ran, (Some(0), "ENODEV, EINVAL, EINVAL, 40 and 16 bytes\n".to_owned()));
    }
}

const PAGE: &str = include_str!("../../../docs/guest-memory.md");

#[test]
fn the_program_of_the_page_compiles_and_runs() {
    let (_, after) = PAGE.split_once("```c\n#include <stdio.h>").unwrap();
    let program = format!("#include <stdio.h>{}", after.split_once("```").unwrap().0);
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("program.c");
    std::fs::write(&source, program).unwrap();
    if let Some((code, said)) = run(&source) {
        let there = code == Some(0) && said.contains("retired spans");
        assert!(
            there || code == Some(1) && said == "cannot open EGM memory: No such device\n",
            "{code:?} {said}"
        );
    }
}

/// Only root can enable a function, so a rule that leaves this to the group's members would give them nothing.
#[test]
fn the_rule_of_the_page_enables_the_function_and_opens_its_files_to_the_group() {
    let rule = PAGE.lines().find(|line| line.starts_with("ACTION==\"add\"")).unwrap();
    let (_, script) = rule.split_once("RUN+=\"/bin/sh -c '").unwrap();
    let (script, end) = script.split_once('\'').unwrap();
    assert_eq!(end, "\"");
    let folder = tempfile::tempdir().unwrap();
    let files = ["resource0", "resource2", "resource2_wc"].map(|name| folder.path().join(name));
    for file in &files {
        std::fs::write(file, "").unwrap();
        std::fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap();
    }
    let enable = folder.path().join("enable");
    std::fs::write(&enable, "0\n").unwrap();
    // A group that any user may give its files to.
    let group = enable.metadata().unwrap().gid();
    let script = script.replace("/sys$devpath", folder.path().to_str().unwrap());
    let script = script.replace("chgrp egm", &format!("chgrp {group}"));
    assert!(Command::new("/bin/sh").args(["-c", &script]).status().unwrap().success(), "{script}");
    assert_eq!(std::fs::read_to_string(&enable).unwrap(), "1\n");
    for file in &files {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o660, "{}", file.display());
    }
}
