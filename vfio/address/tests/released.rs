//! Planted faults are in no build that users get.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::process::Command;

#[test]
fn a_build_without_debug_assertions_cannot_have_planted_faults() {
    let output = Command::new(env!("CARGO"))
        .args(["check", "--quiet", "--offline", "--release", "--features=planted-faults", "--target-dir"])
        .arg(env!("CARGO_TARGET_TMPDIR"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "it was built");
    assert!(words.contains("no build without debug assertions may have it"), "{words}");
}
