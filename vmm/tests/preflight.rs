//! `egm-vmm check FILE` of a machine that this host cannot run: a row for each item, with its remedy, and no effects.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use egm_fixtures::payload::{Entry, Ports, hello};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Exit codes, as `Blame` has them (vfio/report/src/report.rs).
const CONFIGURATION: i32 = 2;
const HOST: i32 = 3;

/// A folder with a kernel, an empty folder, a disk and a file `vm.json`.
struct Machine {
    folder: TempDir,
}

/// Results of the program.
struct Checked {
    code: i32,
    out: String,
    error: String,
}

impl Machine {
    fn new(config: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("kernel"), hello(Ports::USUAL, Entry::Pvh)).unwrap();
        fs::create_dir(path("folder")).unwrap();
        File::create(path("disk")).unwrap().set_len(1 << 20).unwrap();
        fs::write(path("vm.json"), config.to_string()).unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn check(&self, words: &[&str]) -> Checked {
        let mut command = Command::new(env!("CARGO_BIN_EXE_egm-vmm"));
        let output =
            command.args(["check", "vm.json"]).args(words).current_dir(self.path()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Checked { code: output.status.code().unwrap(), out: text(output.stdout), error: text(output.stderr) }
    }

    /// The rows of `--json`, with the exit code.
    fn rows(&self) -> (i32, Vec<Value>) {
        let Checked { code, out, error } = self.check(&["--json"]);
        let json: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
        (code, json["rows"].as_array().unwrap().clone())
    }

    /// Names of the files in the folder, sorted.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[track_caller]
fn row<'r>(rows: &'r [Value], subject: &str) -> &'r Value {
    rows.iter().find(|row| row["subject"] == subject).unwrap_or_else(|| panic!("no {subject} in {rows:?}"))
}

fn config(devices: &Value) -> Value {
    json!({
        "memory": { "size": "64MiB" },
        "boot": { "kernel": "kernel" },
        "console": "null",
        "devices": devices
    })
}

#[test]
fn all_that_a_machine_lacks_is_shown_at_once_with_remedies() {
    let mut config = config(&json!([
        { "type": "virtio-blk", "id": "data", "path": "none.raw" },
        { "type": "virtio-net", "id": "net", "tap": "egm-no-such0" },
        { "type": "virtio-rng" }
    ]));
    config["boot"] = json!({ "kernel": "none", "initramfs": "folder" });
    let machine = Machine::new(&config);
    let Checked { code, out, .. } = machine.check(&[]);
    assert_eq!(code, CONFIGURATION, "{out}");
    let (_, verdict) = out.split_once("\nVerdict\n").unwrap();
    assert!(verdict.starts_with("  machine vm cannot start: "), "{out}");
    for (subject, error, help) in [
        ("kernel", "cannot open boot.kernel ", "set \"boot.kernel\" to a regular file"),
        ("initramfs", "cannot open boot.initramfs ", "set \"boot.initramfs\" to a regular file"),
        ("disk \"data\"", "cannot open disk ", "set \"path\" to a file that exists"),
        ("network \"net\"", "tap egm-no-such0 does not exist", "ip tuntap add egm-no-such0 mode tap"),
    ] {
        let start = format!("  cannot {subject}: {error}");
        let at = verdict.find(&start).unwrap_or_else(|| panic!("no {start:?} in\n{out}"));
        let after = verdict[at..].lines().nth(1).unwrap();
        assert!(after.starts_with(&format!("         help: {help}")), "{subject}:\n{out}");
    }
    assert!(out.contains("  plan "), "the plan is judged all the same:\n{out}");
    let (code, rows) = machine.rows();
    assert_eq!(code, CONFIGURATION);
    for subject in ["kernel", "initramfs", "disk \"data\"", "network \"net\""] {
        let row = row(&rows, subject);
        assert!(row["state"] == "cannot" && row["help"].is_string(), "{row}");
    }
    assert_eq!(row(&rows, "console")["state"], "ok");
}

