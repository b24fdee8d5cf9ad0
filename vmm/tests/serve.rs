//! Machines one after another by the real program: created, started, ended and started again by its API.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use egm_fixtures::payload::{Entry, Ports, halt, hello, resets};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
/// Exit code (vmm/src/error.rs).
const CONFIGURATION: i32 = 2;
const REBOOTS: usize = 200;

/// `egm-vmm serve` in a folder with kernels: `halt.elf` sleeps, `hello.elf` powers off, `resets.elf` after two resets.
struct Serve {
    folder: TempDir,
    child: Child,
}

/// An answer of the API.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u16,
    body: String,
}

impl Answer {
    #[track_caller]
    fn texts(&self) -> Vec<String> {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Whether machines can run here; prints why not.
fn kvm() -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: /dev/kvm: {error}");
            false
        }
    }
}

fn program(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(words).current_dir(folder).env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A configuration of ours with `kernel`.
fn ours(kernel: &str) -> String {
    let devices = json!([{ "id": "random", "type": "virtio-rng", "root_port": false }]);
    let config = json!({
        "name": "vm1",
        "memory": { "size": "16MiB" },
        "boot": { "kernel": kernel },
        "devices": devices,
        "console": "null",
    });
    config.to_string()
}

impl Serve {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("halt.elf"), halt(Ports::USUAL)).unwrap();
        fs::write(folder.path().join("hello.elf"), hello(Ports::USUAL, Entry::Pvh)).unwrap();
        fs::write(folder.path().join("resets.elf"), resets(Ports::USUAL, 2)).unwrap();
        let child = program(folder.path(), &["serve", "--api", "vm.sock"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut serve = Self { folder, child };
        while UnixStream::connect(serve.path()).is_err() {
            assert_eq!(serve.child.try_wait().unwrap(), None, "it ends");
            std::thread::yield_now();
        }
        serve
    }

    /// One with a created machine of `kernel`.
    #[track_caller]
    fn created(kernel: &str) -> Self {
        let serve = Self::start();
        serve.done("/egm/v1/machine", &ours(kernel));
        serve
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }

    /// Sends a request, and does not wait for its answer.
    fn send(&self, method: &str, path: &str, body: &str) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        client.write_all(request.as_bytes()).unwrap();
        client
    }

    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        answer(self.send(method, path, body)).unwrap_or_else(|| panic!("{method} {path} has no answer"))
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "")
    }

    fn put(&self, path: &str) -> Answer {
        self.ask("PUT", path, "")
    }

    /// Requires that a request is carried out.
    #[track_caller]
    fn done(&self, path: &str, body: &str) {
        let answer = self.ask("PUT", path, body);
        assert_eq!(answer, Answer { status: 204, body: String::new() }, "{path}");
    }

    #[track_caller]
    fn state(&self) -> String {
        self.get("/egm/v1/machine").json()["state"].as_str().unwrap().to_owned()
    }

    /// Follows the events from before `action` until the stream ends: that is when the machine is over.
    fn events_during(&self, action: impl FnOnce()) -> Vec<Value> {
        let mut lines = BufReader::new(self.send("GET", "/egm/v1/events", "")).lines().map(Result::unwrap);
        while !lines.next().unwrap().is_empty() {}
        action();
        lines.map(|line| serde_json::from_str(&line).unwrap()).collect()
    }

    fn ctl(&self, words: &str) -> Output {
        let words = ["ctl", "--api", "vm.sock"].into_iter().chain(words.split(' '));
        program(self.folder.path(), &words.collect::<Vec<_>>()).output().unwrap()
    }

    #[track_caller]
    fn ctl_done(&self, words: &str) {
        let output = self.ctl(words);
        assert!(output.status.success(), "{words}: {output:?}");
    }

    /// The program's end: its exit code and messages.
    #[track_caller]
    fn assert_ends_well(mut self) {
        let mut messages = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{messages}");
        assert!(!self.path().exists(), "{messages}");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Numbers of the descriptors that an execution of another program would not close; `None` where this user may not
    /// look at them.
    fn inheritable(&self) -> Option<BTreeSet<String>> {
        const CLOSED_AT_EXECUTION: u32 = 0o2_000_000; // O_CLOEXEC in asm-generic/fcntl.h
        let is_kept = |info: &str| {
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            u32::from_str_radix(flags.trim(), 8).unwrap() & CLOSED_AT_EXECUTION == 0
        };
        let infos = fs::read_dir(format!("/proc/{}/fdinfo", self.child.id())).ok()?.map(Result::unwrap);
        // One that is closed meanwhile has no text.
        let texts = infos.filter_map(|info| Some((info.file_name(), fs::read_to_string(info.path()).ok()?)));
        let kept = texts.filter(|(_, text)| is_kept(text));
        Some(kept.map(|(number, _)| number.into_string().unwrap()).collect())
    }

    /// Its open descriptors; `None` where this user may not look at them.
    fn descriptors(&self) -> Option<usize> {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).ok().map(Iterator::count)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The answer that comes on `client`; `None` when it is closed without one.
fn answer(mut client: UnixStream) -> Option<Answer> {
    let mut bytes = Vec::new();
    let _ = client.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    Some(Answer { status, body: body.to_owned() })
}

#[test]
fn without_a_machine_each_request_has_its_answer_and_the_program_ends_by_one() {
    let serve = Serve::start();
    let ping = serve.get("/api/v1/vmm.ping").json();
    assert_eq!(ping["pid"].as_u64(), Some(serve.child.id().into()));
    assert_eq!(serve.state(), "empty");
    assert_eq!(serve.get("/api/v1/vm.info").status, 404);
    for request in ["vm.boot", "vm.shutdown", "vm.reboot", "vm.power-button"] {
        let answer = serve.put(&format!("/api/v1/{request}"));
        assert_eq!((answer.status, answer.texts().len()), (404, 2), "{request}: {answer:?}");
    }
    serve.done("/api/v1/vm.delete", "");
    serve.done("/api/v1/vmm.shutdown", "");
    serve.assert_ends_well();
}

#[test]
fn a_created_machine_is_shown_refused_twice_and_deleted() {
    let serve = Serve::created("halt.elf");
    assert_eq!(serve.state(), "created");
    let info = serve.get("/api/v1/vm.info").json();
    assert_eq!((&info["state"], &info["memory_actual_size"]), (&json!("Created"), &json!(16 << 20)));
    assert_eq!(serve.ask("PUT", "/egm/v1/machine", &ours("halt.elf")).status, 409);
    for request in ["vm.shutdown", "vm.reboot", "vm.power-button"] {
        assert_eq!(serve.put(&format!("/api/v1/{request}")).status, 409, "{request}");
    }
    let listed = program(serve.folder.path(), &["list", "--dir", ".", "--json"]).output().unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((&listed[0]["state"], &listed[0]["machine"]["name"]), (&json!("created"), &json!("vm1")));
    serve.done("/api/v1/vm.delete", "");
    assert_eq!(serve.state(), "empty");
    serve.signal(Signal::TERM);
    serve.assert_ends_well();
}

#[test]
fn a_field_of_cloud_hypervisor_that_no_machine_has_is_refused_with_its_remedy() {
    let serve = Serve::start();
    let body = json!({
        "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
        "payload": { "kernel": "halt.elf", "firmware": "OVMF.fd" },
        "tpm": { "socket": "tpm.sock" },
        "console": { "mode": "Off" },
    });
    let refused = serve.ask("PUT", "/api/v1/vm.create", &body.to_string());
    let texts = refused.texts();
    assert_eq!((refused.status, texts.len()), (400, 3), "{texts:?}");
    for (key, remedy) in [
        ("payload.firmware: cannot start firmware", "name the kernel in payload.kernel"),
        ("tpm: cannot offer a TPM", "leave tpm out"),
    ] {
        assert!(texts.iter().any(|text| text.contains(key) && text.contains(remedy)), "{key}: {texts:?}");
    }
    assert_eq!(serve.state(), "empty");
    let unknown = serve.ask("PUT", "/egm/v1/machine", "{ \"memroy\": 1 }");
    assert!(unknown.status == 400 && unknown.body.contains("memroy"), "{unknown:?}");
    assert_eq!(serve.put("/api/v1/vm.create").status, 400, "without a body");
}

#[test]
fn what_cannot_last_over_an_execution_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for option in [["--user", "nobody"], ["--sandbox", "strict"]] {
        let words = ["serve", "--api", "vm.sock"].into_iter().chain(option);
        let output = program(folder.path(), &words.collect::<Vec<_>>()).output().unwrap();
        assert_eq!(output.status.code(), Some(CONFIGURATION), "{output:?}");
        assert!(text(&output.stderr).contains("\n  help: "), "{output:?}");
    }
}

