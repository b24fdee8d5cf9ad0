//! The library from C: the header compiles without a warning, and the archive links.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

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

#[test]
fn a_c_program_calls_it_by_its_header() {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: this machine has no cc");
        return;
    }
    let (here, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")), tempfile::tempdir().unwrap());
    let program = folder.path().join("program");
    let built = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .args([here.join("include"), here.join("tests/program.c"), archive()])
        .args(["-lpthread", "-ldl", "-lm", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&program).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "ENODEV, EINVAL, EINVAL, 40 and 16 bytes\n");
}