/// The configuration's own rule; no file is inspected for a machine that is not described.
#[test]
fn a_tap_name_that_is_too_long_is_refused_as_by_every_command() {
    let machine = Machine::new(&config(&json!([{ "type": "virtio-net", "tap": "sixteen-bytes-xx" }])));
    let Checked { code, out, error } = machine.check(&[]);
    assert_eq!((code, out.as_str()), (CONFIGURATION, ""), "{error}");
    assert!(error.contains("devices[0].tap: ") && error.contains("sixteen-bytes-xx"), "{error}");
}

#[test]
fn a_host_without_the_tap_alone_ends_with_3() {
    let tap = json!([{ "type": "virtio-net", "id": "net", "tap": "egm-no-such0", "vhost": false }]);
    let (code, rows) = Machine::new(&config(&tap)).rows();
    assert_eq!(code, HOST, "{rows:?}");
    assert_eq!(row(&rows, "kernel")["state"], "ok");
    assert!(row(&rows, "kernel")["found"].as_str().unwrap().contains(": ELF, "), "{rows:?}");
}

#[test]
fn nothing_is_made_locked_or_connected() {
    let devices = json!([
        { "type": "virtio-blk", "id": "disk", "path": "disk" },
        { "type": "virtio-vsock", "cid": 3, "socket": "vsock" },
        { "type": "vfio-user", "id": "far", "socket": "server" }
    ]);
    let mut config = config(&devices);
    config["console"] = json!({ "type": "file", "path": "console" });
    let machine = Machine::new(&config);
    let server = UnixListener::bind(machine.path().join("server")).unwrap();
    server.set_nonblocking(true).unwrap();
    let disk = File::open(machine.path().join("disk")).unwrap();
    let before = machine.files();
    let (_, rows) = machine.rows();
    assert_eq!(row(&rows, "disk \"disk\"")["state"], "ok", "{rows:?}");
    assert_eq!(row(&rows, "vsock \"vsock0\"")["state"], "ok", "{rows:?}");
    assert_eq!(row(&rows, "console")["state"], "ok", "{rows:?}");
    assert_ne!(row(&rows, "server \"far\"")["state"], "cannot", "{rows:?}");
    assert_eq!(machine.files(), before);
    assert_eq!(server.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    disk.try_lock().unwrap();
}

#[test]
fn a_disk_of_another_format_or_an_odd_size_is_named() {
    let devices = json!([
        { "type": "virtio-blk", "id": "image", "path": "image", "read_only": true },
        { "type": "virtio-blk", "id": "odd", "path": "odd" }
    ]);
    let machine = Machine::new(&config(&devices));
    fs::write(machine.path().join("image"), [&b"QFI\xfb"[..], &[0; 1020]].concat()).unwrap();
    fs::write(machine.path().join("odd"), [0; 700]).unwrap();
    let (code, rows) = machine.rows();
    assert_eq!(code, CONFIGURATION, "{rows:?}");
    let image = row(&rows, "disk \"image\"");
    assert!(image["found"].as_str().unwrap().ends_with("begins as a qcow2 image does"), "{image}");
    assert!(image["help"].as_str().unwrap().contains("qemu-img convert -O raw"), "{image}");
    assert_eq!(row(&rows, "disk \"odd\"")["state"], "note");
}

#[test]
fn a_machine_without_host_functions_is_judged_too_and_a_recorded_host_states_what_it_does_not_show() {
    let output = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
        .args(["check", "configs/demo.json", "--facts", "configs/facts/x86-server.json"])
        .current_dir("..")
        .output()
        .unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{out}");
    for item in ["kernel", "initramfs", "console", "disk \"disk0\"", "network \"net0\"", "vsock \"vsock0\""] {
        let line = out.lines().find(|line| line.trim_start().starts_with(item));
        assert!(line.is_some_and(|line| line.ends_with("  not judged  recorded host")), "{item}:\n{out}");
    }
    assert!(out.contains("  KVM ") && out.contains("at most 1024 vCPUs, as recorded"), "{out}");
    assert!(out.contains("machine demo is ready as far as judged: "), "{out}");
    assert!(!out.contains("functions"), "{out}");
}