#[test]
fn a_machine_is_created_started_ended_started_again_and_deleted() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("halt.elf");
    serve.done("/api/v1/vm.boot", "");
    assert_eq!(serve.get("/api/v1/vm.info").json()["state"], "Running");
    assert_eq!(serve.put("/api/v1/vm.boot").status, 409);
    assert_eq!(serve.ask("PUT", "/egm/v1/machine", &ours("halt.elf")).status, 409);
    let events = serve.events_during(|| serve.done("/api/v1/vm.shutdown", ""));
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["reason"]), (&json!("stopped"), &json!("requested")), "{events:?}");
    let machine = serve.get("/egm/v1/machine").json();
    assert_eq!((&machine["state"], &machine["last_reason"]), (&json!("created"), &json!("requested")));
    assert_eq!(machine["pid"].as_u64(), Some(serve.child.id().into()), "the process stays");
    let kept = serve.get("/egm/v1/events?follow=0").body;
    assert!(kept.contains("\"event\":\"ready\"") && kept.contains("\"event\":\"lost\""), "{kept}");
    serve.done("/api/v1/vm.boot", "");
    serve.done("/api/v1/vm.reboot", "");
    // It starts by itself: the first answer comes when the program is executed again.
    while serve.state() != "running" {
        std::thread::yield_now();
    }
    serve.done("/api/v1/vm.delete", "");
    assert_eq!(serve.state(), "empty");
    serve.done("/api/v1/vmm.shutdown", "");
    serve.assert_ends_well();
}

