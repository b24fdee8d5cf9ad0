//! `egm-device broker` as a process that a signal ends.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod small_host;

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use egm_device::broker::{Client, SliceRequest};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};

/// Killed with the test, if the test fails.
struct Broker(Child);

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(root: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-device"));
    command.args(words).arg("--root").arg(root).current_dir(root);
    command
}

fn broker(root: &Path) -> Broker {
    let mut broker = Broker(command(root, &["broker", "--socket", "broker.sock"]).spawn().unwrap());
    while Client::connect(&root.join("broker.sock")).is_err() {
        assert!(broker.0.try_wait().unwrap().is_none(), "the broker ended");
        std::thread::yield_now();
    }
    broker
}

#[test]
fn a_signal_ends_it_in_order_and_the_next_one_serves() {
    if !rustix::process::geteuid().is_root() || Path::new("/etc/egm-device/policy.json").exists() {
        return println!("skipped: this test takes slices as root, where the host has no policy of its own");
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    small_host::make(root);
    let take = SliceRequest {
        name: "vm7".into(),
        regions: vec!["local".into()],
        size: 4 << 20,
        align: 0,
        class: None,
        wait: false,
    };
    let repair = || {
        let report = command(root, &["ledger", "repair"]).output().unwrap();
        String::from_utf8(report.stdout).unwrap()
    };
    for (signal, is_kept) in [(Signal::TERM, true), (Signal::INT, false)] {
        let mut broker = broker(root);
        let lease = Client::connect(&root.join("broker.sock")).unwrap().take(&take, |_| ()).unwrap();
        let idle = Client::connect(&root.join("broker.sock")).unwrap();
        kill_process(Pid::from_child(&broker.0), signal).unwrap();
        assert_eq!(broker.0.wait().unwrap().code(), Some(0), "{signal:?}");
        assert!(!root.join("broker.sock").exists());
        assert_eq!(poll(&mut [PollFd::new(&lease.connection(), PollFlags::IN)], None), Ok(1));
        assert!(idle.free().is_err(), "its connection is closed");
        assert_eq!(lease.backing().unwrap().size(), 4 << 20, "who has memory keeps it");
        // The broker had this grant and has ended: the record keeps it while its client has the memory.
        if is_kept {
            assert_eq!(repair(), "The record is sound.\n");
            let show = command(root, &["ledger", "show"]).output().unwrap();
            assert!(String::from_utf8(show.stdout).unwrap().contains("quarantined: a descriptor in process"));
        }
        drop(lease);
        let expected = if is_kept {
            "Out of quarantine: 4 MiB of local; it is clean."
        } else {
            "Forgotten: vm7 (process"
        };
        let report = repair();
        assert!(report.contains(expected), "{report}");
    }
}

/// It could not see the processes that map a slice, nor open a device: it would answer "0 free" to every client.
#[test]
fn a_broker_without_privileges_does_not_start_and_names_the_remedy() {
    use std::os::unix::fs::chown;
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    small_host::make(root);
    let binary = root.join("egm-device");
    fs::copy(env!("CARGO_BIN_EXE_egm-device"), &binary).unwrap();
    for path in [root.to_owned(), root.join("etc"), root.join("var/lib"), root.join("run")] {
        fs::create_dir_all(&path).unwrap();
        chown(&path, Some(4001), Some(4001)).unwrap();
    }
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "20", "setpriv", "--reuid=4001", "--regid=4001", "--clear-groups"]);
    command.arg(&binary).args(["broker", "--socket", "broker.sock", "--root"]).arg(root).current_dir(root);
    let output = command.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{error}");
    for part in ["cannot start the broker as user 4001", "CAP_SYS_PTRACE", "help: start it as root"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!root.join("broker.sock").exists());
}

#[test]
fn a_socket_that_cannot_be_made_has_a_remedy() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: a broker starts as root alone");
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    small_host::make(root);
    fs::write(root.join("precious"), "bytes").unwrap();
    for (code, socket, remedy) in [
        (3, "nowhere/broker.sock", "help: make the folder nowhere"),
        (3, "precious", "help: remove the file at that path, which is no socket"),
        (2, &*"s".repeat(120), "help: name a path of 107 bytes at most"),
    ] {
        let output = command(root, &["broker", "--socket", socket]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains("error: cannot listen at ") && error.contains(remedy), "{error}");
    }
    assert_eq!(fs::read(root.join("precious")).unwrap(), b"bytes");
}

/// Without it `/proc/PID/fd` of other users is closed, and a descriptor that a tenant keeps is not found.
#[test]
fn a_broker_that_may_not_read_other_users_descriptors_does_not_start() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root gives up a capability");
    }
    let root = tempfile::tempdir().unwrap();
    small_host::make(root.path());
    let mut setpriv = Command::new("setpriv");
    setpriv.args([
        "--bounding-set=-dac_read_search",
        "--no-new-privs",
        env!("CARGO_BIN_EXE_egm-device"),
        "broker",
        "--socket",
    ]);
    let output =
        setpriv.arg(root.path().join("broker.sock")).arg("--root").arg(root.path()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    for part in ["cannot start the broker as user 0: the process has no CAP_DAC_READ_SEARCH", "descriptor"] {
        assert!(error.contains(part), "{error}");
    }
}
