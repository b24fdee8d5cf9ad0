//! Machines in a sandbox, by the real program and the kernel.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use egm_fixtures::payload::{Entry, Ports, halt, hello, resets};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Socket of the control API in a machine's folder.
const API: &str = "api.sock";
const STRICT: &[&str] = &["--sandbox", "strict"];
const STRICT_WITH_API: &[&str] = &["--sandbox", "strict", "--api", API];

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

/// A machine with `kernel` and `console`, started with `options`.
struct Machine {
    folder: TempDir,
    child: Child,
}

impl Machine {
    fn start(kernel: &[u8], console: Value, options: &[&str]) -> Self {
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
            "on_reset": "reboot",
        });
        fs::write(file("vm.json"), config.to_string()).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
            .arg("run")
            .arg(file("vm.json"))
            .args(options)
            .current_dir(folder.path())
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

    /// Starts a machine; its guest has printed a line, and sleeps.
    fn sleeping(options: &[&str]) -> Self {
        let mut machine = Self::start(&halt(Ports::USUAL), json!("stdio"), options);
        let mut byte = [0];
        while byte != *b"\n" {
            if machine.child.stdout.as_mut().unwrap().read_exact(&mut byte).is_err() {
                panic!("it ended: {:?}", machine.end());
            }
        }
        machine
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
    for socket in ["vsock", "console", API] {
        assert!(!folder.path().join(socket).exists(), "{socket} is left: {text}");
    }
}

#[test]
fn a_machine_runs_to_its_end_within_each_sandbox_and_removes_its_sockets() {
    if !kvm() {
        return;
    }
    for mode in ["strict", "log", "off"] {
        for options in [&["--sandbox", mode][..], &["--sandbox", mode, "--api", API]] {
            ended_and_gone(Machine::start(&hello(Ports::USUAL, Entry::Pvh), json!("stdio"), options));
        }
    }
}

