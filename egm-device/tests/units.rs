//! What is installed beside the programs says what its readers understand: systemd, udev, and our own command line.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-device");
const INSTALLED: &str = "/usr/local/bin/egm-device";
const UNITS: [&str; 3] = ["egm-broker.service", "egm-serve@.service", "egm-serve@.socket"];

fn config(name: &str) -> String {
    fs::read_to_string(Path::new("../configs").join(name)).unwrap()
}

/// Whether `program` is there; says so where it is not.
fn is_there(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        println!("skipped: {program} is not installed, it did not read what is written for it");
    }
    there
}

#[track_caller]
fn good(output: Output) -> String {
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn systemd_takes_the_units_without_a_word() {
    if !is_there("systemd-analyze") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let names = UNITS.map(|name| name.replace('@', "@vm1"));
    for (unit, name) in UNITS.iter().zip(&names) {
        // The program is not installed where this runs.
        let text = config(&format!("systemd/{unit}")).replace(INSTALLED, PROGRAM);
        fs::write(folder.path().join(name), text).unwrap();
    }
    let mut systemd = Command::new("systemd-analyze");
    systemd.args(["verify", "--man=no"]).args(&names).current_dir(folder.path());
    let said =
        good(systemd.env("SYSTEMD_UNIT_PATH", format!("{}:", folder.path().display())).output().unwrap());
    assert!(!said.contains("egm-"), "{said}");
}

#[test]
fn our_command_line_takes_what_the_units_say() {
    let mut count = 0;
    for line in UNITS.iter().flat_map(|unit| {
        let text = config(&format!("systemd/{unit}"));
        text.lines().filter_map(|line| line.strip_prefix("ExecStart=")).map(str::to_owned).collect::<Vec<_>>()
    }) {
        let words = line.strip_prefix(INSTALLED).unwrap().replace("%i", "vm1");
        // Whatever comes before is read, and refused if it is wrong; then the help ends it.
        good(Command::new(PROGRAM).args(words.split_whitespace()).arg("--help").output().unwrap());
        count += 1;
    }
    assert_eq!(count, 2);
}

#[test]
fn users_and_folders_are_made() {
    if !is_there("systemd-sysusers") || !is_there("systemd-tmpfiles") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    let make = |program: &str, options: &[&str], file: &str| {
        let mut command = Command::new(program);
        command.arg(format!("--root={}", root.path().display())).args(options).arg("-");
        command.stdin(File::open(Path::new("../configs/systemd").join(file)).unwrap());
        good(command.output().unwrap());
    };
    make("systemd-sysusers", &[], "egm-sysusers.conf");
    make("systemd-tmpfiles", &["--create"], "egm-tmpfiles.conf");
    let group = fs::read_to_string(root.path().join("etc/group")).unwrap();
    assert!(group.lines().any(|line| line.starts_with("egm:") && line.ends_with(":egm-serve")), "{group}");
    assert!(root.path().join("run/egm-serve").is_dir());
}

#[test]
fn the_sample_of_devices_has_its_sockets_where_the_units_have_them() {
    let unit = fs::read_to_string("../configs/systemd/egm-serve@.socket").unwrap();
    let pattern = unit.lines().find_map(|line| line.strip_prefix("ListenStream=")).unwrap();
    let sample = fs::read_to_string("../configs/serve/grace.json").unwrap();
    let sample: serde_json::Value = serde_json::from_str(&sample).unwrap();
    let devices = sample["devices"].as_array().unwrap();
    assert!(!devices.is_empty());
    for device in devices {
        let socket = pattern.replace("%i", device["name"].as_str().unwrap());
        assert_eq!(device["socket"].as_str(), Some(&*socket));
    }
}

#[test]
fn udev_takes_the_rules() {
    if !is_there("udevadm") {
        return;
    }
    let mut udevadm = Command::new("udevadm");
    let output =
        udevadm.args(["verify", "--resolve-names=never", "../configs/udev/70-egm.rules"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("Unknown command verb") {
        println!("skipped: udevadm is older than \"verify\" (systemd 254), it did not read the rules");
        return;
    }
    good(output);
}
