//! Machines in a sandbox, by the real program and the kernel.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egm_fixtures::payload::{Entry, Ports, halt, hello};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Whether KVM is available; prints why not.
fn kvm() -> bool {
    let opened = fs::File::options().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| println!("skipped: /dev/kvm: {error}")).is_ok()
}

/// A machine with every device that needs no help of the host.
fn devices() -> Value {
    json!([
        { "type": "virtio-blk", "path": "disk" },
        { "type": "virtio-rng" },
        { "type": "virtio-vsock", "cid": 3, "socket": "vsock" },
    ])
}

/// A machine with `kernel` and `console`, started with `--sandbox` in `mode`.
struct Machine {
    folder: TempDir,
    child: Child,
}

impl Machine {
    fn start(kernel: &[u8], console: Value, mode: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::write(file("kernel"), kernel).unwrap();
        fs::File::create(file("disk")).unwrap().set_len(1 << 20).unwrap();
        let config = json!({
            "cpus": { "count": 2 },
            "memory": { "size": "16MiB" },
            // Memory of the process: no other process has to return it.
            "egm": [{ "region": "local", "size": "16MiB", "node": 1 }],
            "boot": { "kernel": "kernel" },
            "console": console,
            "devices": devices(),
        });
        fs::write(file("vm.json"), config.to_string()).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
            .arg("run")
            .arg(file("vm.json"))
            .args(["--sandbox", mode])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { folder, child }
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// What it printed, and its exit code.
    fn end(mut self) -> (TempDir, String, Option<i32>) {
        let mut text = Vec::new();
        self.child.stdout.take().unwrap().read_to_end(&mut text).unwrap();
        self.child.stderr.take().unwrap().read_to_end(&mut text).unwrap();
        (self.folder, String::from_utf8_lossy(&text).into_owned(), self.child.wait().unwrap().code())
    }
}

fn ended_and_gone(machine: Machine) {
    let (folder, text, code) = machine.end();
    assert_eq!(code, Some(0), "{text}");
    for socket in ["vsock", "console"] {
        assert!(!folder.path().join(socket).exists(), "{socket} is left: {text}");
    }
}

#[test]
fn a_machine_runs_to_its_end_within_each_sandbox_and_removes_its_sockets() {
    if !kvm() {
        return;
    }
    for mode in ["strict", "log", "off"] {
        let machine = Machine::start(&hello(Ports::USUAL, Entry::Pvh), json!("stdio"), mode);
        ended_and_gone(machine);
    }
}

/// The statuses of the threads of `process`, but for the kernel's own.
fn statuses(process: u32) -> Vec<String> {
    let threads = fs::read_dir(Path::new("/proc").join(process.to_string()).join("task")).unwrap();
    // One that has ended meanwhile has none.
    let statuses =
        threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("status")).ok());
    let of_kernel = |status: &String| {
        ["kvm", "iou-", "vhost-"].iter().any(|name| status.starts_with(&format!("Name:\t{name}")))
    };
    statuses.filter(|status| !of_kernel(status)).collect()
}

#[test]
fn each_thread_of_a_sandboxed_machine_is_confined_while_its_guest_runs() {
    if !kvm() {
        return;
    }
    let mut machine = Machine::start(&halt(Ports::USUAL), json!("stdio"), "strict");
    let mut byte = [0];
    while byte != *b"\n" {
        if machine.child.stdout.as_mut().unwrap().read_exact(&mut byte).is_err() {
            panic!("it ended: {:?}", machine.end());
        }
    }
    let statuses = statuses(machine.child.id());
    assert!(statuses.len() >= 4, "console, event loop, two vCPUs: {statuses:?}");
    for status in statuses {
        for line in
            ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"]
        {
            assert!(status.contains(line), "{line}: {status}");
        }
    }
    kill_process(Pid::from_child(&machine.child), Signal::TERM).unwrap();
    ended_and_gone(machine);
}

#[test]
fn a_console_socket_has_its_clients_within_the_sandbox() {
    if !kvm() {
        return;
    }
    let console = json!({ "type": "socket", "path": "console" });
    let mut machine = Machine::start(&halt(Ports::USUAL), console, "strict");
    let path = machine.folder.path().join("console");
    let mut client = loop {
        match UnixStream::connect(&path) {
            Ok(client) => break client,
            Err(error) => assert!(machine.is_running(), "{error}"),
        }
    };
    // From the threads of its vCPUs on, a machine handles signals.
    while !statuses(machine.child.id()).iter().any(|status| status.starts_with("Name:\tvcpu1\n")) {
        assert!(machine.is_running());
    }
    kill_process(Pid::from_child(&machine.child), Signal::TERM).unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    ended_and_gone(machine);
}

/// Runs the program with `config` as its file or standard input.
fn refused(config: &Value, is_stdin: bool) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.json");
    fs::write(&file, config.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-vmm"));
    command.args(["run", "--sandbox", "strict"]).current_dir(folder.path());
    match is_stdin {
        true => command.arg("-").stdin(fs::File::open(&file).unwrap()),
        false => command.arg("vm.json").stdin(Stdio::null()),
    };
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_machine_that_a_sandbox_cannot_hold_is_refused_with_the_reason() {
    let config = |region: &str, form: &str| {
        json!({
            "memory": { "size": "64MiB" },
            "boot": { "kernel": "kernel" },
            "egm": [{ "region": region, "size": "16MiB", "node": 1, "as": form }],
        })
    };
    // A slice that is a PCI function is near to a node of the guest.
    let mut device = config("local", "device");
    device["egm"][0]["node"] = json!(0);
    let (code, text) = refused(&device, false);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("error: cannot sandbox the machine: slice \"egm0\" is a PCI function"), "{text}");
    let (code, text) = refused(&config("hugetlb", "memory"), true);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("no other process can return") && text.contains("help: "), "{text}");
}
