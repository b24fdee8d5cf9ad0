//! Programs for users are built as the design requires, by the flags that cargo resolves for each unit of the programs.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Units that cargo would build for the programs with `profile`: name and flags of each that is part of one.
fn units(profile: &str) -> Vec<(String, Value)> {
    let output = Command::new(env!("CARGO"))
        .args(["build", "--offline", "--locked", "--profile", profile, "-p", "egm-vmm", "-p", "egm-device"])
        .args(["-p", "egm-guest", "--unit-graph", "-Z", "unstable-options"])
        .env("RUSTC_BOOTSTRAP", "1")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut graph: Value = serde_json::from_slice(&output.stdout).unwrap();
    let units = graph["units"].as_array_mut().unwrap();
    // Build scripts and procedural macros are of the host, which has no platform here.
    let is_part = |unit: &Value| !unit["platform"].is_null() && unit["mode"] == "build";
    let parts = units.iter_mut().filter(|unit| is_part(unit));
    parts.map(|unit| (unit["target"]["name"].to_string(), unit["profile"].take())).collect()
}

/// A sum of a guest's or peer's numbers that overflows ends the program, and is no wrong address.
#[test]
fn every_part_of_a_program_that_users_or_the_lab_run_has_overflow_checks() {
    for profile in ["release", "lab", "faults"] {
        let units = units(profile);
        assert!(units.iter().any(|(name, _)| name == "\"egm-vmm\""), "{units:?}");
        let without = units.iter().filter(|(_, flags)| flags["overflow_checks"] != true);
        let without: Vec<_> = without.map(|(name, _)| name).collect();
        assert!(without.is_empty(), "{profile}: {without:?}");
    }
}