#[test]
fn a_guest_that_resets_starts_again_unless_on_reset_is_exit() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("resets.elf");
    let names = |events: &[Value]| -> Vec<String> {
        events.iter().map(|event| event["event"].as_str().unwrap().to_owned()).collect()
    };
    let events = serve.events_during(|| serve.done("/api/v1/vm.boot", ""));
    assert_eq!(names(&events), ["ready", "started", "reset", "reset", "stopped"], "{events:?}");
    assert_eq!(events.last().unwrap()["reason"], "powered-off");
    serve.done("/api/v1/vm.delete", "");
    let mut config: Value = serde_json::from_str(&ours("resets.elf")).unwrap();
    config["on_reset"] = json!("exit");
    serve.done("/egm/v1/machine", &config.to_string());
    let events = serve.events_during(|| serve.done("/api/v1/vm.boot", ""));
    assert_eq!(events.last().unwrap()["reason"], "reset", "{events:?}");
    assert_eq!(serve.state(), "created");
}

#[test]
fn a_document_of_cloud_hypervisor_runs_and_the_program_ends_with_its_machine() {
    if !kvm() {
        return;
    }
    let serve = Serve::start();
    let body = json!({
        "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
        "memory": { "size": 64 << 20 },
        "payload": { "kernel": "halt.elf" },
        "serial": { "mode": "Null" },
        "console": { "mode": "Off" },
    });
    serve.done("/api/v1/vm.create", &body.to_string());
    assert_eq!(serve.get("/egm/v1/machine").json()["name"], "vm", "the name of the socket");
    serve.done("/api/v1/vm.boot", "");
    let hole = 384 << 10; // below 1 MiB
    assert_eq!(serve.get("/api/v1/vm.info").json()["memory_actual_size"], (64 << 20) - hole);
    serve.done("/api/v1/vmm.shutdown", "");
    serve.assert_ends_well();
}

#[test]
fn a_machine_that_cannot_start_is_an_error_with_its_remedy_and_stays_created() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("later.elf");
    let failed = serve.put("/api/v1/vm.boot");
    let texts = failed.texts();
    assert_eq!((failed.status, texts.len()), (500, 2), "{texts:?}");
    assert!(texts[0].contains("later.elf"), "{texts:?}");
    let machine = serve.get("/egm/v1/machine").json();
    assert_eq!((&machine["state"], &machine["last_reason"]), (&json!("created"), &json!("failed")));
    let info = serve.get("/api/v1/vm.info").json();
    assert!(info["last_text"].as_str().unwrap().contains("later.elf"), "{info}");
    fs::copy(serve.folder.path().join("halt.elf"), serve.folder.path().join("later.elf")).unwrap();
    serve.done("/api/v1/vm.boot", "");
    assert_eq!(serve.state(), "running");
    serve.signal(Signal::TERM);
    serve.assert_ends_well();
}

#[test]
fn a_guest_that_powers_off_leaves_its_machine_created() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("hello.elf");
    let events = serve.events_during(|| serve.done("/api/v1/vm.boot", ""));
    assert_eq!(events.last().unwrap()["reason"], "powered-off", "{events:?}");
    let machine = serve.get("/egm/v1/machine").json();
    assert_eq!((&machine["state"], &machine["last_reason"]), (&json!("created"), &json!("powered-off")));
}

#[test]
fn a_client_that_is_gone_before_its_answer_holds_up_nothing() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("halt.elf");
    drop(serve.send("PUT", "/api/v1/vm.boot", ""));
    while serve.state() != "running" {
        std::thread::yield_now();
    }
    let events = serve.events_during(|| drop(serve.send("PUT", "/api/v1/vm.shutdown", "")));
    assert_eq!(events.last().unwrap()["event"], "stopped");
    assert_eq!(serve.state(), "created");
}

