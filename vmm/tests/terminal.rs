//! Treatment of the terminal that egm-vmm is started from.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egm_fixtures::payload::{Entry, Ports};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use serde_json::json;
use tempfile::TempDir;

/// The two ends of a terminal: the person's and the program's.
fn terminal() -> (OwnedFd, File) {
    let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let name = ptsname(&person, Vec::new()).unwrap();
    let program = File::options().read(true).write(true).open(Path::new(name.to_str().unwrap())).unwrap();
    (person, program)
}

/// Whether KVM is available; prints why not.
fn kvm() -> bool {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| println!("skipped: /dev/kvm: {error}")).is_ok()
}

fn start(payload: &[u8], stdin: Stdio, stderr: Stdio) -> (TempDir, Child) {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({ "memory": { "size": "15MiB", "prefault": true }, "boot": { "kernel": "kernel" } });
    std::fs::write(folder.path().join("kernel"), payload).unwrap();
    std::fs::write(folder.path().join("vm.json"), config.to_string()).unwrap();
    let child = Command::new("timeout")
        .args(["--foreground", "--signal=KILL", "60", env!("CARGO_BIN_EXE_egm-vmm"), "run"])
        .arg(folder.path().join("vm.json"))
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .unwrap();
    (folder, child)
}

#[test]
fn the_terminal_is_the_guests_while_it_runs_and_as_before_afterwards() {
    if !kvm() {
        return;
    }
    let (person, program) = terminal();
    let modes = || tcgetattr(&person).unwrap().local_modes;
    let before = modes();
    assert!(before.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    let payload = egm_fixtures::payload::halt(Ports::USUAL);
    let (_folder, mut child) = start(&payload, program.try_clone().unwrap().into(), Stdio::null());
    let mut byte = [0];
    while byte != *b"\n" {
        child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
    }
    assert!(!modes().intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(modes(), before);
}

#[test]
fn a_person_sees_how_far_prefault_is_and_a_log_file_does_not() {
    if !kvm() {
        return;
    }
    let payload = egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh);
    let (person, program) = terminal();
    let (_folder, mut child) = start(&payload, Stdio::null(), program.into());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut seen = [0; 4096];
    let length = rustix::io::read(&person, &mut seen).unwrap();
    let seen = String::from_utf8_lossy(&seen[..length]);
    assert!(
        seen.contains("memory present: 14.875 MiB of 14.875 MiB in ") && seen.ends_with('\n'),
        "{seen:?}"
    );

    let (_folder, child) = start(&payload, Stdio::null(), Stdio::piped());
    let output = child.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{log}");
    assert!(
        log.starts_with("memory: ") && log.lines().count() == 1 && !log.contains(['\r', '\x1b']),
        "{log:?}"
    );
}