#[test]
fn a_guest_starts_again_in_place_within_the_strict_sandbox() {
    if !kvm() {
        return;
    }
    for options in [STRICT, STRICT_WITH_API] {
        let machine = Machine::start(&resets(Ports::USUAL, 3), json!("stdio"), options);
        let (_folder, text, code) = machine.end();
        assert_eq!((text.matches("again\n").count(), code), (3, Some(0)), "{text}");
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
    for (options, threads) in [(STRICT, 4), (STRICT_WITH_API, 5)] {
        let machine = Machine::sleeping(options);
        let statuses = statuses(machine.child.id());
        assert!(statuses.len() >= threads, "console, event loop, two vCPUs, API: {statuses:?}");
        let has_api = statuses.iter().any(|status| status.starts_with("Name:\tapi\n"));
        assert_eq!(has_api, options == STRICT_WITH_API, "{statuses:?}");
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
}

/// A client of a machine's API, with one connection.
struct Client(BufReader<UnixStream>);

impl Client {
    fn of(machine: &Machine) -> Self {
        let stream = UnixStream::connect(machine.folder.path().join(API)).unwrap();
        // Longer than each deadline of the API.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(BufReader::new(stream))
    }

    /// Sends `bytes`; an API that refuses them may not take all.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.get_mut().write_all(bytes);
    }

    /// Status and body of the next answer; an answer without a length has no body here.
    fn answer(&mut self) -> (u16, Vec<u8>) {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            match line.trim_end().split_once(' ') {
                Some(("HTTP/1.1", rest)) => status = rest.split(' ').next().unwrap().parse().unwrap(),
                Some(("Content-Length:", value)) => length = value.parse().unwrap(),
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        (status, body)
    }

    fn ask(&mut self, method: &str, target: &str) -> (u16, Vec<u8>) {
        self.send(format!("{method} {target} HTTP/1.1\r\n\r\n").as_bytes());
        self.answer()
    }

    /// The next event of a stream.
    fn event(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

/// Sends each request of the API's table but those that end the machine.
fn ask_everything(machine: &Machine) {
    let mut client = Client::of(machine);
    let table: Value = serde_json::from_slice(&client.ask("GET", "/egm/v1/requests").1).unwrap();
    for request in table.as_array().unwrap() {
        let (method, path) = (request["method"].as_str().unwrap(), request["path"].as_str().unwrap());
        let (target, expected) = match (path, request["built"].as_bool().unwrap()) {
            ("/api/v1/vm.shutdown" | "/api/v1/vmm.shutdown", _) => continue,
            ("/egm/v1/events", _) => ("/egm/v1/events?follow=0", [200; 2]),
            // Nothing is opened in a sandbox.
            ("/egm/v1/devices" | "/egm/v1/slices", _) if method == "PUT" => (path, [409; 2]),
            (path, true) if path.starts_with("/api/v1/vm.add-") => (path, [409; 2]),
            // Without a body.
            ("/api/v1/vm.remove-device" | "/api/v1/vm.snapshot" | "/egm/v1/snapshot", _) => (path, [400; 2]),
            ("/egm/v1/log-level", _) if method == "PUT" => (path, [400; 2]),
            ("/egm/v1/upgrade", _) => (path, [404, 501]),
            (path, true) => (path, [200, 204]),
            (path, false) => (path, [501; 2]),
        };
        let (status, body) = client.ask(method, target);
        assert!(expected.contains(&status), "{method} {target}: {status} {}", String::from_utf8_lossy(&body));
    }
}

/// As many clients as the API takes at a time, beside `others`.
fn crowd(machine: &Machine, others: usize) -> Vec<Client> {
    // vmm/src/api/server.rs keeps places for root.
    let places = if geteuid().is_root() { 16 } else { 12 };
    let mut clients = Vec::new();
    loop {
        let mut client = Client::of(machine);
        match client.ask("GET", "/api/v1/vmm.ping").0 {
            200 => {
                client.send(b"GET "); // one that is idle would lose its place
                clients.push(client);
            }
            // The end of an earlier client may not be noticed yet.
            503 if clients.len() < places - others => std::thread::yield_now(),
            status => {
                assert_eq!(status, 503);
                return clients;
            }
        }
    }
}

#[test]
fn the_api_serves_patient_and_hostile_clients_within_the_sandbox_and_ends_the_machine() {
    if !kvm() {
        return;
    }
    let machine = Machine::sleeping(STRICT_WITH_API);
    let mut reader = Client::of(&machine);
    assert_eq!(reader.ask("GET", "/egm/v1/events").0, 200);
    assert_eq!(reader.event()["event"], "started");
    let mut half = Client::of(&machine);
    half.send(b"GET /api/v1/vm.in");
    // Answers that are longer than a socket takes, to a client that does not read.
    let mut stalled = Client::of(&machine);
    stalled.send(&b"GET /egm/v1/plan HTTP/1.1\r\n\r\n".repeat(500));
    ask_everything(&machine);
    let mut long = Client::of(&machine);
    long.send(&[b"PUT / HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n".to_vec(), vec![0; 1 << 20]].concat());
    assert_eq!(long.answer().0, 413);
    drop(long);
    let mut clients = crowd(&machine, 3);
    clients.iter_mut().for_each(|client| client.send(b"/egm/v1/metrics HTTP/1.1\r\n\r\n"));
    clients.iter_mut().for_each(|client| assert_eq!(client.answer().0, 200));
    assert_eq!(clients[0].ask("PUT", "/api/v1/vm.shutdown").0, 204);
    let last = reader.0.lines().last().unwrap().unwrap();
    assert!(last.contains("\"reason\":\"requested\""), "{last}");
    drop((half, stalled, clients));
    ended_and_gone(machine);
}

#[test]
fn a_console_socket_has_its_clients_within_the_sandbox() {
    if !kvm() {
        return;
    }
    let console = json!({ "type": "socket", "path": "console" });
    let mut machine = Machine::start(&halt(Ports::USUAL), console, STRICT);
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