#[test]
fn the_client_creates_starts_and_ends_machines() {
    if !kvm() {
        return;
    }
    let serve = Serve::start();
    assert_eq!(serve.ctl("boot").status.code(), Some(CONFIGURATION), "no machine is created");
    fs::write(serve.folder.path().join("vm.json"), ours("halt.elf")).unwrap();
    serve.ctl_done("create vm.json");
    let early = serve.ctl("shutdown --timeout 0");
    assert!(!early.status.success() && text(&early.stderr).contains("not started"), "{early:?}");
    serve.ctl_done("boot");
    assert_eq!(serve.state(), "running");
    serve.ctl_done("reboot");
    while serve.state() != "running" {
        std::thread::yield_now();
    }
    serve.ctl_done("shutdown --timeout 0");
    assert_eq!(serve.state(), "created");
    serve.ctl_done("delete");
    assert_eq!(serve.state(), "empty");
}

#[test]
fn the_log_level_is_set_for_later_machines_too() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("halt.elf");
    assert_eq!(serve.get("/egm/v1/log-level").body, r#"{"level":"info"}"#);
    let wrong = serve.ask("PUT", "/egm/v1/log-level", r#"{"level":"loud"}"#);
    assert!(wrong.status == 400 && wrong.body.contains("cannot read the level"), "{wrong:?}");
    serve.ctl_done("log-level debug");
    serve.done("/api/v1/vm.boot", "");
    serve.done("/api/v1/vm.shutdown", "");
    assert_eq!(serve.get("/egm/v1/log-level").body, r#"{"level":"debug"}"#);
    let shown = serve.ctl("log-level");
    assert!(text(&shown.stdout).contains("debug"), "{shown:?}");
}

#[test]
fn an_execution_of_the_program_closes_every_descriptor_of_a_machine() {
    if !kvm() {
        return;
    }
    let serve = Serve::start();
    // Standard input, output and error, and what the caller of the test left open.
    let Some(of_caller) = serve.inheritable() else {
        return println!("skipped: this user may not look at the descriptors of the program");
    };
    let disk = json!({ "id": "disk", "type": "virtio-blk", "path": "disk.raw", "root_port": false });
    let socket =
        json!({ "id": "vsock", "type": "virtio-vsock", "cid": 3, "socket": "vsock", "root_port": false });
    let mut config: Value = serde_json::from_str(&ours("halt.elf")).unwrap();
    config["devices"].as_array_mut().unwrap().extend([disk, socket]);
    config["console"] = json!({ "type": "socket", "path": "console" });
    fs::write(serve.folder.path().join("disk.raw"), vec![0; 1 << 20]).unwrap();
    serve.done("/egm/v1/machine", &config.to_string());
    serve.done("/api/v1/vm.boot", "");
    assert_eq!(serve.inheritable().unwrap(), of_caller);
    serve.done("/api/v1/vm.reboot", "");
    while serve.state() != "running" {
        std::thread::yield_now();
    }
    assert_eq!(serve.inheritable().unwrap(), of_caller);
}

#[test]
fn many_reboots_leave_no_descriptor_and_keep_process_and_socket() {
    if !kvm() {
        return;
    }
    let serve = Serve::created("halt.elf");
    serve.done("/api/v1/vm.boot", "");
    let socket = fs::symlink_metadata(serve.path()).unwrap().ino();
    let mut first = None;
    for number in 0..REBOOTS {
        serve.done("/api/v1/vm.reboot", "");
        // The only client of this execution, so that each count has one connection.
        let mut client = BufReader::new(UnixStream::connect(serve.path()).unwrap());
        while !is_running(&mut client) {
            std::thread::yield_now();
        }
        let Some(count) = serve.descriptors() else {
            return println!("skipped: this user may not look at the descriptors of the program");
        };
        assert_eq!(*first.get_or_insert(count), count, "reboot {number}");
    }
    assert_eq!(fs::symlink_metadata(serve.path()).unwrap().ino(), socket);
    serve.signal(Signal::INT);
    serve.assert_ends_well();
}

/// Whether the machine runs, by a connection that stays open.
fn is_running(client: &mut BufReader<UnixStream>) -> bool {
    client.get_mut().write_all(b"GET /egm/v1/machine HTTP/1.1\r\n\r\n").unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        assert!(client.read_line(&mut line).unwrap() > 0, "no answer");
        if let Some(bytes) = line.strip_prefix("Content-Length: ") {
            length = bytes.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    client.read_exact(&mut body).unwrap();
    serde_json::from_slice::<Value>(&body).unwrap()["state"] == "running"
}
