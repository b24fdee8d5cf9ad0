//! systemd and our own command line understand the unit of a machine.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
const INSTALLED: &str = "/usr/local/bin/egm-vmm";
const NAME: &str = "egm-vmm@vm1.service";

fn unit() -> String {
    fs::read_to_string("../configs/systemd/egm-vmm@.service").unwrap()
}

#[track_caller]
fn good(output: Output) -> String {
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    said
}

/// A folder with the unit of machine `vm1`, which runs the program of this test.
fn instance() -> Option<(TempDir, PathBuf)> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("skipped: systemd-analyze is not installed, it did not read the unit");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    fs::write(&path, unit().replace(INSTALLED, PROGRAM)).unwrap();
    Some((folder, path))
}

#[test]
fn systemd_takes_the_unit_without_a_word() {
    let Some((folder, _)) = instance() else { return };
    let mut systemd = Command::new("systemd-analyze");
    systemd.args(["verify", "--man=no", NAME]).current_dir(folder.path());
    let said =
        good(systemd.env("SYSTEMD_UNIT_PATH", format!("{}:", folder.path().display())).output().unwrap());
    assert!(!said.contains("egm-vmm@"), "{said}");
}

#[test]
fn a_machine_keeps_few_privileges_and_leaves_no_core_dump() {
    assert!(unit().contains("\nLimitCORE=0\n"));
    let Some((_folder, path)) = instance() else { return };
    let mut systemd = Command::new("systemd-analyze");
    // In tenths: more than 3.0 is an error.
    good(systemd.args(["security", "--offline=yes", "--threshold=30"]).arg(path).output().unwrap());
}

#[test]
fn our_command_line_takes_what_the_unit_has_and_its_end_has_time() {
    let unit = unit();
    let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap();
    for key in ["ExecStart", "ExecStop"] {
        let words = value(key).strip_prefix(INSTALLED).unwrap().replace("%i", "vm1");
        // The arguments before `--help` are parsed, and refused if they are wrong; then the help ends it.
        good(Command::new(PROGRAM).args(words.split_whitespace()).arg("--help").output().unwrap());
    }
    let socket = |key: &str| value(key).split("--api ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    assert_eq!(socket("ExecStart"), socket("ExecStop"));
    assert_eq!(socket("ExecStart"), format!("/run/{}/api.sock", value("RuntimeDirectory")));
    let patience: u64 = value("ExecStop").rsplit(' ').next().unwrap().parse().unwrap();
    let limit: u64 = value("TimeoutStopSec").strip_suffix("min").unwrap().parse().unwrap();
    assert!(limit * 60 > patience + 60, "{limit} min for {patience} s and the disks");
}
