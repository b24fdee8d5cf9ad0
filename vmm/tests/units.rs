//! systemd understands the units of machines, and `egm-vmm` their command lines.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
const UNITS: [&str; 4] =
    ["egm-vmm@.service", "egm-vmm-broker@.service", "egm-vmm-serve@.service", "egm-bind.service"];
/// Those with an API.
const MACHINES: [&str; 3] = ["egm-vmm@.service", "egm-vmm-broker@.service", "egm-vmm-serve@.service"];

fn unit(name: &str) -> String {
    fs::read_to_string(Path::new("../configs/systemd").join(name)).unwrap()
}

#[track_caller]
fn good(output: &Output) -> String {
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn systemd_takes_the_units_of_machines_without_a_word() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return println!("skipped: systemd-analyze is not installed, it did not read the units");
    }
    let folder = tempfile::tempdir().unwrap();
    for name in UNITS.iter().chain(&["egm-broker.service"]) {
        // The programs are not installed where this runs.
        let text = unit(name).replace("/usr/local/bin/egm-vmm ", &format!("{PROGRAM} "));
        let text = text.replace("/usr/local/bin/egm-device ", &format!("{PROGRAM} "));
        fs::write(folder.path().join(name.replace('@', "@vm1")), text).unwrap();
    }
    let mut systemd = Command::new("systemd-analyze");
    systemd.args(["verify", "--man=no"]).args(UNITS.map(|name| name.replace('@', "@vm1")));
    systemd.env("SYSTEMD_UNIT_PATH", format!("{}:", folder.path().display())).current_dir(folder.path());
    let text = good(&systemd.output().unwrap());
    assert!(!text.contains("egm-"), "{text}");
}

#[test]
fn the_command_line_takes_what_the_units_of_machines_have() {
    for name in UNITS {
        let text = unit(name);
        let line =
            text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/egm-vmm ")).unwrap();
        let words = line.replace("%i", "vm1").replace("$FUNCTIONS", "0009:01:00.0 0000:18:00.0");
        // The arguments before `--help` are parsed, and refused if they are wrong; then the help ends it.
        good(&Command::new(PROGRAM).args(words.split_whitespace()).arg("--help").output().unwrap());
    }
}

/// A second SIGTERM ends a machine's wait for its disks, and cuts a scrub short.
#[test]
fn a_stop_reaches_a_machine_once() {
    for name in MACHINES {
        assert!(unit(name).contains("\nKillMode=mixed\n"), "{name}");
    }
}

/// A core file has the guest's memory.
#[test]
fn machines_leave_no_core_dumps() {
    for name in MACHINES {
        assert!(unit(name).contains("\nLimitCORE=0\n"), "{name}");
    }
}

#[test]
fn machines_of_the_broker_keep_few_privileges() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return println!("skipped: systemd-analyze is not installed, it did not read the units");
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["egm-vmm-broker@.service", "egm-vmm-serve@.service"] {
        let path = folder.path().join(name.replace('@', "@vm1"));
        fs::write(&path, unit(name)).unwrap();
        let mut systemd = Command::new("systemd-analyze");
        // In tenths: more than 3.0 is an error.
        good(&systemd.args(["security", "--offline=yes", "--threshold=30"]).arg(&path).output().unwrap());
    }
}

#[test]
fn a_machine_is_stopped_by_its_api_and_has_time_for_it() {
    for name in MACHINES {
        let unit = unit(name);
        let value =
            |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap();
        // systemd stops a service that has ended, too: without "-" it would start a guest again that powered off.
        let stop = value("ExecStop").strip_prefix("-/usr/local/bin/egm-vmm ").unwrap();
        // The arguments before `--help` are parsed, and refused if they are wrong; then the help ends it.
        let words = stop.replace("%i", "vm1");
        good(&Command::new(PROGRAM).args(words.split_whitespace()).arg("--help").output().unwrap());
        let socket = |line: &str| line.split("--api ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        assert_eq!(socket(value("ExecStart")), socket(stop), "{name}");
        assert_eq!(socket(stop), format!("/run/{}/api.sock", value("RuntimeDirectory")), "{name}");
        assert_eq!(value("RuntimeDirectoryMode"), "0700", "{name}");
        let wait: u64 = stop.rsplit(' ').next().unwrap().parse().unwrap();
        let limit: u64 = value("TimeoutStopSec").strip_suffix("min").unwrap().parse().unwrap();
        assert!(limit * 60 > wait + 60, "{name}: {limit} min for {wait} s and the disks");
    }
}

/// systemd sends SIGTERM after the last of its commands: it would cut the scrub by root's process short.
#[test]
fn the_stop_of_a_machine_of_root_waits_for_its_scrub() {
    let unit = unit("egm-vmm@.service");
    let last = unit.lines().rfind(|line| line.starts_with("ExecStop=")).unwrap();
    assert_eq!(last, "ExecStop=-/usr/bin/tail --pid=${MAINPID} -f /dev/null");
}
