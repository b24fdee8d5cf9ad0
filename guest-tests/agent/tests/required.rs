//! `egm-guest run NAME` on a machine that lacks what the check is about.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::{Command, Output};

/// Checks of devices that are no function of the machine that runs the tests.
const WITHOUT_DEVICE: [&str; 4] = ["nvme", "passed_net", "passed_fuzz", "egm_device"];

fn run(names: &[&str]) -> Output {
    let plan = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vmm/tests/golden/vfio.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-guest"));
    command.args(["run", "--json", "--plan"]).arg(plan).args(names).output().unwrap()
}

#[test]
fn a_named_check_without_its_device_fails() {
    let output = run(&WITHOUT_DEVICE);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    for name in WITHOUT_DEVICE {
        let line = text.lines().find(|line| line.contains(&format!("\"egm-check\":\"{name}\""))).unwrap();
        assert!(line.contains("\"outcome\":\"failed\""), "{line}");
        assert!(line.contains("required, but skipped: "), "{line}");
    }
}

#[test]
fn all_reports_a_check_without_its_device_as_skipped() {
    let text = String::from_utf8(run(&["all"]).stdout).unwrap();
    let line = text.lines().find(|line| line.contains("\"egm-check\":\"nvme\"")).unwrap();
    assert!(line.contains("\"outcome\":\"skipped\""), "{line}");
}
