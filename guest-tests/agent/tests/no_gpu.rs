//! On a machine without CUDA's driver each claim about GPUs is skipped, with what is missing; nothing fails, and
//! nothing is reported as passed.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

/// Names of a group, by `--list`.
fn names(group: &str) -> Vec<String> {
    let output = egm_guest(&["validate", "--list", "--select", group]);
    let names = output.lines().filter_map(|line| line.split_whitespace().next());
    names.filter(|name| name.starts_with(group)).map(str::to_owned).collect()
}

/// Output of the program, which must succeed.
fn egm_guest(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_egm-guest")).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn every_claim_about_gpus_is_skipped_and_names_the_library() {
    for (group, least) in [("cuda", 39), ("p2p", 6)] {
        let names = names(group);
        assert!(names.len() >= least, "{names:?}");
        let report = egm_guest(&["validate", "--select", group, "--seed", "7"]);
        for name in names {
            let row = report.lines().find(|line| line.split_whitespace().next() == Some(&name));
            let row = row.unwrap_or_else(|| panic!("no {name} in\n{report}"));
            assert_eq!(row.split_whitespace().nth(1), Some("skipped"), "{row}");
            assert!(row.contains("libcuda.so.1"), "{row}");
        }
    }
}
